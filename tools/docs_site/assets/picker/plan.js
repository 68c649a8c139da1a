// The plan of a whole run: `attnreg plan`, run by Python in the page, for the question of the form.
(function (attnreg) {
  "use strict";

  const { element } = attnreg.answer;
  const { field } = attnreg.form;
  const GIB = 2 ** 30;
  // the memory of GPUs that people have, in GiB
  const GPUS = [[24, "RTX 4090"], [32, "RTX 5090"], [48, "L40S"], [80, "H100"], [141, "H200"], [180, "B200"], [192, "MI300X"], [288, "MI355X"]];
  const VERDICTS = { true: ["good", "chosen", "starts"], false: ["bad", "refused", "does not start"], null: ["", "unknown", "partly not known"] };
  let asked = 0;

  const place = (where) => (where ? [" ", element("span", { class: "where" }, where.replace(/^.*\//, "").replace(/:\d+$/, ""))] : []);

  function size(bytes) {
    return bytes >= GIB ? `${(bytes / GIB).toFixed(1)} GiB` : `${Math.round(bytes / 1024).toLocaleString("en")} KiB`;
  }

  function groups(plan) {
    const head = ["layers", "backend", "KV block", "layouts", "CUDA graphs"];
    const rows = plan.groups.map(({ words, backend, kernel_block: block, layouts, graphs }) => {
      return [words, backend?.title ?? "–", block ? `${block.tokens} tokens` : "–", layouts?.text ?? "–", graphs?.text ?? "–"];
    });
    const cells = (row) => row.map((text, i) => (i === 0 ? element("th", { scope: "row" }, text) : element("td", { "data-label": head[i] }, text)));
    const table = element(
      "table",
      { class: "stack" },
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))),
    );
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Backends of the run" }, table);
  }

  function facts(plan) {
    const out = [];
    const add = (name, text, where) => out.push(element("dt", {}, name), element("dd", {}, text, ...place(where)));
    if (plan.page) add("block", `${plan.page.tokens} tokens, ${plan.page.text}`, plan.page.where);
    for (const name of ["layout", "graphs"]) if (plan[name]?.value) add(name, `${plan[name].value}, ${plan[name].text}`, plan[name].where);
    const [stage] = plan.stages ?? [];
    if (stage?.bytes_per_token) add("KV cache", `${size(stage.bytes_per_token)} a token on each of ${plan.ranks} ranks`, null);
    return element("dl", { class: "facts" }, ...out);
  }

  /** The requests that fit on each GPU, from the plan's own figures: its share of the memory, less the weights. */
  function fits({ fit }) {
    if (!fit?.request_bytes) return [];
    const rows = GPUS.map(([gib, name]) => {
      const left = gib * GIB * fit.share - fit.weight_bytes - fit.workspace_bytes;
      return { name, gib, count: Math.max(0, Math.floor(left / fit.request_bytes)) };
    });
    const most = Math.max(...rows.map(({ count }) => count), 1);
    const bar = (count) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      made.setAttribute("class", "bar");
      made.setAttribute("aria-hidden", "true");
      made.innerHTML = `<rect width="${(100 * count) / most}%" height="100%" rx="3"/>`;
      return made;
    };
    const lines = [["GPU", "GiB", "requests"], ...rows.map(({ name, gib, count }) => [name, gib, count])];
    const csv = `data:text/csv,${encodeURIComponent(`${lines.map((line) => line.join(",")).join("\n")}\n`)}`;
    return [
      element("h3", {}, `Requests of ${fit.length.toLocaleString("en")} tokens that fit, at most`),
      element("ul", { class: "fits" }, ...rows.map(({ name, gib, count }) => {
        const own = gib * GIB === fit.gpu_bytes ? { class: "own" } : {};
        return element("li", own, element("span", {}, `${name}, ${gib} GiB`), bar(count), element("b", {}, count.toLocaleString("en")));
      })),
      element("p", { class: "small muted" }, `On each rank ${size(fit.weight_bytes)} of weights, and ${Math.round(fit.share * 100)} % of the memory. Activations and graphs take more, which is not counted. `, element("a", { href: csv, download: "requests-that-fit.csv" }, "CSV")),
    ];
  }

  function render(plan) {
    const [tone, mark, text] = VERDICTS[String(plan.starts)];
    return [
      element("p", { class: `winner ${tone}` }, element("i", { class: `sign ${mark}` }), ` The run ${text}`),
      ...plan.conflicts.map(({ sentence, facts: known }) => {
        const lines = known.map((fact) => element("li", {}, `${fact.group}: ${fact.sentence}`, ...place(fact.where)));
        return element("div", { class: "notice error" }, sentence, element("ul", {}, ...lines));
      }),
      ...plan.changes.map(({ text: what }) => element("p", { class: "remedy" }, `↳ ${what}`)),
      groups(plan),
      facts(plan),
      ...plan.unknown.map((said) => element("p", { class: "warn" }, `? ${said.text ?? said}`)),
      ...fits(plan),
    ];
  }

  async function ask() {
    const number = ++asked;
    const box = field("plan-answer");
    box.replaceChildren(element("p", { class: "muted" }, "Python plans the run …"));
    const given = [["--gpu-memory", "plan-memory", "GiB"], ["--weights", "plan-weights", "GiB"]].flatMap(([option, id, unit]) => {
      return field(id).value ? [option, `${field(id).value}${unit}`] : [];
    });
    try {
      const options = await attnreg.picker.optionsForPython();
      const length = field("plan-length").value && !options.includes("--length") ? ["--length", field("plan-length").value] : [];
      const { out, err } = await attnreg.python.call("command", "plan", ...options, ...given, ...length, "--json");
      if (number !== asked) return;
      if (!out) throw new Error(err.replace(/^attnreg: /, ""));
      box.replaceChildren(...render(JSON.parse(out)));
    } catch (error) {
      if (number === asked) box.replaceChildren(element("p", { class: "notice error message" }, String(error.message)));
    }
    box.dataset.answered = String(number);
  }

  /** Take a plan away that is of another question than the form's. */
  function reset() {
    asked++;
    field("plan-answer").replaceChildren();
  }

  field("plan-form").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  attnreg.plan = { ask, reset };
})((globalThis.attnreg ??= {}));
