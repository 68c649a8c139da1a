// The page of the picker: its form, its address, and the answer below.
(function (attnreg) {
  "use strict";

  const { address, answer, store, form, python } = attnreg;
  const { field } = form;
  const { element } = answer;
  const site = window.attnregPicker;
  const WAITING = {
    loading: "Python answers this question as soon as it is loaded …",
    ready: "Python answers this question …",
  };
  const known = { models: site.models, registries: site.registries, newest: site.newest, products: site.products, kv_dtypes: site.kv_dtypes };
  // what was dropped on the page: name of a model -> its file and text; name of a registry -> its base, file and text
  const dropped = new Map();
  const overlays = new Map();
  let question = address.empty();
  let asked = 0;

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

  /** Show what stands in the place of the answer. view: the answer, where there is one. */
  function put(text, parts, view) {
    const box = field("answer");
    say(text);
    // what is below the form stays in its place while the next answer is made
    box.style.minHeight = view === null && parts.length === 0 ? `${box.offsetHeight}px` : "";
    box.replaceChildren(...parts);
    box.setAttribute("aria-busy", String(parts.length === 0));
    field("python").textContent = view?.program ?? "";
    attnreg.lastAnswer = view;
    const other = field("beside").dataset.summary;
    field("answers").classList.toggle("differ", other !== undefined && view !== null && other !== view.summary);
  }

  /** Take an answer away: it is of another question than the form's. */
  const wait = (text) => put(text, [], null);

  const refuse = (message) => {
    return put("This question has no answer.", [element("p", { class: "notice error message" }, message)], null);
  };

  const show = (view) => (view.error ? refuse(view.error) : put(view.summary, answer.render(view), view));

  /** Take a file that was dropped: a config, or an overlay on the registry of the question. */
  async function take(file) {
    // no answer that is under way is of the form's question any more
    asked++;
    wait(`Python reads ${file.name} as soon as it is loaded …`);
    const text = await python.textOf(file);
    if (/\.ya?ml$/i.test(file.name)) {
      const base = overlays.get(question.registry)?.base ?? question.registry;
      const { lists, error } = await python.call("overlay", file.name, text, base);
      if (error) throw new Error(error);
      const name = `${base} + ${file.name}`;
      store.add(`${name}/lists`, lists);
      overlays.set(name, { base, file: file.name, text });
      question.registry = name;
    } else {
      const name = address.droppedName(file.name, site.models);
      dropped.set(name, { file: file.name, text });
      question.model = name;
    }
    await ask();
  }

  async function takeAll(files) {
    for (const file of files) {
      await take(file).catch((error) => {
        asked++;
        refuse(error.message);
      });
    }
    document.body.dataset.taken = String(Number(document.body.dataset.taken ?? 0) + 1);
  }

  /** What was dropped, as the command names it. */
  function files(asked = question) {
    const file = (name) => dropped.get(name)?.file;
    return { model: file(asked.model), draft: file(asked.more.draft), overlay: overlays.get(asked.registry) };
  }

  /** The file with the answer to a question that the build computed; null where it computed none. */
  function builtAnswer(lists, asked) {
    const { registry, model } = asked;
    const models = Object.hasOwn(site.answered, registry) ? site.answered[registry] : [];
    if (dropped.has(model) || !models.includes(model) || !address.isPlain(asked, lists)) return null;
    return lists.architectures.some(({ name }) => name === asked.arch) ? `answers/${registry}/${model || "request"}` : null;
  }

  /** What Python answers to a question; null where another is asked before Python is ready. */
  async function pythonAnswer(lists, asked, isAsked) {
    const folders = {};
    const overlay = overlays.get(asked.registry);
    const configs = [["model", asked.model], ["draft", asked.more.draft]].filter(([, name]) => dropped.has(name));
    try {
      await python.ready();
    } catch (error) {
      const command = address.commandLine(address.words(asked, lists, files(asked)));
      return { error: `The build of this site did not answer this question. ${error.message}.\nThe command answers it: ${command}` };
    }
    if (!isAsked()) return null;
    for (const [part, name] of configs) folders[part] = await python.call("write_config", name, dropped.get(name).text);
    if (overlay) await python.call("write", overlay.file, overlay.text);
    return isAsked() ? python.call("answer", ...address.words(asked, lists, { ...folders, overlay })) : null;
  }

  /** Show the answer to another question beside that of the form; its link holds both. */
  async function showBeside() {
    const box = field("beside");
    const hash = question.beside;
    delete box.dataset.summary;
    box.hidden = hash === "";
    field("answers").classList.toggle("two", hash !== "");
    field("keep").lastElementChild.textContent = hash === "" ? "Compare with another" : "Keep this one instead";
    if (hash === "") return box.replaceChildren();
    const { question: asked } = address.fromHash(hash);
    const alone = element("button", { type: "button" }, "Remove");
    alone.addEventListener("click", () => change({ beside: "" }));
    const head = (text) => element("div", { class: "besides" }, element("strong", {}, text), alone);
    box.replaceChildren(head("…"));
    try {
      const lists = store.read(`${asked.registry}/lists`) ?? (await store.get(`${asked.registry}/lists`));
      const built = builtAnswer(lists, asked);
      const isAsked = () => question.beside === hash;
      const view = built === null ? await pythonAnswer(lists, asked, isAsked) : (await store.get(built))[asked.arch];
      if (!isAsked() || view === null) return undefined;
      if (view.error) throw new Error(view.error);
      box.dataset.summary = view.summary;
      box.replaceChildren(head(view.summary), ...answer.render(view));
    } catch (error) {
      box.replaceChildren(head("No answer"), element("p", { class: "notice error message" }, String(error.message).slice(0, 1000)));
    }
    const now = attnreg.lastAnswer;
    field("answers").classList.toggle("differ", Boolean(now) && now.summary !== box.dataset.summary);
    return undefined;
  }

  /** Write the question into the form, the address and the command, and answer it. then: the registry's fingerprint in its link. */
  async function ask(then = "") {
    const number = ++asked;
    // a later question may be asked before this one is answered
    const isAsked = () => number === asked;
    try {
      const known = store.read(`${question.registry}/lists`);
      if (known === undefined) wait("The registry is loading …");
      const lists = known ?? (await store.get(`${question.registry}/lists`));
      if (!isAsked()) return;
      if (then && then !== lists.fingerprint) {
        notice(`This link was made for another state of the registry ${question.registry}: fingerprint ${then.slice(0, 40)}. `
          + `The answer below is of ${lists.fingerprint}, and may differ.`, "warning");
      }
      question.fingerprint = lists.fingerprint;
      const hash = address.toHash(question);
      if (location.hash !== hash) history.replaceState(null, "", hash);
      form.make(lists, [...dropped.keys()], [...overlays.keys()], () => question, change);
      form.fill(question);
      if (field("beside").dataset.hash !== question.beside) {
        field("beside").dataset.hash = question.beside;
        showBeside();
      }
      attnreg.plan?.reset();
      field("command-line").textContent = address.commandLine(address.words(question, lists, files()));
      const built = builtAnswer(lists, question);
      const here = built === null ? undefined : store.read(built);
      if (!here) wait(built === null ? WAITING[document.body.dataset.python] ?? WAITING.loading : "The answer is loading …");
      const view = built === null ? await pythonAnswer(lists, question, isAsked) : (here ?? (await store.get(built)))[question.arch];
      if (isAsked()) show(view);
    } catch (error) {
      if (isAsked()) refuse(error.message);
    } finally {
      if (isAsked()) document.body.dataset.answered = String(number);
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
    await ask(question.fingerprint);
  }

  const controls = {
    registry: (value) => change({ registry: value }),
    arch: (value) => change({ arch: value.split("/")[0], gpu: value.slice(value.indexOf("/") + 1) }),
    model: (value) => change({ model: value, tp: value ? question.tp : 1 }),
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
    if (wrong === undefined) return change({ lengths: numbers.map(Number) });
    asked++;
    refuse(`--length is ${JSON.stringify(wrong)}; expected a number of tokens`);
  };
  for (const [id, changed] of Object.entries(controls)) field(id).addEventListener("change", () => changed(field(id).value));
  field("every-package").addEventListener("change", () => {
    change({ packages: field("every-package").checked ? null : {} });
  });
  const NAMES = { registry: "engine", arch: "GPU", model: "model", kv_dtype: "KV cache", tp: "ranks" };

  /** Ask what the words of the search box say, and show how each was read. */
  function readWords() {
    const { fields, said, unread } = attnreg.words.read(field("words").value, known);
    const chips = said.map(([name, shown, others]) => {
      const more = others.slice(0, 3).map((other) => {
        const button = element("button", { type: "button" }, other);
        button.addEventListener("click", () => change({ model: other }));
        return button;
      });
      return element("li", {}, element("small", {}, NAMES[name]), ` ${shown}`, ...(more.length > 0 ? [element("small", {}, " or"), ...more] : []));
    });
    chips.push(...unread.map((word) => element("li", { class: "warn" }, element("small", {}, "not read"), ` ${word}`)));
    field("understood").replaceChildren(...chips);
    if (said.length === 0) return undefined;
    const { kv_dtype, ...others } = fields;
    const facets = kv_dtype ? { ...question.facets, kv_dtype } : question.facets;
    const next = { ...question, ...others, facets };
    if (fields.arch) next.gpu = site.products[fields.gpu] === fields.arch && fields.gpu !== fields.arch ? fields.gpu : "";
    return address.toHash(next) === address.toHash(question) ? undefined : change(next);
  }

  let typing = 0;
  field("words").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(readWords, 250);
  });
  field("question").addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    readWords();
  });
  field("keep").addEventListener("click", () => {
    change({ beside: address.toHash({ ...question, beside: "" }).slice(1) });
    field("words").focus();
  });
  field("show-command").addEventListener("click", () => {
    field("command").hidden = !field("command").hidden;
    field("show-command").setAttribute("aria-expanded", String(!field("command").hidden));
  });
  field("copy-link").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      field("copy-link").lastElementChild.textContent = "Copied";
    } catch {
      field("copy-link").lastElementChild.textContent = "The address is the link";
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

  /** The options of the command that asks the form's question, with what was dropped written where Python reads it. */
  async function optionsForPython() {
    const lists = await store.get(`${question.registry}/lists`);
    const folders = {};
    if (dropped.has(question.model)) folders.model = await python.call("write_config", question.model, dropped.get(question.model).text);
    const overlay = overlays.get(question.registry);
    if (overlay) await python.call("write", overlay.file, overlay.text);
    return address.words(question, lists, { ...folders, overlay });
  }

  attnreg.picker = { takeAll, optionsForPython, asked: () => question };
  open().then(python.startIdle);
})((globalThis.attnreg ??= {}));
