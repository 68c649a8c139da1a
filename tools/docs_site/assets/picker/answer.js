// An explanation, in the form of `attnreg explain --json`, as elements of a page.
(function (attnreg) {
  "use strict";

  /** An element with attributes and children; a child is an element or a text. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  const short = (where) => where.replace(/^.*\//, "").replace(/:\d+$/, "");

  /** A line of data as a link to the page that shows it; as text, where the site has no page of its file. */
  function place(where) {
    const [, file, line] = /^(.*):(\d+):\d+$/.exec(where);
    if (!window.attnregPicker.files.includes(file)) return element("span", { class: "where" }, short(where));
    const href = `${document.body.dataset.root}files/${file}.html#L${line}`;
    return element("a", { class: "where", href }, short(where));
  }

  const title = (name, variant) => (variant ? `${name}/${variant}` : name);

  function chosenOf(selection) {
    return selection.candidates.find((c) => c.accepted && c.name === selection.backend?.name) ?? null;
  }

  function ordinal(rank) {
    const last = rank < 20 ? rank : rank % 10;
    return `${rank}${{ 1: "st", 2: "nd", 3: "rd" }[last] ?? "th"}`;
  }

  /** How a backend was chosen: 4th choice of 5 (order rocm/mha, priorities.yaml:31). */
  function howChosen(selection) {
    const { choice, order, requested, candidates, start, silence } = selection;
    const chosen = chosenOf(selection);
    if (start?.refused) {
      return `${start.refused.unknown ? "said" : "refused"} by ${start.refused.step}, ${short(start.refused.where)}`;
    }
    const naming = start?.steps.findLast((step) => "named" in step.sets && step.sets.named.after !== null);
    // where a fallback lets the order decide, the step that named a backend does not speak
    if (naming && candidates.length === 1 && candidates[0].where === naming.where) {
      return `named by ${naming.step}, ${short(naming.where)}`;
    }
    if (requested !== null) {
      const name = chosen ? "" : `${requested} `;
      return choice ? `${name}required by ${short(choice.where)}` : `${name}requested`;
    }
    const where = order ? `(order ${order.name}, ${short(order.where)})` : "(no order for this request)";
    if (chosen === null) return silence ?? where;
    if (choice !== null && chosen.rank === 1) return `preferred by ${short(choice.where)} ${where}`;
    return `${ordinal(chosen.rank)} choice of ${candidates.length} ${where}`;
  }

  /** The reasons against a candidate with their lines; features that one line does not list are one text. */
  function verdictWords(candidate) {
    const out = [];
    for (const { kind, text, where, asked, facets } of candidate.reasons) {
      const plain = kind === "feature" ? text === `${asked} is not supported` : facets[0] === "flags" && text === `flag ${asked} is off`;
      const last = out.at(-1);
      if (plain && last?.plain && last.kind === kind && last.where === where) last.words.push(asked);
      else out.push({ plain, kind, where, text, words: [asked] });
    }
    for (const { text, where } of candidate.fails) out.push({ text: `accepted, and would then fail: ${text}`, where, words: [] });
    if (out.length === 0) return [{ text: "valid too, ranked lower", where: candidate.where }];
    return out.map(({ kind, where, text, words }) => {
      const several = kind === "feature" ? `${words.join(", ")} are not supported` : `flags ${words.join(", ")} are off`;
      return { text: words.length > 1 ? several : text, where };
    });
  }

  // candidate -> the line of its remedy, while that is searched, and whether a model asks
  const searched = new WeakMap();

  /** The line of a candidate's remedy; null where there is none to tell. */
  function remedyLine({ would_win: remedy }, ofModel) {
    // another model is no remedy for this one
    if (remedy === null || (remedy.of_model && ofModel)) return null;
    const verb = remedy.by_name ? "would be chosen" : "would win";
    const as = remedy.leads_to ? `, as ${remedy.leads_to},` : "";
    return element("p", { class: "remedy" }, `↳ ${verb}${as} ${remedy.text}`);
  }

  /** Tell the remedy of a candidate that is drawn already. */
  function tell(candidate) {
    const { line, ofModel } = searched.get(candidate);
    line.replaceWith(...[remedyLine(candidate, ofModel)].filter(Boolean));
  }

  function loser(candidate, ofModel, pending) {
    const reasons = verdictWords(candidate).map(({ text, where }) => element("li", {}, text, " ", place(where)));
    let line = null;
    if (pending.has(candidate)) {
      line = element("p", { class: "searched muted" }, "↳ what would let it win is being searched …");
      searched.set(candidate, { line, ofModel });
    } else line = remedyLine(candidate, ofModel);
    return element(
      "li",
      { value: String(candidate.rank) },
      element("strong", {}, title(candidate.name, candidate.variant)),
      element("ul", {}, ...reasons),
      line,
    );
  }

  /** What the engine's start changed of the request, or why it refuses the run, each with its line. */
  function startLines(start) {
    if (!start) return [];
    const shown = (value) => {
      if (Array.isArray(value)) return value.join(", ") || "none";
      return value === null ? "not given" : String(value);
    };
    const lines = [];
    for (const { step, sets, because, where } of start.steps) {
      const parts = Object.entries(sets)
        .map(([facet, { before, after }]) => [facet, shown(before), shown(after)])
        .filter(([, before, after]) => before !== after)
        .map(([facet, before, after]) => `${facet} ${before} → ${after}`);
      if (parts.length > 0) lines.push([`${parts.join(", ")} (${step})${because ? `: ${because}` : ""}`, where]);
    }
    return start.refused ? [...lines, [start.refused.text, start.refused.where]] : lines;
  }

  const ALONE = { prefill: " for prompts alone", decode: " for generated tokens alone" };

  /** What attnreg itself runs, where that is not what was named, each with its line. */
  function runLines({ runs }, chosen) {
    const same = (run) => chosen && run.backend && title(run.backend.name, run.backend.variant) === title(chosen.name, chosen.variant);
    return runs.filter((run, i) => i > 0 || !same(run)).map((run) => {
      const { phase, backend, order, why: [reason] } = run;
      const name = backend ? title(backend.name, backend.variant) : "nothing here";
      const said = `attnreg itself runs ${name}${run === runs[0] ? "" : ALONE[phase]}`;
      if (reason) return [`${said}: ${reason.text}`, reason.where];
      return order ? [`${said} (order ${order.name})`, order.where] : [said, null];
    });
  }

  /** What is said in place of a backend. */
  const missing = ({ start, silence }) => (start?.refused?.unknown || silence ? "not known" : "no backend");

  function selectionElements(selection, ofModel, pending) {
    const chosen = chosenOf(selection);
    const name = chosen ? title(chosen.name, chosen.variant) : missing(selection);
    const mark = chosen ? "▸" : name === "not known" ? "?" : "✗";
    const winner = element("strong", { class: chosen ? "good" : "bad" }, `${mark} ${name}`);
    const out = [element("p", { class: "winner" }, winner, " ", element("span", { class: "muted" }, howChosen(selection)))];
    if (selection.alternatives.length > 0) {
      out.push(element("p", {}, `would accept it if asked for by name: ${selection.alternatives.join(", ")}`));
    }
    for (const [text, where] of runLines(selection, chosen)) {
      out.push(element("p", { class: "runs" }, `▹ ${text} `, where ? place(where) : null));
    }
    for (const [text, where] of startLines(selection.start)) out.push(element("p", {}, `→ ${text} `, place(where)));
    for (const warning of selection.warnings) out.push(element("p", { class: "warn" }, `! ${warning}`));
    for (const fact of selection.consequences.filter((c) => c.kind !== "fails")) {
      out.push(element("p", {}, `· ${fact.text} `, place(fact.where)));
    }
    for (const { text } of selection.unproven ?? []) out.push(element("p", {}, `· ${text}`));
    if (selection.evidence) out.push(element("p", {}, `· ${selection.evidence}`));
    const losers = selection.candidates.filter((c) => chosen === null || title(c.name, c.variant) !== title(chosen.name, chosen.variant));
    if (losers.length > 0) {
      const list = element("ol", { class: "losers" }, ...losers.map((c) => loser(c, ofModel, pending)));
      out.push(element("details", { open: "" }, element("summary", {}, `Why not the other ${losers.length}`), list));
    }
    return out;
  }

  function memoryTable(memory) {
    const lengths = Object.keys(memory.bytes_at);
    const cells = (part) => [part.bytes_per_token.toLocaleString("en"), ...lengths.map((n) => attnreg.readable(part.bytes_at[n]))];
    const heading = ["Layers", "Bytes per token", ...lengths.map((n) => `${Number(n).toLocaleString("en")} tokens`)];
    const rows = memory.groups.map((group) => {
      const kept = group.keeps_tokens === null ? group.note : `keeps ${group.keeps_tokens.toLocaleString("en")} tokens`;
      return [[group.label, kept].filter(Boolean).join(" · "), ...(group.note ? heading.slice(1).map(() => "–") : cells(group))];
    });
    const row = (cell, values) => element("tr", {}, ...values.map((value, i) => element(i ? cell : "th", { scope: i ? "col" : "row" }, value)));
    const body = [...rows, ["total", ...cells(memory)]].map((values) => {
      return element("tr", {}, ...values.map((value, i) => (i ? element("td", {}, value) : element("th", { scope: "row" }, value))));
    });
    const table = element("table", { class: "kv" }, element("thead", {}, row("th", heading)), element("tbody", {}, ...body));
    const ranks = memory.ranks > 1 ? ` on each of ${memory.ranks} ranks` : "";
    const stored = [...new Set(memory.groups.map((group) => group.kv_dtype).filter(Boolean))];
    const name = `KV cache of one request${ranks}, kv_dtype ${stored.join(" and ") || memory.kv_dtype}`;
    const scroll = element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, table);
    return [element("h2", {}, name), scroll];
  }

  /** The whole answer. pending: the candidates whose remedies are searched still, which `tell` then tells. */
  function render(explanation, pending = new Set()) {
    const out = [element("p", { class: "muted" }, explanation.title)];
    for (const { label, layers, selections } of explanation.answers) {
      const heading = element("h2", {}, [layers, label].filter(Boolean).join(" · "));
      const body = selections.flatMap((selection) => selectionElements(selection, layers !== "", pending));
      out.push(element("div", { class: "asked" }, heading, ...body));
    }
    if (explanation.kv_cache) out.push(...memoryTable(explanation.kv_cache));
    for (const note of explanation.notes) out.push(element("p", { class: "muted" }, `note: ${note}`));
    return out;
  }

  /** The answer in one line, which is read out. */
  function summary(explanation) {
    const winners = new Map();
    for (const { layers, label, selections } of explanation.answers) {
      for (const selection of selections) {
        const chosen = chosenOf(selection);
        const fails = selection.consequences.some((fact) => fact.kind === "fails") ? ", which then fails," : "";
        const name = chosen ? `${title(chosen.name, chosen.variant)}${fails}` : missing(selection);
        const phase = / · (prefill|decode)$/.exec(label)?.[1] ?? "";
        winners.set(name, [...(winners.get(name) ?? []), `${layers} ${phase}`.trim()]);
      }
    }
    if (winners.size === 0) return "No layer of this model computes softmax attention.";
    const several = winners.size > 1;
    const parts = [...winners].map(([name, layers]) => (several ? `${name} for ${layers.join(" and ")}` : name));
    return parts.join("; ").replace(/,$/, "");
  }

  attnreg.answer = { element, render, tell, summary, howChosen, verdictWords };
})((globalThis.attnreg ??= {}));
