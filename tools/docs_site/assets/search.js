// The search: the index is loaded when the field is first used. tests/support/site.py says the same in Python.
"use strict";
(() => {
  const field = document.getElementById("search");
  const found = document.getElementById("found");
  const root = document.body.dataset.root;
  const MOST = 12;
  let index = null;

  function words(text) {
    return (text.toLowerCase().match(/[a-z0-9]+(?:[._-][a-z0-9]+)*/g) || []).map((word) => word.replace(/[._]/g, "-"));
  }

  function load() {
    if (index) return Promise.resolve(index);
    return new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `${root}assets/search-index.js`;
      script.onload = () => {
        index = { ...window.attnregIndex, sorted: Object.keys(window.attnregIndex.words).sort() };
        resolve(index);
      };
      script.onerror = () => reject(new Error("the index of the search is missing"));
      document.head.append(script);
    });
  }

  // section -> 2 for the word itself, 1 for a longer one that begins so
  function sections({ words: postings, sorted }, word) {
    const out = new Map();
    let low = 0, high = sorted.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < word) low = middle + 1; else high = middle;
    }
    for (; low < sorted.length && sorted[low].startsWith(word); low++) {
      let number = 0;
      for (const gap of postings[sorted[low]]) {
        number += gap;
        out.set(number, Math.max(out.get(number) || 0, sorted[low] === word ? 2 : 1));
      }
    }
    return out;
  }

  function parts(text) {
    return words(text).flatMap((word) => (word.includes("-") ? [word, ...word.split("-")] : [word]));
  }

  function weight(text, word, exact, prefix) {
    const names = parts(text);
    return names.includes(word) ? exact : names.some((name) => name.startsWith(word)) ? prefix : 0;
  }

  function search(data, query) {
    const wanted = words(query);
    if (!wanted.length) return [];
    const hits = wanted.map((word) => sections(data, word));
    const best = new Map();
    for (const number of hits[0].keys()) {
      if (!hits.every((hit) => hit.has(number))) continue;
      const [page, anchor, heading] = data.sections[number];
      const [, title, kind] = data.pages[page];
      let score = kind === "guide" ? 0 : 2;
      wanted.forEach((word, i) => {
        score += hits[i].get(number) + weight(title, word, 12, 6) + weight(heading, word, 4, 2);
      });
      score -= parts(title).length / 8;
      if (!best.has(page) || best.get(page).score < score) best.set(page, { page, anchor, heading, score });
    }
    return [...best.values()].sort((a, b) => b.score - a.score || a.page - b.page);
  }
  window.attnregSearch = (query) => load().then((data) => search(data, query).map((hit) => data.pages[hit.page][0]));

  let selected = -1;
  const links = () => [...found.querySelectorAll("a")];
  function close() {
    found.hidden = true;
    field.setAttribute("aria-expanded", "false");
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
      const [path, title, kind] = index.pages[hit.page];
      const link = document.createElement("a");
      link.id = `found-${i}`;
      link.href = root + path + (hit.anchor ? `#${hit.anchor}` : "");
      link.setAttribute("role", "option");
      link.setAttribute("aria-selected", "false");
      const small = document.createElement("small");
      small.textContent = [kind, hit.heading].filter(Boolean).join(" · ");
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
      const data = await load();
      if (query === field.value) show(search(data, query));
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
