// Answers questions with the picker's evaluator under Node: JSON on stdin, JSON on stdout.
const { readFileSync } = require("node:fs");
const { join } = require("node:path");

const [, , folder, ...names] = process.argv;
for (const name of names) require(join(folder, name));
require("./answer.js");

const { document, questions, remedies, models } = JSON.parse(readFileSync(0, "utf8"));
const registry = new attnreg.Registry(document);
const answers = questions.map((question) => answerQuestion(registry, question, remedies, models));
process.stdout.write(JSON.stringify(answers));
