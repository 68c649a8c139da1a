// The page that compares: `attnreg diff`, run by Python in the browser. Its address holds the question.
(function (attnreg) {
  "use strict";

  const field = (id) => document.getElementById(id);
  const NAMES = ["before", "after", "where"];
  let overlay = null;

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
    const after = overlay === null ? field("after").value : overlay.name;
    return ["diff", field("before").value, after, ...(field("where").value ? ["--arch", field("where").value] : [])];
  }

  async function compare() {
    const words = command();
    const line = `attnreg ${words.join(" ")}`;
    const asked = new URLSearchParams(NAMES.map((name) => [name, field(name).value]));
    history.replaceState(null, "", `#${asked}`);
    show("", `${line}: Python starts once, which takes seconds …`);
    // let the page be drawn first
    await new Promise((drawn) => setTimeout(drawn, 30));
    try {
      if (overlay !== null) await attnreg.python.call("write", overlay.name, overlay.text);
      const { status, out, err } = await attnreg.python.call("command", ...words);
      const said = ["Nothing changes", "Something changes", "The data has problems"][Math.min(status, 2)];
      answered(out + err, `${said}: ${line}`);
    } catch (error) {
      answered("", String(error.message));
    }
  }

  async function take([file]) {
    try {
      overlay = { name: file.name, text: await attnreg.python.textOf(file) };
    } catch (error) {
      overlay = null;
      return answered("", String(error.message));
    }
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
  field("after").addEventListener("change", () => { overlay = null; });
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
  if (whole) compare();
})((globalThis.attnreg ??= {}));
