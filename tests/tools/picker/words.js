// What a page says of candidates that lost: JSON on stdin, JSON on stdout.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

require(join(process.argv[2], "answer.js"));
const candidates = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(candidates.map(attnreg.answer.verdictWords)));
