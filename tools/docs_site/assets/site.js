// What every page does beside its content: the theme, filters of tables, old links. Pages answer without it.
"use strict";
(() => {
  const root = document.body.dataset.root;

  function notice(text, kind = "info") {
    const box = document.createElement("div");
    box.className = `notice ${kind}`;
    box.setAttribute("role", kind === "error" ? "alert" : "status");
    box.textContent = text;
    document.getElementById("main").prepend(box);
    return box;
  }
  window.attnregSite = { root, notice };

  const theme = document.getElementById("theme");
  const isDark = () => {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  theme.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("attnreg-theme", next); } catch { /* a page from a disk may keep nothing */ }
  });

  // an address with ?registry=FINGERPRINT was copied while the registry was that one
  const meta = (name) => document.querySelector(`meta[name="attnreg-${name}"]`)?.content;
  const now = meta("fingerprint");
  const then = new URLSearchParams(location.search).get("registry");
  if (now && then && then !== now) {
    notice(`This link was made for another state of the registry ${meta("registry")}: fingerprint ${then.slice(0, 40)}. `
      + `This page shows ${now}; what it says may have changed since.`, "warning");
  }
  for (const button of document.querySelectorAll("button.copy-link")) {
    button.addEventListener("click", async () => {
      const link = new URL(location.href);
      link.search = `?registry=${now}`;
      history.replaceState(null, "", link);
      try {
        await navigator.clipboard.writeText(link.href);
        button.lastElementChild.textContent = "Copied";
      } catch {
        button.lastElementChild.textContent = "The address is the link";
      }
    });
  }

  // code can be copied: of a session its commands alone
  for (const box of document.querySelectorAll(".code")) {
    const text = box.querySelector("code").textContent;
    const commands = text.split("\n").filter((line) => line.startsWith("$ ")).map((line) => line.slice(2).replace(/\s+#.*$/, ""));
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(commands.length > 0 ? commands.join("\n") : text);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Not allowed";
      }
    });
    box.append(button);
  }

  // what an address names may be folded away
  const unfold = () => {
    for (let at = document.getElementById(decodeURIComponent(location.hash.slice(1))); at; at = at.parentElement) {
      if (at.matches("details")) at.open = true;
    }
  };
  unfold();
  window.addEventListener("hashchange", unfold);

  for (const [number, table] of document.querySelectorAll("table.filter").entries()) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 12) continue;
    const bar = document.createElement("div");
    bar.className = "filtering";
    const label = document.createElement("label");
    label.htmlFor = `filter-${number}`;
    label.textContent = "Filter rows";
    const input = document.createElement("input");
    input.id = label.htmlFor;
    input.type = "search";
    const count = document.createElement("output");
    count.setAttribute("for", input.id);
    // an empty first cell means the one above
    let first = "";
    const texts = rows.map((row) => {
      first = row.cells[0].textContent.trim() || first;
      return `${first} ${row.textContent}`.toLowerCase();
    });
    const filter = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        row.hidden = !words.every((word) => texts[i].includes(word));
        shown += row.hidden ? 0 : 1;
      });
      count.textContent = words.length ? `${shown} of ${rows.length}` : `${rows.length} rows`;
    };
    input.addEventListener("input", filter);
    bar.append(label, input, count);
    (table.closest(".scroll") || table).before(bar);
    filter();
  }
})();
