// attnreg itself, in WebAssembly: for what the evaluator does not read, a config.json or YAML. Loaded when first needed.
(function (attnreg) {
  "use strict";

  /** Python cannot run in this browser, or on this site. */
  class UnavailableError extends Error {}

  /** A file that Python in a browser cannot read. */
  class UnreadableError extends Error {}

  // brackets within brackets: the stack of Python is small here
  const DEEPEST = 300;
  const pending = new Map();
  let worker = null;
  let asked = 0;

  /** What the worker runs. It has no page and may read no file of a disk: all that it needs comes in its first message. */
  function work() {
    /** Bytes of a file of the runtime: scripts hold them, compressed. */
    async function unpacked(text) {
      const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return new Uint8Array(await new Response(stream).arrayBuffer());
    }

    async function start(packed) {
      const files = Object.fromEntries(
        await Promise.all(Object.entries(packed).map(async ([name, text]) => [name, await unpacked(text)])),
      );
      const script = (name) => URL.createObjectURL(new Blob([files[name]], { type: "text/javascript" }));
      const { loadPyodide } = await import(script("pyodide.mjs"));
      const { default: createPyodideModule } = await import(script("pyodide.asm.mjs"));
      const types = { "pyodide.asm.wasm": "application/wasm" };
      // the loader asks for its files by address; all of them are here
      self.fetch = async (address) => {
        const name = String(address).split("/").pop();
        return new Response(files[name], { headers: { "Content-Type": types[name] ?? "application/octet-stream" } });
      };
      const python = await loadPyodide({
        createPyodideModule,
        indexURL: "https://nowhere.invalid/",
        env: { ATTNREG_PLUGINS: "off", NO_COLOR: "1", HOME: "/home/pyodide" },
        checkAPIVersion: true,
      });
      python.unpackArchive(files["packages.zip"], "zip");
      return python.pyimport("picker.browser");
    }

    let starting = null;
    self.onmessage = async ({ data: { number, name, given, packed } }) => {
      try {
        starting ??= start(packed);
        self.postMessage({ number, answer: (await starting)[name](...given) });
      } catch (error) {
        self.postMessage({ number, error: String(error.message ?? error) });
      }
    };
  }

  /** A worker, and the files of Python for its first message: a page from a disk fetches none, so scripts hold them. */
  async function start() {
    if (typeof WebAssembly !== "object") throw new UnavailableError("this browser has no WebAssembly, which runs Python here");
    try {
      await Promise.all(["runtime", "packages"].map((name) => attnreg.store.load(`python/${name}.js`)));
    } catch {
      throw new UnavailableError("this site was built without Python for the browser, which reads such files");
    }
    const url = URL.createObjectURL(new Blob([`(${work})()`], { type: "text/javascript" }));
    const started = new Worker(url, { type: "module" });
    started.onmessage = ({ data: { number, answer, error } }) => {
      const { resolve, reject } = pending.get(number);
      pending.delete(number);
      if (error === undefined) resolve(JSON.parse(answer));
      else reject(new Error(error));
    };
    started.onerror = (event) => {
      for (const { reject } of pending.values()) reject(new UnavailableError(`Python did not start: ${event.message}`));
      pending.clear();
      worker = null;
    };
    started.packed = window.attnregPython;
    return started;
  }

  /** A function of tools/picker/browser.py, called; it answers with JSON. The first call takes seconds. */
  async function call(name, ...given) {
    worker ??= start();
    let started;
    try {
      started = await worker;
    } catch (error) {
      worker = null;
      throw error;
    }
    const { packed } = started;
    started.packed = undefined;
    const number = ++asked;
    return new Promise((resolve, reject) => {
      pending.set(number, { resolve, reject });
      started.postMessage({ number, name, given, packed });
    });
  }

  /** The text of a file that Python will read. Throws for one nested deeper than it can read: its stack would end. */
  async function textOf(file) {
    const text = await file.text();
    let depth = 0;
    for (const mark of text.replace(/"(?:[^"\\]|\\.)*"/g, "").match(/[[\]{}]/g) ?? []) {
      depth += mark === "[" || mark === "{" ? 1 : -1;
      if (depth > DEEPEST) throw new UnreadableError(`${file.name} is nested too deeply to be read`);
    }
    return text;
  }

  Object.assign(attnreg, { python: { call, textOf }, UnavailableError });
})((globalThis.attnreg ??= {}));
