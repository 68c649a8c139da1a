// The grid of another release or GPU, the columns of a model, and what stands behind a cell. The address holds all of it.
(function (attnreg) {
  "use strict";

  const site = JSON.parse(document.getElementById("grid-site").textContent);
  const root = document.body.dataset.root;
  const field = (id) => document.getElementById(`grid-${id}`);
  const NAMES = ["registry", "vendor", "arch", "model", "cell"];
  const CLASS = { native: "y", emulated: "e", unknown: "u", refused: "r" };
  const narrow = matchMedia("(max-width: 48rem)");
  const box = document.getElementById("grid");
  const panel = document.getElementById("cell");
  // what is shown: the fields of NAMES
  let state = { ...site.first, vendor: "", model: "", cell: "" };
  let file = null;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const sign = (name) => element("i", { class: `sign ${name}` });
  const page = (backend) => `${root}${state.registry}/backends/${backend}.html`;
  const escaped = (text) => String(text).replace(/[&<>"]/g, (mark) => `&#${mark.charCodeAt(0)};`);

  /** The numbers of the columns to be shown. */
  function columns() {
    const needs = state.model ? new Set(site.models[state.model]) : null;
    return [...file.columns.keys()].filter((i) => !needs || needs.has(keyOf(i)));
  }

  const keyOf = (i) => `${file.columns[i][0]}:${file.columns[i][1]}`;
  const cellOf = (backend, i) => file.cells[file.lines[file.on[state.arch].rows[backend]][i]];

  /** Where the cell was run: its runs on this architecture, of a backend of attnreg's own. */
  const runs = (backend, i) => (file.proofs[backend] ?? []).filter(([arch, , cases]) => arch === state.arch && keyOf(i) in cases);

  function asTable(shown) {
    const groups = [];
    for (const i of shown) {
      const facet = file.columns[i][0];
      if (groups.at(-1)?.facet === facet) groups.at(-1).count++;
      else groups.push({ facet, count: 1 });
    }
    const starts = new Set();
    let at = 0;
    for (const { count } of groups) { starts.add(shown[at]); at += count; }
    const edge = (i) => (starts.has(i) ? " b" : "");
    const cols = groups.map(({ count }) => `<col class="b">${count > 1 ? `<col span="${count - 1}">` : ""}`);
    const out = [`<table class="grid"><colgroup><col class="name">${cols.join("")}</colgroup><thead><tr><td></td>`];
    for (const { facet, count } of groups) out.push(`<th scope="colgroup" colspan="${count}">${escaped(file.groups[facet])}</th>`);
    out.push('</tr><tr><th scope="col">backend</th>');
    for (const i of shown) out.push(`<th scope="col" class="${edge(i)}"><span>${escaped(file.columns[i][1])}</span></th>`);
    out.push("</tr></thead><tbody>");
    for (const backend of Object.keys(file.on[state.arch].rows)) {
      out.push(`<tr data-backend="${escaped(backend)}"><th scope="row"><a href="${page(backend)}">${escaped(backend)}</a></th>`);
      for (const i of shown) {
        const [name] = cellOf(backend, i);
        // a run on a device that stood in for another one proves nothing there
        const proof = runs(backend, i).some(([, , , elsewhere]) => !elsewhere) ? " proof" : "";
        out.push(`<td class="${CLASS[name]}${edge(i)}${proof}">${name}${proof && ", proven"}</td>`);
      }
      out.push("</tr>");
    }
    const made = element("div", { class: "scroll gridbox", role: "region", tabindex: "0", "aria-label": "Backends and features" });
    made.innerHTML = `${out.join("")}</tbody></table>`;
    return made;
  }

  function asCards(shown) {
    const words = (backend, some) => element("div", { class: "words" }, ...some.map((i) => {
      const [name] = cellOf(backend, i);
      return element("button", { type: "button", class: CLASS[name], "data-backend": backend, "data-column": i }, sign(name), file.columns[i][1]);
    }));
    const cards = Object.keys(file.on[state.arch].rows).map((backend) => {
      const parts = [];
      const refused = shown.filter((i) => cellOf(backend, i)[0] === "refused");
      for (const [facet, title] of Object.entries(file.groups)) {
        const some = shown.filter((i) => file.columns[i][0] === facet && !refused.includes(i));
        if (some.length > 0) parts.push(element("p", {}, title), words(backend, some));
      }
      if (refused.length > 0) parts.push(element("details", {}, element("summary", {}, `${refused.length} refused`), words(backend, refused)));
      return element("article", {}, element("h2", {}, element("a", { href: page(backend) }, backend)), ...parts);
    });
    return element("div", { class: "gridcards" }, ...cards);
  }

  function absent() {
    const entries = Object.entries(file.on[state.arch].absent);
    const lines = entries.map(([backend, why]) => {
      return element("li", {}, element("a", { href: page(backend) }, backend), " ", element("span", { class: "muted" }, why));
    });
    return element("details", { class: "absent" }, element("summary", {}, `${entries.length} backends do not run here`), element("ul", {}, ...lines));
  }

  function place(where, line) {
    const name = file.files[where];
    return element("a", { class: "where", href: `${root}files/${name}.html#L${line}` }, `${name.split("/").pop()}:${line}`);
  }

  /** What stands behind the chosen cell. */
  function showCell() {
    const [backend, ...rest] = state.cell.split(" ");
    const i = file ? file.columns.findIndex((_, number) => keyOf(number) === rest.join(" ")) : -1;
    panel.hidden = i < 0 || !(backend in file.on[state.arch].rows);
    for (const old of box.querySelectorAll("td.chosen")) old.classList.remove("chosen");
    if (panel.hidden) return;
    const [name, said] = cellOf(backend, i);
    const [facet, word, legend] = file.columns[i];
    const tried = runs(backend, i);
    const [source, url] = file.sources[backend];
    const close = element("button", { type: "button", class: "close", "aria-label": "Close" }, "✕");
    close.addEventListener("click", () => change({ cell: "" }));
    const badge = { native: "good", emulated: "warn", refused: "bad", unknown: "" }[name];
    panel.replaceChildren(
      close,
      element("h2", {}, `${backend}, ${file.groups[facet]}: ${word}`),
      element("p", {}, element("span", { class: `badge ${badge}` }, sign(name), name), ` on ${state.arch}. `, element("span", { class: "muted" }, legend)),
      element("ul", {}, ...said.map(([text, where, line]) => element("li", {}, `${text} `, place(where, line)))),
      element("p", { class: "small muted" }, "Source: ", url ? element("a", { href: url }, source) : source, ". Evidence: ",
        tried.length > 0 ? tried.map(([, device, cases, elsewhere]) => `${cases[keyOf(i)]} cases against float64 on ${device}${elsewhere ? ", in its place" : ""}`).join("; ")
          : state.registry === "default" ? "claimed; no run has tried it here." : "the engine's source; attnreg runs its own kernels alone."),
    );
    const row = box.querySelector(`tr[data-backend="${CSS.escape(backend)}"]`);
    const cell = row?.cells[columns().indexOf(i) + 1];
    cell?.classList.add("chosen");
    // a link's cell may be far down
    cell?.scrollIntoView({ block: "nearest" });
  }

  function show() {
    const shown = columns();
    box.replaceChildren(narrow.matches ? asCards(shown) : asTable(shown), absent());
    const backends = Object.keys(file.on[state.arch].rows);
    const every = backends.filter((backend) => shown.every((i) => cellOf(backend, i)[0] !== "refused"));
    const says = field("says");
    says.replaceChildren(`${backends.length} backends run here`);
    if (state.model) {
      const asked = `${root}pick.html#registry=${state.registry}&arch=${state.arch}&model=${state.model}`;
      says.append(`; ${every.length} refuse none of these words: ${every.join(", ") || "–"}. `, element("a", { href: asked }, "What is chosen"));
    }
    showCell();
  }

  function offer(select, items, value) {
    select.replaceChildren(...items.map(([name, text]) => new Option(text, name)));
    select.value = value;
  }

  /** Load what the state asks for, and show it. */
  async function draw() {
    const asked = state.registry;
    if (site.silent.includes(asked)) {
      file = null;
      panel.hidden = true;
      box.replaceChildren(element("p", { class: "notice" }, element("span", { class: "badge" }, sign("unknown"), "unknown"),
        ` ${site.titles[asked]} has no claims of what a backend serves: its steps name a backend. `,
        element("a", { href: `${root}${asked}/index.html` }, "What is known of its backends")));
      field("says").textContent = "";
      return;
    }
    const loaded = await attnreg.store.get(`grid/${asked}`);
    if (asked !== state.registry) return;
    file = loaded;
    const archs = file.archs.filter(([, platform]) => !state.vendor || platform === state.vendor);
    if (!archs.some(([name]) => name === state.arch)) state.arch = archs[0][0];
    offer(field("arch"), archs.map(([name, , title]) => [name, title]), state.arch);
    show();
    document.body.dataset.drawn = `${state.registry} ${state.arch} ${state.model}`;
  }

  async function change(fields) {
    Object.assign(state, fields);
    if (file === null || !("cell" in fields)) await draw();
    else showCell();
    const said = NAMES.filter((name) => state[name]).map((name) => [name, state[name]]);
    history.replaceState(null, "", `#${new URLSearchParams(said)}`);
  }

  /** The state of an address; what it names and the site does not have is said. */
  function open() {
    const asked = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const known = { registry: site.titles, vendor: site.vendors, model: site.models };
    for (const [name, value] of Object.entries(asked)) {
      if (name in known && !Object.hasOwn(known[name], value)) {
        window.attnregSite.notice(`This link asks for the ${name} ${value.slice(0, 80)}, which this site does not have.`, "warning");
      } else if (NAMES.includes(name)) state[name] = value;
    }
    for (const name of ["registry", "vendor", "model"]) field(name).value = state[name];
    return Object.keys(asked).length > 0 || narrow.matches;
  }

  for (const name of ["registry", "vendor", "arch", "model"]) {
    field(name).addEventListener("change", () => change({ [name]: field(name).value }));
  }
  narrow.addEventListener("change", () => file && show());

  /** The backend and the number of the column of what was pressed; the table of the build has no names. */
  async function pressed(target) {
    if (file === null) file = await attnreg.store.get(`grid/${state.registry}`);
    if (target.matches("button")) return [target.dataset.backend, Number(target.dataset.column)];
    return [target.closest("tr").dataset.backend ?? target.closest("tr").cells[0].textContent, columns()[target.cellIndex - 1]];
  }

  async function press(target) {
    const [backend, i] = await pressed(target);
    await change({ cell: `${backend} ${keyOf(i)}` });
    if (target.matches("td")) target.classList.add("chosen");
  }

  const PRESSED = ".grid tbody td, .gridcards button";
  box.addEventListener("click", (event) => {
    const target = event.target.closest(PRESSED);
    if (target) press(target);
  });
  // arrows walk through the cells, and Enter shows what stands behind one
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const cell = event.target.closest("td") ?? (step && event.target.matches(".gridbox") ? box.querySelector("tbody td") : null);
    if (!cell) return;
    if (event.key === "Enter") press(cell);
    if (!step) return;
    event.preventDefault();
    const rows = [...box.querySelectorAll("tbody tr")];
    const row = rows[rows.indexOf(cell.parentElement) + (event.target === cell ? step[0] : 0)];
    const next = row?.cells[cell.cellIndex + (event.target === cell ? step[1] : 0)];
    if (!next?.matches("td")) return;
    next.tabIndex = -1;
    next.focus();
  });

  attnreg.grid = { change };
  if (open()) change({});
  else attnreg.store.get(`grid/${state.registry}`).then((loaded) => {
    if (file === null) {
      file = loaded;
      offer(field("arch"), file.archs.map(([name, , title]) => [name, title]), state.arch);
    }
  });
})((globalThis.attnreg ??= {}));
