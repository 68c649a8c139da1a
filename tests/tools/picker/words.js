// Reads questions in words under Node: what the site knows, and texts, as JSON on stdin; on stdout of each its fields and
// the words that were not read.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

require(join(process.argv[2], "words.js"));
const { known, texts } = JSON.parse(readFileSync(0, "utf8"));
const read = texts.map((text) => {
  const { fields, unread } = attnreg.words.read(text, known);
  return [fields, unread];
});
process.stdout.write(JSON.stringify(read));
