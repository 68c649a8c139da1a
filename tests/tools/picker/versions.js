// Whether versions meet specifiers: JSON on stdin, JSON on stdout.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

require(join(process.argv[2], "versions.js"));
const questions = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(questions.map(([specifiers, version]) => attnreg.versions.contains(specifiers, version))));
