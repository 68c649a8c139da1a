// An answer, as tools/picker/view.py makes it, as elements of a page.
(function (attnreg) {
  "use strict";

  /** An element with attributes and children; a child is an element or a text. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const SIGNS = { chosen: "chosen", unknown: "unknown", none: "refused" };
  const CLASSES = { "▹": "runs", "!": "warn" };

  const sign = (name) => element("i", { class: `sign ${name}` });

  // a model with many kinds of layers has the verdicts of these unfolded
  const FIRST_OPEN = 4;

  /** A line of data as a link to the page that shows it; as text, where the site has no page of its file. */
  function place(where) {
    const [file, line] = where.split(/:(?=\d+$)/);
    const short = where.replace(/^.*\//, "");
    if (!window.attnregPicker.files.includes(file)) return element("span", { class: "where" }, short);
    const href = `${document.body.dataset.root}files/${file}.html#L${line}`;
    return element("a", { class: "where", href }, short);
  }

  /** A sentence and the line of data that it stands on. */
  const sentence = ([text, where], mark = "") => [`${mark} ${text} `.trimStart(), where ? place(where) : null];

  /** One stop of the way through the order: a candidate, with its reasons and what would change it. */
  function stop(kind, name, reasons, remedy = "") {
    const said = reasons.map((reason) => element("li", {}, ...sentence(reason)));
    if (remedy) said.push(element("li", { class: "remedy" }, `↳ ${remedy}`));
    return element("li", { class: kind }, element("span", { class: "stop" }, sign(kind)), element("span", { class: "name" }, name), element("ul", {}, ...said));
  }

  const isSpare = ({ reasons }) => reasons.every(([text]) => text.startsWith("valid too"));

  function verdict({ kind, name, rank, how, lines, others }) {
    const mark = SIGNS[kind];
    const tone = { chosen: "good", unknown: "muted", none: "bad" }[kind];
    const winner = element("strong", { class: tone }, sign(mark), name);
    const out = [element("p", { class: "winner" }, winner, " ", element("span", { class: "muted" }, how))];
    for (const { mark: point, line } of lines) {
      out.push(element("p", { class: CLASSES[point] ?? "line" }, ...sentence(line, point)));
    }
    if (others.length > 0) {
      const stops = others.map((one) => [one.rank, stop(isSpare(one) ? "spare" : "refused", one.name, one.reasons, one.remedy)]);
      if (kind === "chosen") stops.push([rank, stop("chosen", name, [[how, ""]])]);
      stops.sort(([a], [b]) => a - b);
      out.push(element("ol", { class: "path", "aria-label": "The way through the order" }, ...stops.map(([, made]) => made)));
    }
    return out;
  }

  function table({ title, head, rows }) {
    const line = (cell, values, scope) => element("tr", {}, ...values.map((text, i) => {
      return i === 0 || cell === "th" ? element("th", { scope: i === 0 ? scope : "col" }, text) : element("td", { "data-label": head[i] }, text);
    }));
    const body = rows.map((values) => line("td", values, "row"));
    const made = element("table", { class: "kv stack" }, element("thead", {}, line("th", head, "col")), element("tbody", {}, ...body));
    return [element("h2", {}, title), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, made)];
  }

  /** Sets of layers with the same verdicts, each set with all its headings. */
  function together(answers) {
    const alike = new Map();
    for (const { heading, verdicts } of answers) {
      const key = JSON.stringify(verdicts);
      alike.set(key, { headings: [...(alike.get(key)?.headings ?? []), heading], verdicts });
    }
    return [...alike.values()];
  }

  function asked({ headings, verdicts }, i) {
    const names = verdicts.map(({ name }) => name).join(", ");
    const head = element("summary", {}, element("h2", {}, ...headings.flatMap((text) => [element("span", {}, text), " "])), element("span", { class: "muted" }, names));
    return element("details", { class: "asked fold", ...(i < FIRST_OPEN ? { open: "" } : {}) }, head, ...verdicts.flatMap(verdict));
  }

  /** The whole answer. */
  function render({ title, answers, blocks, tables, notes }) {
    return [
      element("p", { class: "muted small" }, title),
      ...together(answers).map(asked),
      ...blocks.map((line) => element("p", {}, ...sentence(line))),
      ...tables.flatMap(table),
      ...notes.map((note) => element("p", { class: "muted" }, `note: ${note}`)),
    ];
  }

  attnreg.answer = { element, render };
})((globalThis.attnreg ??= {}));
