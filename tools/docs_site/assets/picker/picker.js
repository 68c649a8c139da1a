// The page of the picker: its form, its address, and the answer below.
(function (attnreg) {
  "use strict";

  const { address, answer, store } = attnreg;
  const { element } = answer;
  const site = window.attnregPicker;
  const field = (id) => document.getElementById(id);
  // what was dropped on the page: name of a model -> its file and text; name of a registry -> its base and overlay
  const dropped = new Map();
  const overlays = new Map();
  let question = address.empty();
  let registry = null;
  let answered = 0;

  // list of the form -> what it offers: to make hundreds of options anew takes longer than an answer
  const offered = new WeakMap();

  function options(select, groups, value) {
    const offers = JSON.stringify(groups);
    if (offered.get(select) !== offers) {
      offered.set(select, offers);
      select.replaceChildren();
      for (const [name, items] of groups) {
        const made = items.map(([key, text]) => element("option", { value: key }, text));
        if (name) select.append(element("optgroup", { label: name }, ...made));
        else select.append(...made);
      }
    }
    select.querySelector("[data-stranger]")?.remove();
    if (![...select.options].some((option) => option.value === value)) {
      select.append(element("option", { value, "data-stranger": "" }, `${value} (not in the data)`));
    }
    select.value = value;
  }

  /** The architectures by platform, each under every product's name. */
  function products() {
    const platforms = new Map();
    for (const [name, { platform, products: named }] of Object.entries(registry.architectures)) {
      const items = (named.length > 0 ? named : [""]).map((product) => {
        return [`${name}/${product}`, product ? `${product} · ${name}` : name];
      });
      platforms.set(platform, [...(platforms.get(platform) ?? []), ...items]);
    }
    return [...platforms];
  }

  function checkboxes(id, words, held, changed) {
    const lines = Object.entries(words).map(([name, legend]) => {
      const box = element("input", { type: "checkbox", value: name });
      box.checked = held.includes(name);
      box.addEventListener("change", changed);
      return element("p", {}, element("label", {}, box, ` ${name}`), element("small", {}, legend));
    });
    field(id).replaceChildren(...lines);
  }

  const checked = (id) => [...field(id).querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value);

  function facetField(name, facet) {
    const id = `facet-${name}`;
    const value = question.facets[name] ?? "";
    let input;
    if (facet.kind === "integer" || facet.kind === "text") {
      input = element("input", { id, type: "text", ...(facet.kind === "integer" ? { inputmode: "numeric" } : {}) });
      input.value = value;
    } else {
      input = element("select", { id });
      options(input, [["", [["", "not stated"], ...facet.words.map((word) => [String(word), String(word)])]]], value);
    }
    input.title = facet.legend;
    input.addEventListener("change", () => {
      delete question.facets[name];
      if (input.value.trim() !== "") question.facets[name] = input.value.trim();
      ask();
    });
    return element("p", {}, element("label", { for: id }, name), input);
  }

  function facets() {
    // these stand elsewhere in the form, and the type of a model is that of its config
    const hidden = ["kv_dtype", "features", "model"];
    const shown = Object.entries(registry.facets).filter(([name, f]) => f.of === "request" && !hidden.includes(name));
    field("facets").replaceChildren(...shown.map(([name, facet]) => facetField(name, facet)));
    field("facets-summary").textContent = question.model ? "What every layer is asked with" : "The request";
  }

  function packages() {
    field("every-package").checked = question.packages === null;
    const lines = Object.entries(registry.vocabulary.packages).map(([name, legend]) => {
      const box = element("input", { type: "checkbox", value: name, "aria-label": name });
      const version = element("input", { type: "text", placeholder: "version", "aria-label": `version of ${name}` });
      box.checked = question.packages !== null && name in question.packages;
      version.value = question.packages?.[name] ?? "";
      box.disabled = version.disabled = question.packages === null;
      const changed = () => {
        question.packages = { ...question.packages };
        delete question.packages[name];
        if (box.checked) question.packages[name] = version.value.trim();
        ask();
      };
      box.addEventListener("change", changed);
      version.addEventListener("change", () => { box.checked = true; changed(); });
      return element("p", {}, element("label", {}, box, ` ${name} `), version, element("small", {}, legend));
    });
    field("packages").replaceChildren(...lines);
  }

  /** The form as the question has it. */
  function fill() {
    const names = [...site.registries, ...overlays.keys()];
    options(field("registry"), [["", names.map((name) => [name, name])]], question.registry);
    const product = question.gpu || (registry.architectures[question.arch]?.products[0] ?? "");
    options(field("arch"), products(), `${question.arch}/${product}`);
    const configs = [...dropped].map(([name]) => [name, `${name} (dropped)`]);
    options(field("model"), [["", [["", "one request, no model"]]], ["Dropped", configs], ["Bundled", site.models.map((m) => [m, m])]]
      .filter(([, items]) => items.length > 0), question.model);
    const kv = registry.facets.kv_dtype.words.map((word) => [word, word]);
    const unstated = [["", question.model ? "as the model says" : "not stated: auto"], ["none", "none: not given"]];
    options(field("kv_dtype"), [["", [...unstated, ...kv]]], question.facets.kv_dtype ?? "");
    options(field("tp"), [["", site.ranks.map((n) => [String(n), n === 1 ? "1: the whole model" : String(n)])]], String(question.tp));
    field("tp").disabled = question.model === "";
    const rows = Object.values(registry.backends).map((row) => {
      const variants = row.variants.filter((v) => v.name !== null).map((v) => `${row.name}/${v.name}`);
      return [row.name, [row.name, ...variants].map((name) => [name, name])];
    });
    options(field("backend"), [["", [["", "the order decides"]]], ...rows], question.backend ?? "");
    const drafts = [["", [["", "none"], ["mtp", "mtp: the model's own MTP layers"]]], ["Dropped", configs], ["Bundled", site.models.map((m) => [m, m])]];
    const chosen = (name) => question.more[name] ?? "";
    options(field("draft"), drafts.filter(([, items]) => items.length > 0), chosen("draft"));
    options(field("draft_kv_dtype"), [["", [["", "as the model's"], ["none", "none: not given"], ...kv]]], chosen("draft_kv_dtype"));
    options(field("draft_backend"), [["", [["", "as the model's"]]], ...rows], chosen("draft_backend"));
    options(field("prefer"), [["", [["", "none"]]], ...rows], chosen("prefer"));
    field("layer").value = chosen("layer");
    field("deny").value = chosen("deny");
    field("lengths").value = question.lengths.join(", ");
    field("selector").checked = "selector" in question.more;
    field("selector").closest("p").hidden = !registry.hasSteps && !field("selector").checked;
  }

  /** The lists of the form. They are not made anew at each answer, which would take the focus from the key that asks. */
  function fillLists() {
    facets();
    checkboxes("features", registry.facets.features.legends, question.features, () => change({ features: checked("features") }));
    checkboxes("flags", registry.facets.flags.legends, question.flags, () => change({ flags: checked("flags") }));
    packages();
  }

  function change(fields) {
    Object.assign(question, fields);
    ask();
  }

  function notice(text, kind) {
    return window.attnregSite.notice(text, kind);
  }

  function say(text) {
    // the same words twice would not be read out again
    if (field("summary").textContent !== text) field("summary").textContent = text;
  }

  function refuse(error) {
    say("This question has no answer.");
    field("answer").replaceChildren(element("p", { class: "notice error message" }, error.message));
    field("command").hidden = true;
    field("show-command").setAttribute("aria-expanded", "false");
  }

  /** What Python answers about a model: its document. Throws `RequestError` for a config that is no model. */
  async function modelByPython(name, ...given) {
    const { base = question.registry, file = "" } = overlays.get(question.registry) ?? {};
    say("Reading the config: Python starts once, which takes seconds …");
    const document = await attnreg.python.call(name, ...given, base, file);
    if (document.error) throw new attnreg.RequestError(document.error);
    return document;
  }

  async function modelOf(name) {
    const overlay = overlays.get(question.registry);
    if (name === "") return null;
    if (dropped.has(name)) {
      const { text, documents } = dropped.get(name);
      const key = overlay && !overlay.alike ? question.registry : site.modelsOf[overlay?.base ?? question.registry];
      if (!documents.has(key)) documents.set(key, await modelByPython("config", name, text));
      return documents.get(key);
    }
    if (!site.models.includes(name)) {
      throw new attnreg.RequestError(`the model ${name} is not among the bundled ones: drop its config.json on the page again`);
    }
    if (overlay && !overlay.alike) return modelByPython("bundled", name);
    return store.model(name, site.modelsOf[overlay?.base ?? question.registry]);
  }

  /** Take a file that was dropped: a config, or an overlay on the registry of the question. */
  async function take(file) {
    const text = await attnreg.python.textOf(file);
    const base = overlays.get(question.registry)?.base ?? question.registry;
    if (/\.ya?ml$/i.test(file.name)) {
      say("Reading the overlay: Python starts once, which takes seconds …");
      const answered = await attnreg.python.call("overlay", file.name, text, base);
      if (answered.error) throw new attnreg.RequestError(answered.error);
      const name = `${base} + ${file.name}`;
      store.add(name, answered.document);
      overlays.set(name, { base, file: file.name, alike: answered.alike });
      return changeRegistry(name);
    }
    const name = file.name.replace(/\.json$/i, "");
    dropped.set(name, { file: file.name, text, documents: new Map() });
    return changeModel(name);
  }

  async function takeAll(files) {
    for (const file of files) {
      try {
        await take(file);
      } catch (error) {
        refuse(error);
      }
    }
    document.body.dataset.taken = String(Number(document.body.dataset.taken ?? 0) + 1);
  }

  /** What was dropped, as the command names it. */
  function files() {
    const file = (name) => dropped.get(name)?.file;
    return { model: file(question.model), draft: file(question.more.draft), overlay: overlays.get(question.registry) };
  }

  /** The answer of the command itself, to what the evaluator does not answer. */
  async function explainedByPython() {
    say("Python answers this question. It starts once, which takes seconds …");
    const folders = {};
    for (const [part, name] of [["model", question.model], ["draft", question.more.draft]]) {
      if (dropped.has(name)) folders[part] = await attnreg.python.call("write_config", name, dropped.get(name).text);
    }
    const words = address.words(question, registry, { ...folders, overlay: overlays.get(question.registry) });
    const { status, out, err } = await attnreg.python.call("command", ...words.slice(1), "--json");
    if (status > 1) throw new attnreg.RequestError(err.trim());
    const { command: _, ...explanation } = JSON.parse(out);
    // where a bundled config lies in this Python is no news
    explanation.notes = explanation.notes.filter((note) => !note.includes("/examples/configs/"));
    return explanation;
  }

  function show(explanation, measured) {
    attnreg.lastAnswer = { ...measured, explanation };
    say(answer.summary(explanation));
    field("answer").replaceChildren(...answer.render(explanation));
    field("command-line").textContent = address.commandLine(question, registry, files());
    field("python").textContent = address.python(question, explanation, overlays.get(question.registry));
  }

  /** Answer the question, and write it into the address. */
  async function ask() {
    const number = ++answered;
    question.fingerprint = registry.fingerprint;
    history.replaceState(null, "", address.toHash(question));
    fill();
    try {
      const { platform, options: asked } = address.read(question, registry);
      const python = address.byPython(question, registry);
      const model = python ? null : await modelOf(question.model);
      const start = performance.now();
      if (python) {
        const explanation = await explainedByPython();
        // a later question may have been answered meanwhile
        if (number === answered) show(explanation, { python, milliseconds: performance.now() - start });
        return;
      }
      if (number !== answered) return;
      const explained = attnreg.explain(registry, platform, asked, model);
      show(attnreg.explanationDict(explained, false), { python, milliseconds: performance.now() - start });
      // verdicts and reasons are drawn before remedies are searched
      await new Promise((drawn) => setTimeout(drawn));
      if (number === answered) show(attnreg.explanationDict(explained), { ...attnreg.lastAnswer, whole: performance.now() - start });
    } catch (error) {
      if (number !== answered) return;
      refuse(error);
      if (!(error instanceof attnreg.RequestError || error instanceof attnreg.UnavailableError)) throw error;
    } finally {
      if (number === answered) document.body.dataset.answered = String(number);
    }
  }

  /** Ask what the address says; where the registry has changed since it was written, say so. */
  async function open() {
    document.querySelectorAll("main > .notice").forEach((box) => box.remove());
    const { question: written, unread } = address.fromHash(location.hash || site.example);
    question = written;
    if (unread.length > 0) notice(`This link has what no question has: ${unread.join(", ").slice(0, 200)}`, "warning");
    if (!site.registries.includes(question.registry) && !overlays.has(question.registry)) {
      notice(`This link asks the registry ${question.registry.slice(0, 80)}, which this site does not have; it has `
        + `${site.registries.join(", ")}. ${question.registry.includes(" + ") ? "Drop its overlay on the page again. " : ""}The answer below is of ${site.registries[0]}.`, "error");
      question.registry = site.registries[0];
      question.fingerprint = "";
    }
    registry = await store.registry(question.registry);
    const { fingerprint: then } = question;
    if (then && then !== registry.fingerprint) {
      notice(`This link was made for another state of the registry ${question.registry}: fingerprint ${then.slice(0, 40)}. `
        + `The answer below is of ${registry.fingerprint}, and may differ.`, "warning");
    }
    fillLists();
    await ask();
  }

  async function changeRegistry(name) {
    registry = await store.registry(name);
    question.registry = name;
    fillLists();
    return ask();
  }

  function changeModel(name) {
    Object.assign(question, { model: name, tp: name ? question.tp : 1 });
    fillLists();
    return ask();
  }

  const controls = {
    registry: (value) => changeRegistry(value),
    arch: (value) => change({ arch: value.split("/")[0], gpu: value.slice(value.indexOf("/") + 1) }),
    model: (value) => changeModel(value),
    tp: (value) => change({ tp: Number(value) }),
    backend: (value) => change({ backend: value || null }),
    kv_dtype: (value) => {
      const { kv_dtype: _, ...rest } = question.facets;
      change({ facets: value ? { ...rest, kv_dtype: value } : rest });
    },
  };
  const words = (text) => text.split(/[\s,]+/).filter(Boolean);
  for (const name of address.MORE) {
    controls[name] = (value) => {
      const { [name]: _, ...more } = question.more;
      const text = name === "deny" ? words(value).join(",") : name === "selector" ? (field(name).checked ? "1" : "") : value.trim();
      change({ more: text === "" ? more : { ...more, [name]: text } });
    };
  }
  controls.lengths = (value) => {
    const numbers = words(value.replace(/(\d)[,_](?=\d{3}(\D|$))/g, "$1"));
    const wrong = numbers.find((text) => !/^[1-9]\d{0,11}$/.test(text));
    if (wrong === undefined) change({ lengths: numbers.map(Number) });
    else refuse(new attnreg.RequestError(`--length is ${attnreg.quoted(wrong)}; expected a number of tokens`));
  };
  for (const [id, changed] of Object.entries(controls)) field(id).addEventListener("change", () => changed(field(id).value));
  field("every-package").addEventListener("change", () => {
    change({ packages: field("every-package").checked ? null : {} });
    packages();
  });
  field("question").addEventListener("submit", (event) => event.preventDefault());
  field("show-command").addEventListener("click", () => {
    field("command").hidden = !field("command").hidden;
    field("show-command").setAttribute("aria-expanded", String(!field("command").hidden));
  });
  field("copy-link").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      field("copy-link").textContent = "Copied";
    } catch {
      field("copy-link").textContent = "The address is the link";
    }
  });
  window.addEventListener("hashchange", open);
  field("config").addEventListener("change", () => takeAll(field("config").files));
  for (const kind of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(kind, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      document.body.classList.toggle("dropping", kind === "dragover");
      if (kind === "drop") takeAll(event.dataTransfer.files);
    });
  }

  attnreg.picker = { takeAll };
  open();
})((globalThis.attnreg ??= {}));
