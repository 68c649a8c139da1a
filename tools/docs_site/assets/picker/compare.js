// The page that compares. Two releases are answered by the build, on some GPUs; everything is answered by `attnreg diff`,
// run by Python in the browser for one architecture after another. The address holds the question.
(function (attnreg) {
  "use strict";

  const { element } = attnreg.answer;
  const field = (id) => document.getElementById(id);
  const NAMES = ["before", "after", "where"];
  const SAID = ["Nothing changes", "Something changes", "The data has problems", "Nothing changes that is known"];
  const { models, pairs } = JSON.parse(field("compare-site").textContent);
  const bundled = [...field("before").options].map((option) => option.value);
  const archs = [...field("where").options].map((option) => option.value).filter(Boolean);
  // the overlays that were dropped on the page: name of the file -> its text
  const overlays = new Map();
  let comparisons = 0;

  const code = (text) => element("code", {}, text);

  /** A table of moves: rows of before, after, [[architectures, models]], reasons. */
  function table(rows, label) {
    const head = ["before", "after", "models", "on", "why"];
    const lines = rows.map(([before, after, where, why]) => {
      const named = [...new Set(where.flatMap(([, names]) => names))];
      const on = [...new Set(where.flatMap(([names]) => names))];
      const cells = [code(after), named.join(", "), on.join(", "), element("span", {}, why.join(". "))];
      return element("tr", {}, element("th", { scope: "row" }, code(before)), ...cells.map((cell, i) => element("td", { "data-label": head[i + 1] }, cell)));
    });
    const titles = element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)));
    const made = element("table", { class: "stack" }, element("thead", {}, titles), element("tbody", {}, ...lines));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, made);
  }

  const title = ({ backend, variant, problem }) => (backend ? [backend, variant].filter(Boolean).join("/") : problem ? "not known" : "none");

  /** The moves of `attnreg diff --json` as rows of the table: equal moves of several models and architectures are one. */
  function grouped(moves) {
    const alike = new Map();
    for (const { model, platform, before, after, changes, why } of moves) {
      const reasons = [...changes, ...why.map(({ side, text, where }) => `${side}: ${text}${where ? ` [${where.replace(/^.*\//, "").replace(/:\d+$/, "")}]` : ""}`)];
      const row = [title(before), title(after), [], reasons];
      const key = JSON.stringify(row);
      if (!alike.has(key)) alike.set(key, row);
      alike.get(key)[2].push([[platform.arch], [model]]);
    }
    return [...alike.values()];
  }

  /** All configurations that change, for a table: the backends, and for which requests. */
  function everywhere({ changes }) {
    const rows = changes.map(({ before, after, frame, archs: on }) => {
      return [before ?? "none", after ?? "none", [[on, ["every configuration"]]], frame.map(({ facet, values }) => `${facet} ${values}`)];
    });
    return [element("h2", {}, "All configurations"), table(rows, "All configurations")];
  }

  function show(status, ...parts) {
    field("summary").textContent = status;
    field("difference").replaceChildren(...parts);
  }

  /** Show an answer, and count it. */
  function answered(status, ...parts) {
    show(status, ...parts);
    field("progress").hidden = true;
    document.body.dataset.answered = String(Number(document.body.dataset.answered ?? 0) + 1);
  }

  function progress(text, value, most) {
    field("progress").hidden = false;
    const bar = field("progress").querySelector("progress");
    bar.max = most;
    bar.value = value;
    field("progress").querySelector("span").textContent = text;
  }

  /** The words of the command. */
  function command() {
    return ["diff", field("before").value, field("after").value, ...(field("where").value ? ["--arch", field("where").value] : [])];
  }

  const errorBox = (text) => element("p", { class: "notice error message" }, text);

  /** Answer by Python: model after model on each architecture, then all configurations. */
  async function byPython(isAsked) {
    const [, before, after] = command();
    const line = `attnreg ${command().join(" ")}`;
    const where = field("where").value;
    const some = where ? [where] : archs;
    progress("Python is loading …", 0, some.length + 1);
    for (const [name, text] of overlays) if ([before, after].includes(name)) await attnreg.python.call("write", name, text);
    const moves = [];
    const notes = new Set();
    let worst = 0;
    const asked = models.split(" ").flatMap((model) => ["--model", model]);
    for (const [i, arch] of some.entries()) {
      progress(`The well-known models on ${arch}, ${i + 1} of ${some.length} …`, i, some.length + 1);
      const { status, out, err } = await attnreg.python.call("command", "diff", before, after, "--arch", arch, ...asked, "--json");
      if (!isAsked()) return;
      if (!out) {
        // a registry of another engine may not know this one
        if (i === 0 || where) return answered(`${SAID[2]}: ${line}`, errorBox(err));
        notes.add(`${arch}: ${err}`);
        continue;
      }
      worst = Math.max(worst, status === 3 ? 0 : status);
      const found = JSON.parse(out);
      moves.push(...found.moves);
      found.notes.forEach((note) => notes.add(note));
      show(`${moves.length} moves so far`, table(grouped(moves), "Moves"));
    }
    progress("All other configurations …", some.length, some.length + 1);
    const { status, out } = await attnreg.python.call("command", ...command(), "--json");
    if (!isAsked()) return;
    const all = out ? JSON.parse(out).all_configurations : null;
    worst = Math.max(worst, out ? status : 0);
    const parts = [
      element("h2", {}, "Well-known models"),
      moves.length > 0 ? table(grouped(moves), "Moves") : element("p", {}, "No well-known model moves."),
      ...(all && all.changes.length > 0 ? everywhere(all) : []),
      ...[...notes].map((note) => element("p", { class: "muted small" }, `note: ${note}`)),
    ];
    answered(`${SAID[Math.min(worst, 3)]}: ${line}`, ...parts);
  }

  /** The moves that the build knows of two releases, on some GPUs; Python answers the rest when it is asked. */
  async function byBuild(pair, isAsked) {
    const { archs: on, rows, notes } = await attnreg.store.get(`compare/${pair}`);
    if (!isAsked()) return;
    const more = element("button", { type: "button" }, "Every architecture and configuration, by Python");
    more.addEventListener("click", () => compare(true));
    const page = element("a", { class: "button", href: `${document.body.dataset.root}changes/${pair}.html` }, "The page of this change");
    answered(
      rows.length > 0 ? `Something changes on ${on.join(", ")}` : `No well-known model moves on ${on.join(", ")}`,
      ...(rows.length > 0 ? [table(rows, "Moves")] : []),
      ...notes.map((note) => element("p", { class: "muted small" }, `note: ${note}`)),
      element("p", { class: "actions" }, page, more),
    );
  }

  async function compare(whole = false) {
    const number = ++comparisons;
    const isAsked = () => number === comparisons;
    const asked = new URLSearchParams(NAMES.map((name) => [name, field(name).value]));
    history.replaceState(null, "", `#${asked}`);
    show("");
    const pair = `${field("before").value}-to-${field("after").value}`;
    const built = whole !== true && field("where").value === "" && pairs.includes(pair);
    try {
      await (built ? byBuild(pair, isAsked) : byPython(isAsked));
    } catch (error) {
      const instead = error instanceof attnreg.UnavailableError ? `. The command compares: attnreg ${command().join(" ")}` : "";
      if (isAsked()) answered(`${error.message}${instead}`);
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
      return answered(String(error.message));
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
  // a link that asks for both sides is answered, and so is the page without one, from what the build knows
  (whole || asked.size === 0 ? compare() : Promise.resolve()).then(attnreg.python.startIdle);
})((globalThis.attnreg ??= {}));
