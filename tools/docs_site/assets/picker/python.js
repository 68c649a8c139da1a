// attnreg itself, in WebAssembly: for what the evaluator does not read, a config.json or YAML. Loaded when first needed.
(function (attnreg) {
  "use strict";

  /** Python cannot run in this browser, or on this site. */
  class UnavailableError extends Error {}

  let starting = null;

  /** Bytes of a file of the runtime: a page from a disk may fetch none, so scripts hold them, compressed. */
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  async function start() {
    if (typeof WebAssembly !== "object") throw new UnavailableError("this browser has no WebAssembly, which runs Python here");
    try {
      await Promise.all(["loader", "runtime", "packages"].map((name) => attnreg.store.load(`python/${name}.js`)));
    } catch {
      throw new UnavailableError("this site was built without Python for the browser, which reads such files");
    }
    const names = Object.keys(window.attnregPython);
    const files = Object.fromEntries(await Promise.all(names.map(async (n) => [n, await unpacked(window.attnregPython[n])])));
    delete window.attnregPython;
    const url = URL.createObjectURL(new Blob([files["pyodide.asm.mjs"]], { type: "text/javascript" }));
    const { default: createPyodideModule } = await import(url);
    const { fetch } = globalThis;
    const types = { "pyodide.asm.wasm": "application/wasm" };
    // the loader asks for its files by address; all of them are here
    globalThis.fetch = async (address) => {
      const name = String(address).split("/").pop();
      return new Response(files[name], { headers: { "Content-Type": types[name] ?? "application/octet-stream" } });
    };
    let python;
    try {
      python = await window.loadPyodide({
        createPyodideModule,
        indexURL: "https://nowhere.invalid/",
        env: { ATTNREG_PLUGINS: "off", NO_COLOR: "1", HOME: "/home/pyodide" },
        checkAPIVersion: true,
      });
    } finally {
      globalThis.fetch = fetch;
      URL.revokeObjectURL(url);
    }
    python.unpackArchive(files["packages.zip"], "zip");
    return python.pyimport("picker.browser");
  }

  /** A function of tools/picker/browser.py, called; it answers with JSON. The first call takes seconds. */
  async function call(name, ...given) {
    starting ??= start();
    try {
      const module = await starting;
      return JSON.parse(module[name](...given));
    } catch (error) {
      starting = null;
      throw error;
    }
  }

  Object.assign(attnreg, { python: { call }, UnavailableError });
})((globalThis.attnreg ??= {}));
