// The search: MiniSearch over the sections of all pages, loaded when the field is first used.
"use strict";
(() => {
  const field = document.getElementById("search");
  const found = document.getElementById("found");
  const root = document.body.dataset.root;
  const MOST = 12;
  // pages about one thing before the tables of everything
  const BOOST = { guide: 0.3, list: 0.5, change: 0.5, "model family": 0.8 };
  // who names a model and a GPU asks for the model on that GPU, who means an engine names it, and a backend is more than its formats
  const [NAMED, OF_ENGINE] = [3, 0.6];
  let loaded = null;
  let data = null;

  // gpt-oss-120b is a word, and so are its parts and what ends it, of which a reader types the start: oss-120; _ . and - are alike
  const words = (text) => (text.toLowerCase().match(/[a-z0-9]+(?:[._-][a-z0-9]+)*/g) || []).map((word) => word.replace(/[._]/g, "-"));
  const parts = (text) => words(text).flatMap((word) => {
    const split = word.split("-");
    return split.length > 1 ? [word, ...split, ...split.slice(1, -1).map((_, i) => split.slice(i + 1).join("-"))] : [word];
  });

  function script(name) {
    return new Promise((resolve, reject) => {
      const element = document.createElement("script");
      element.src = `${root}assets/${name}`;
      element.onload = resolve;
      element.onerror = () => reject(new Error(`${name} is missing`));
      document.head.append(element);
    });
  }

  function load() {
    loaded ||= Promise.all([script("minisearch.js"), script("search-index.js")]).then(() => {
      data = window.attnregIndex;
      const index = new window.MiniSearch({
        fields: ["title", "heading", "text"],
        storeFields: ["page", "anchor", "heading"],
        tokenize: parts,
        processTerm: (term) => term,
        searchOptions: {
          tokenize: words,
          combineWith: "AND",
          prefix: true,
          boost: { title: 12, heading: 3 },
          boostDocument: (id, term, { page }) => boost(term, ...data.pages[page]),
        },
      });
      index.addAll(data.sections.map(([page, anchor, heading, text], id) => {
        const [path, title] = data.pages[page];
        return { id, page, anchor, heading, text: `${engine(path)} ${text}`, title };
      }));
      return index;
    });
    return loaded;
  }

  // vllm-0.33.0, of the pages of its registry
  const engine = (path) => (/^(?:vllm|sglang)-[^/]+/.exec(path) || [""])[0];

  function boost(term, path, title, kind) {
    const named = kind === "model" ? parts(title).includes(term) : ["model family", "backend"].includes(kind) && words(title)[0] === term;
    return (BOOST[kind] || 1) * (named ? NAMED : 1) * (engine(path) ? OF_ENGINE : 1);
  }

  // of each page the section whose heading has words of the query, else the first one that holds all; the best page first
  async function search(query) {
    const index = await load();
    const best = new Map();
    const isNamed = ({ match }) => Object.values(match).some((fields) => fields.includes("heading"));
    for (const hit of index.search(query)) {
      const known = best.get(hit.page);
      if (!known || (hit.id < known.id && !isNamed(known))) best.set(hit.page, hit);
    }
    return [...best.values()];
  }
  window.attnregSearch = async (query) => (await search(query)).map((hit) => data.pages[hit.page][0]);

  let selected = -1;
  const links = () => [...found.querySelectorAll("a")];
  function close() {
    found.hidden = true;
    field.setAttribute("aria-expanded", "false");
    field.removeAttribute("aria-activedescendant");
  }
  function select(next) {
    const all = links();
    if (!all.length) return;
    selected = (next + all.length) % all.length;
    all.forEach((link, i) => link.setAttribute("aria-selected", String(i === selected)));
    field.setAttribute("aria-activedescendant", all[selected].id);
    all[selected].scrollIntoView({ block: "nearest" });
  }
  function show(results) {
    found.replaceChildren();
    selected = -1;
    field.removeAttribute("aria-activedescendant");
    results.slice(0, MOST).forEach((hit, i) => {
      const [path, title, kind] = data.pages[hit.page];
      const link = document.createElement("a");
      link.id = `found-${i}`;
      link.href = root + path + (hit.anchor ? `#${hit.anchor}` : "");
      link.tabIndex = -1;
      link.setAttribute("role", "option");
      link.setAttribute("aria-selected", "false");
      const small = document.createElement("small");
      const registry = /^([^/]+)\/(?:backends|architectures|features|kv_dtypes)\//.exec(path);
      small.textContent = [kind, registry && registry[1], hit.heading].filter(Boolean).join(" · ");
      link.append(title, small);
      found.append(link);
    });
    if (!results.length) {
      const none = document.createElement("p");
      none.textContent = "No page has all of these words.";
      found.append(none);
    }
    found.hidden = false;
    field.setAttribute("aria-expanded", "true");
  }

  field.addEventListener("focus", () => load().catch(() => {}), { once: true });
  field.addEventListener("input", async () => {
    const query = field.value;
    if (!query.trim()) { close(); return; }
    try {
      const results = await search(query);
      if (query === field.value) show(results);
    } catch (error) {
      window.attnregSite.notice(`The search cannot answer: ${error.message}.`, "error");
    }
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") { event.preventDefault(); select(selected + 1); }
    else if (event.key === "ArrowUp") { event.preventDefault(); select(selected - 1); }
    else if (event.key === "Escape") close();
    else if (event.key === "Enter") {
      event.preventDefault();
      const all = links();
      if (all.length && !found.hidden) location.href = all[Math.max(selected, 0)].href;
    }
  });
  document.querySelector("form.search").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) close(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(input|select|textarea)$/i.test(event.target.tagName)) { event.preventDefault(); field.focus(); }
  });
})();
