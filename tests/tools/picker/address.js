// Reads addresses of the picker under Node: a registry's document and hashes as JSON on stdin, on stdout of each
// whether Python answers it, and the words of its command; and names of files as those of their models.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

const [, , folder, ...names] = process.argv;
globalThis.window = globalThis;
for (const name of names) require(join(folder, name));

const { document, ranks, hashes, files, bundled } = JSON.parse(readFileSync(0, "utf8"));
globalThis.attnregPicker = { ranks };
const registry = new attnreg.Registry(document);
const read = hashes.map((hash) => {
  const { question, unread } = attnreg.address.fromHash(hash);
  const { byPython, words } = attnreg.address;
  return { python: byPython(question, registry), words: words(question, registry, {}), unread };
});
const models = files.map((file) => attnreg.address.droppedName(file, bundled));
process.stdout.write(JSON.stringify({ read, models }));
