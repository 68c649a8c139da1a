// attnreg itself, in WebAssembly: it answers what the build has not. Its state is a line of the page.
(function (attnreg) {
  "use strict";

  /** Python cannot run in this browser, or on this site. */
  class UnavailableError extends Error {
    constructor(why) {
      super(`Python is not available: ${why}`);
    }
  }

  /** A file that Python in a browser cannot read. */
  class UnreadableError extends Error {}

  // brackets within brackets: the stack of Python is small here
  const DEEPEST = 300;
  const STATES = {
    loading: "Python is loading …: it answers what the build of this site has not.",
    ready: "Python is ready: it answers every question, in this browser.",
  };
  const pending = new Map();
  // a promise of the worker whose Python is ready
  let started = null;
  let asked = 0;

  /** What the worker runs. It has no page and may read no file of a disk: all that it needs comes in its first message. */
  function work() {
    const bytesOf = (text) => {
      if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
      const binary = atob(text);
      const bytes = new Uint8Array(binary.length);
      for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
      return bytes;
    };

    /** Bytes of a file of the runtime: scripts hold them, compressed. */
    async function unpacked(text) {
      const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
      return new Uint8Array(await new Response(stream).arrayBuffer());
    }

    /** Write the files of an archive where Python imports them. */
    function install(python, index, archive) {
      const root = python.pyimport("site").getsitepackages().toJs()[0];
      const made = new Set();
      for (const [name, start, end] of JSON.parse(new TextDecoder().decode(index))) {
        const path = `${root}/${name}`;
        const folder = path.slice(0, path.lastIndexOf("/"));
        if (!made.has(folder)) python.FS.mkdirTree(folder);
        made.add(folder);
        python.FS.writeFile(path, archive.subarray(start, end), { canOwn: true });
      }
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
      install(python, files["packages.json"], files.packages);
      const module = python.pyimport("picker.browser");
      module.start();
      return module;
    }

    let module = null;
    self.onmessage = async ({ data: { number, name, given, packed } }) => {
      try {
        module ??= start(packed);
        const answered = await module;
        self.postMessage({ number, answer: name === null ? "null" : answered[name](...given) });
      } catch (error) {
        self.postMessage({ number, error: String(error.message ?? error) });
      }
    };
  }

  function say(text, state) {
    document.body.dataset.python = state;
    document.getElementById("python-state").textContent = text;
  }

  function send(worker, message) {
    const number = ++asked;
    return new Promise((resolve, reject) => {
      pending.set(number, { resolve, reject });
      worker.postMessage({ number, ...message });
    });
  }

  /** A worker whose Python is ready. The files of Python are in its first message: a page from a disk fetches none, so scripts hold them. */
  async function begin() {
    if (typeof WebAssembly !== "object") throw new UnavailableError("this browser has no WebAssembly, which runs it");
    try {
      await Promise.all(["runtime", "packages"].map((name) => attnreg.store.load(`python/${name}`)));
    } catch {
      throw new UnavailableError("this site was built without it");
    }
    const url = URL.createObjectURL(new Blob([`(${work})()`], { type: "text/javascript" }));
    const worker = new Worker(url, { type: "module" });
    const fail = (text) => {
      const error = new UnavailableError(text);
      for (const { reject } of pending.values()) reject(error);
      pending.clear();
      worker.terminate();
      return error;
    };
    worker.onmessage = ({ data: { number, answer, error } }) => {
      const { resolve, reject } = pending.get(number);
      pending.delete(number);
      if (error === undefined) resolve(JSON.parse(answer));
      else reject(new Error(error));
    };
    worker.onerror = (event) => {
      started = null;
      unavailable(fail(`it stopped: ${event.message}`));
    };
    try {
      await send(worker, { name: null, packed: window.attnregPython });
    } catch (error) {
      throw fail(`it did not start: ${error.message}`);
    }
    return worker;
  }

  function unavailable(error) {
    say(`${error.message}. The answers here are those that the build computed.`, "unavailable");
  }

  /** Start Python, once; the promise is kept when it is ready. Rejects with `UnavailableError`. */
  function ready() {
    if (started === null) {
      say(STATES.loading, "loading");
      started = begin();
      started.then(
        () => say(STATES.ready, "ready"),
        (error) => {
          started = null;
          unavailable(error);
        },
      );
    }
    return started;
  }

  /** Start Python when the page has nothing to do. */
  function startIdle() {
    (window.requestIdleCallback ?? setTimeout)(() => ready().catch(() => {}));
  }

  /** A function of tools/picker/browser.py, called; it answers with JSON. */
  async function call(name, ...given) {
    return send(await ready(), { name, given });
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

  Object.assign(attnreg, { python: { ready, startIdle, call, textOf }, UnavailableError });
})((globalThis.attnreg ??= {}));
