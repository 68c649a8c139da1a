// Compiles modules of Python for a browser: name -> source as JSON on stdin, name -> bytecode in base64 on stdout.
import { join } from "node:path";
import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

const given = await text(process.stdin);
const folder = process.argv[2];
const { loadPyodide } = await import(pathToFileURL(join(folder, "pyodide.mjs")));
const python = await loadPyodide({ indexURL: `${folder}/` });
python.globals.set("given", given);
process.stdout.write(
  python.runPython(`
import base64, importlib.util, json, marshal

def compiled(name, source):
    code = compile(source, name, "exec", dont_inherit=True)
    # the source is not there to be compared with: the rest of the head says nothing
    return base64.b64encode(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)).decode()

json.dumps({name: compiled(name, source) for name, source in json.loads(given).items()})
`),
);
