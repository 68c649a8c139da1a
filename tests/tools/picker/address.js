// Reads addresses of the picker under Node: lists of a registry, hashes and names of files as JSON on stdin; on stdout
// of each hash its command, itself again, what it has beside and whether the build answers it; of each file its model.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

require(join(process.argv[2], "address.js"));
const { lists, hashes, files, bundled } = JSON.parse(readFileSync(0, "utf8"));
const { fromHash, toHash, words, commandLine, isPlain, droppedName } = attnreg.address;
const read = hashes.map((hash) => {
  const { question, unread } = fromHash(hash);
  const asked = words(question, lists);
  return { words: asked, line: commandLine(asked), hash: toHash(question), unread, plain: isPlain(question, lists) };
});
process.stdout.write(JSON.stringify({ read, models: files.map((file) => droppedName(file, bundled)) }));
