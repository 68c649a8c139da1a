// The page of the picker: its form, its address, and the answer below.
(function (attnreg) {
  "use strict";

  const { address, answer, store, form } = attnreg;
  const { field } = form;
  const { element } = answer;
  const site = window.attnregPicker;
  // what was dropped on the page: name of a model -> its file and text; name of a registry -> its base and overlay
  const dropped = new Map();
  const overlays = new Map();
  const prepared = new Set();
  let question = address.empty();
  let registry = null;
  let answered = 0;
  // milliseconds after which an answer is drawn, with the remedies found until then, and those between later drawings
  const FIRST = 12;
  const LATER = 16;

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
    field("answer").setAttribute("aria-busy", "false");
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
    const name = address.droppedName(file.name, site.models);
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

  /** Draw an answer. pending: the candidates whose remedies are searched still. */
  function show(explanation, measured, pending = new Set()) {
    attnreg.lastAnswer = { ...measured, explanation };
    say(answer.summary(explanation));
    field("answer").replaceChildren(...answer.render(explanation, pending));
    field("answer").setAttribute("aria-busy", String(pending.size > 0));
    field("command-line").textContent = address.commandLine(question, registry, files());
    field("python").textContent = address.python(question, explanation, overlays.get(question.registry));
  }

  /** The candidates whose remedies were found until a time; at least one. */
  function searched(searches, until) {
    const found = [];
    while (searches.length > 0 && (found.length === 0 || performance.now() < until)) {
      const { candidate, search } = searches.shift();
      search();
      found.push(candidate);
    }
    return found;
  }

  /** Draw the evaluator's answer: the verdicts with the remedies that are found at once, then the other remedies as they come. */
  async function answerHere(platform, options, model, isAsked) {
    const start = performance.now();
    const explained = attnreg.explain(registry, platform, options, model);
    const document = attnreg.explanationDict(explained, false);
    const measured = { python: false, milliseconds: performance.now() - start };
    const searches = attnreg.remedySearches(explained, document);
    searched(searches, start + FIRST);
    show(document, measured, new Set(searches.map(({ candidate }) => candidate)));
    while (searches.length > 0) {
      await new Promise((drawn) => setTimeout(drawn));
      if (!isAsked()) return;
      searched(searches, performance.now() + LATER).forEach(answer.tell);
    }
    field("answer").setAttribute("aria-busy", "false");
    attnreg.lastAnswer.whole = performance.now() - start;
  }

  /** Answer the question, and write it into the address. */
  async function ask() {
    const number = ++answered;
    // a later question may be asked before this one is answered
    const isAsked = () => number === answered;
    question.fingerprint = registry.fingerprint;
    const hash = address.toHash(question);
    if (location.hash !== hash) history.replaceState(null, "", hash);
    form.make(registry, [...dropped.keys()], [...overlays.keys()], () => question, change);
    form.fill(question);
    try {
      const { platform, options } = address.read(question, registry);
      if (address.byPython(question, registry)) {
        const start = performance.now();
        const explanation = await explainedByPython();
        if (isAsked()) show(explanation, { python: true, milliseconds: performance.now() - start });
      } else {
        const model = await modelOf(question.model);
        if (isAsked()) await answerHere(platform, options, model, isAsked);
      }
    } catch (error) {
      if (!isAsked()) return;
      refuse(error);
      if (!(error instanceof attnreg.RequestError || error instanceof attnreg.UnavailableError)) throw error;
    } finally {
      if (isAsked()) {
        document.body.dataset.answered = String(number);
        prepare(question.registry);
      }
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
    await ask();
  }

  /**
   * While the page has nothing to do, load what each bundled model asks for, and answer it unseen, each on another
   * architecture: the next answer then waits for no file, and runs code that is compiled over conditions that are read.
   */
  async function prepare(name) {
    if (prepared.has(name) || overlays.has(name)) return;
    prepared.add(name);
    const of = await store.registry(name);
    const idle = () => new Promise((resolve) => (window.requestIdleCallback ?? setTimeout)(resolve));
    const architectures = Object.keys(of.architectures);
    for (const [i, model] of site.models.entries()) {
      await idle();
      // a file that is missing is told when it is asked for
      const document = await store.model(model, site.modelsOf[name]).catch(() => null);
      if (document === null || of.byPython) continue;
      const { platform, options } = address.read({ ...address.empty(), arch: architectures[i % architectures.length] }, of);
      const explained = attnreg.explain(of, platform, options, document);
      const told = attnreg.explanationDict(explained, false);
      for (const { search } of attnreg.remedySearches(explained, told)) {
        await idle();
        search();
      }
      await idle();
      answer.render(told);
    }
    document.body.dataset.prepared = name;
  }

  async function changeRegistry(name) {
    registry = await store.registry(name);
    question.registry = name;
    return ask();
  }

  function changeModel(name) {
    Object.assign(question, { model: name, tp: name ? question.tp : 1 });
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
