// The page that compares: `attnreg diff`, run by Python in the browser, or by the build. Its address holds the question.
(function (attnreg) {
  "use strict";

  const field = (id) => document.getElementById(id);
  const NAMES = ["before", "after", "where"];
  const bundled = [...field("before").options].map((option) => option.value);
  // the overlays that were dropped on the page: name of the file -> its text
  const overlays = new Map();
  let comparisons = 0;

  function show(text, status) {
    field("summary").textContent = status;
    field("difference").textContent = text;
    field("difference").hidden = text === "";
  }

  /** Show an answer, and count it. */
  function answered(text, status) {
    show(text, status);
    document.body.dataset.answered = String(Number(document.body.dataset.answered ?? 0) + 1);
  }

  /** The words of the command. */
  function command() {
    return ["diff", field("before").value, field("after").value, ...(field("where").value ? ["--arch", field("where").value] : [])];
  }

  /** Write an overlay, and answer by Python. */
  async function byPython(words) {
    for (const [name, text] of overlays) if (words.includes(name)) await attnreg.python.call("write", name, text);
    return attnreg.python.call("command", ...words);
  }

  async function compare() {
    const number = ++comparisons;
    const words = command();
    const line = `attnreg ${words.join(" ")}`;
    const asked = new URLSearchParams(NAMES.map((name) => [name, field(name).value]));
    history.replaceState(null, "", `#${asked}`);
    show("", `${line}: Python compares, once it is loaded …`);
    try {
      const built = words.join(" ") === field("compare").dataset.built ? await attnreg.store.get("compare") : null;
      const { status, out, err } = built ?? (await byPython(words));
      const said = ["Nothing changes", "Something changes", "The data has problems"][Math.min(status, 2)];
      if (number === comparisons) answered(out + err, `${said}: ${line}`);
    } catch (error) {
      const instead = error instanceof attnreg.UnavailableError ? `. The command compares: ${line}` : "";
      if (number === comparisons) answered("", `${error.message}${instead}`);
    }
  }

  /** Let both lists offer an overlay. */
  function offer(name) {
    for (const list of [field("before"), field("after")]) {
      if (![...list.options].some((option) => option.value === name)) list.append(new Option(`${name} (dropped)`, name));
    }
  }

  /** The path of a dropped file: the command takes a registry's name for that registry. */
  function pathOf(file) {
    return bundled.includes(file.name) ? `./${file.name}` : file.name;
  }

  /** Compare an overlay that was dropped with what stands before it; of several, the last two. */
  async function take(files) {
    const names = [...files].map(pathOf);
    try {
      for (const file of files) {
        overlays.set(pathOf(file), await attnreg.python.textOf(file));
        offer(pathOf(file));
      }
    } catch (error) {
      return answered("", String(error.message));
    }
    if (names.length > 1) field("before").value = names.at(-2);
    field("after").value = names.at(-1);
    await compare();
  }

  const asked = new URLSearchParams(location.hash.slice(1));
  let whole = asked.has("before") && asked.has("after");
  for (const name of NAMES) {
    const value = asked.get(name);
    if (value === null) continue;
    if ([...field(name).options].some((option) => option.value === value)) {
      field(name).value = value;
      continue;
    }
    whole = false;
    window.attnregSite.notice(`This link compares ${value.slice(0, 80)}, which this site does not have.`, "error");
  }
  field("compare").addEventListener("submit", (event) => {
    event.preventDefault();
    compare();
  });
  field("overlay").addEventListener("change", () => take(field("overlay").files));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("dropping", kind === "dragover");
      if (kind === "drop") take(event.dataTransfer.files);
    });
  }
  attnreg.compare = { take, compare };
  // a link that asks for both sides is answered
  (whole ? compare() : Promise.resolve()).then(attnreg.python.startIdle);
})((globalThis.attnreg ??= {}));
