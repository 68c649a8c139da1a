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

  const MARKS = { chosen: "▸", unknown: "?", none: "✗" };
  const CLASSES = { "▹": "runs", "!": "warn" };

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

  function other({ rank, name, reasons, remedy }) {
    return element(
      "li",
      { value: String(rank) },
      element("strong", {}, name),
      element("ul", {}, ...reasons.map((reason) => element("li", {}, ...sentence(reason)))),
      remedy ? element("p", { class: "remedy" }, `↳ ${remedy}`) : null,
    );
  }

  function verdict({ kind, name, how, lines, others }) {
    const winner = element("strong", { class: kind === "chosen" ? "good" : "bad" }, `${MARKS[kind]} ${name}`);
    const out = [element("p", { class: "winner" }, winner, " ", element("span", { class: "muted" }, how))];
    for (const { mark, line } of lines) {
      out.push(element("p", CLASSES[mark] ? { class: CLASSES[mark] } : {}, ...sentence(line, mark)));
    }
    if (others.length > 0) {
      const list = element("ol", { class: "losers" }, ...others.map(other));
      out.push(element("details", { open: "" }, element("summary", {}, `Why not the other ${others.length}`), list));
    }
    return out;
  }

  function table({ title, head, rows }) {
    const line = (cell, values, scope) => element("tr", {}, ...values.map((text, i) => {
      return i === 0 || cell === "th" ? element("th", { scope: i === 0 ? scope : "col" }, text) : element("td", {}, text);
    }));
    const body = rows.map((values) => line("td", values, "row"));
    const made = element("table", { class: "kv" }, element("thead", {}, line("th", head, "col")), element("tbody", {}, ...body));
    return [element("h2", {}, title), element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, made)];
  }

  /** The whole answer. */
  function render({ title, answers, blocks, tables, notes }) {
    return [
      element("p", { class: "muted" }, title),
      ...answers.map(({ heading, verdicts }) => {
        return element("div", { class: "asked" }, element("h2", {}, heading), ...verdicts.flatMap(verdict));
      }),
      ...blocks.map((line) => element("p", {}, ...sentence(line))),
      ...tables.flatMap(table),
      ...notes.map((note) => element("p", { class: "muted" }, `note: ${note}`)),
    ];
  }

  attnreg.answer = { element, render };
})((globalThis.attnreg ??= {}));
