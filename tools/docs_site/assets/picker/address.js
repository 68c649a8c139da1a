// A question as the address of a page, as a command line, and as a program in Python.
(function (attnreg) {
  "use strict";

  /**
   * A question: registry, fingerprint, arch, gpu (the product that was chosen, "" for none), model ("" for none), tp, backend (null for none), facets (name -> value as
   * the command takes it), features, flags, packages (null where every package is assumed), lengths, and `more`: the
   * options that Python alone answers, by their names in MORE, as the command takes them.
   */
  const EMPTY = { registry: "default", fingerprint: "", arch: "sm90", gpu: "", model: "", tp: 1, backend: null };
  const MORE = ["draft", "draft_kv_dtype", "draft_backend", "layer", "prefer", "deny", "selector"];

  // facets that have a place of their own in an address, or none; the first is no name of a facet
  const ELSEWHERE = ["__proto__", "platform", "arch", "device", "flags", "packages", "features", "model"];

  function empty() {
    return { ...EMPTY, facets: {}, features: [], flags: [], packages: null, lengths: [], more: {} };
  }

  /** Whether Python must answer: the evaluator has no draft, no single layer, no number of 16 digits, and models only as their configs say, on some ranks. */
  function byPython(question, registry) {
    const core = Object.keys(question.facets).filter((name) => registry.core[name]);
    const changed = question.model !== "" && !attnreg.documentAnswers(Object.fromEntries(core.map((name) => [name, ""])));
    const ofModel = question.model === "" && question.lengths.length > 0;
    // ranks share out a model's heads; without a model they are refused, as by the command
    const otherRanks = question.tp !== 1 && (question.model === "" || !window.attnregPicker.ranks.includes(question.tp));
    // a number of JavaScript is exact below 2 ** 53
    const large = Object.values(question.facets).some((text) => /^-?\d{16,}$/.test(text));
    return registry.byPython !== "" || large || changed || ofModel || otherRanks || Object.keys(question.more).length > 0;
  }

  /** The question as the hash of an address. */
  function toHash(question) {
    const out = new URLSearchParams();
    out.append("registry", question.fingerprint ? `${question.registry}@${question.fingerprint}` : question.registry);
    out.append("arch", question.arch);
    if (question.gpu) out.append("gpu", question.gpu);
    if (question.model) out.append("model", question.model);
    if (question.tp !== 1) out.append("tp", String(question.tp));
    if (question.backend !== null) out.append("backend", question.backend);
    for (const [name, value] of Object.entries(question.facets)) out.append(`facet.${name}`, String(value));
    for (const length of question.lengths) out.append("length", length);
    for (const name of MORE) if (name in question.more) out.append(name, question.more[name]);
    for (const feature of question.features) out.append("feature", feature);
    for (const flag of question.flags) out.append("flag", flag);
    const packages = question.packages === null ? [] : Object.entries(question.packages);
    for (const [name, version] of packages) out.append("package", version ? `${name}==${version}` : name);
    if (question.packages !== null && packages.length === 0) out.append("package", "none");
    return `#${out}`.replaceAll("%40", "@").replaceAll("%2F", "/").replaceAll("%3D", "=").replaceAll("%2C", ",");
  }

  /** The question of a hash, and what in it no question has. */
  function fromHash(hash) {
    const question = empty();
    const unread = [];
    for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
      if (name === "registry") [question.registry, question.fingerprint = ""] = value.split("@");
      else if (name === "arch" || name === "gpu" || name === "model" || name === "backend") question[name] = value;
      else if (name === "tp" && /^[1-9]\d{0,3}$/.test(value)) question.tp = Number(value);
      else if (name === "length" && /^[1-9]\d{0,11}$/.test(value)) question.lengths.push(Number(value));
      else if (MORE.includes(name)) question.more[name] = value;
      else if (name === "feature") question.features.push(value);
      else if (name === "flag") question.flags.push(value);
      else if (name === "package" && value === "none") question.packages ??= {};
      else if (name === "package") {
        const [pack, version = ""] = value.split("==");
        question.packages = { ...question.packages, [pack]: version };
      } else if (name.startsWith("facet.") && !ELSEWHERE.includes(name.slice(6))) question.facets[name.slice(6)] = value;
      else unread.push(`${name}=${value}`);
    }
    return { question, unread };
  }

  /** The name of the model of a config that was dropped: no bundled one's, which a link would ask for elsewhere. */
  function droppedName(file, bundled) {
    const name = file.replace(/\.json$/i, "");
    return bundled.includes(name) ? `${name} of ${file}` : name;
  }

  /** The value of a facet as the command reads its text: none, a number, true, false, null, or a word. */
  function facetValue(text, name, registry) {
    const core = registry.core[name];
    if (core) {
      if (name === "kv_dtype" && text === "none") return null;
      return core.kind === "integer" && /^-?\d+$/.test(text) ? Number(text) : text;
    }
    const words = { true: true, false: false, null: null };
    if (Object.hasOwn(words, text)) return words[text];
    return /^-?\d{1,15}$/.test(text) ? Number(text) : text;
  }

  /** The product that was chosen, where some condition of the registry tells it from others of its architecture. */
  function deviceOf(question, registry) {
    return registry.tellsDevices && registry.facets.device.known.has(question.gpu) ? question.gpu : null;
  }

  /** What `explain` of this page takes: the platform, and the options. Throws `RequestError` for an unknown word. */
  function read(question, registry) {
    const { RequestError } = attnreg;
    const architecture = registry.architectures[question.arch];
    if (!architecture) throw new RequestError(`${registry.title} has no architecture ${question.arch}`);
    for (const flag of question.flags) {
      if (!registry.facets.flags.known.has(flag)) throw new RequestError(`${registry.title} has no flag ${flag}`);
    }
    for (const name of Object.keys(question.packages ?? {})) {
      if (!(name in registry.packages)) throw new RequestError(`${registry.title} has no package ${name}`);
    }
    const given = {};
    const extra = {};
    for (const [name, text] of Object.entries(question.facets)) {
      (registry.core[name]?.of === "request" ? given : extra)[name] = facetValue(text, name, registry);
    }
    const device = deviceOf(question, registry);
    const platform = attnreg.makePlatform(architecture.platform, question.arch, question.flags, question.packages, device);
    const { features, tp: ranks, backend } = question;
    const lengths = [...new Set(question.lengths)].sort((a, b) => a - b);
    const options = { given, extra, features, ranks, backend, lengths };
    return { platform, options };
  }

  function option(name, value, files) {
    const written = `--${name.replaceAll("_", "-")}`;
    if (name === "selector") return [written];
    if (name === "deny") return value.split(",").flatMap((backend) => [written, backend]);
    return [written, name === "draft" ? files.draft ?? value : value];
  }

  const quotedWord = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

  /**
   * The words of the command that asks the question. `files` names what was dropped: the config of the model, that of
   * its draft, and an overlay.
   */
  function words(question, registry, files) {
    const out = ["attnreg", "explain", "--platform", registry.architectures[question.arch].platform, "--arch", question.arch];
    const device = deviceOf(question, registry);
    if (device !== null) out.push("--device-name", device);
    for (const flag of question.flags) out.push("--flag", flag);
    const packages = question.packages === null ? [] : Object.entries(question.packages);
    for (const [name, version] of packages) out.push("--package", version ? `${name}==${version}` : name);
    if (question.packages !== null && packages.length === 0) out.push("--package", "none");
    if (question.model) out.push("--model", files.model ?? question.model);
    if (question.tp !== 1) out.push("--tp", String(question.tp));
    for (const length of question.lengths) out.push("--length", String(length));
    for (const name of MORE) if (name in question.more) out.push(...option(name, question.more[name], files));
    for (const [name, value] of Object.entries(question.facets)) {
      if (registry.core[name]) out.push(`--${name.replaceAll("_", "-")}`, String(value));
      else out.push("--set", `${name}=${value}`);
    }
    for (const feature of question.features) out.push("--feature", feature);
    if (question.backend !== null) out.push("--backend", question.backend);
    const name = files.overlay?.base ?? question.registry;
    if (name !== "default") out.push("--registry", name);
    if (files.overlay) out.push("--overlay", files.overlay.file);
    return out;
  }

  const commandLine = (question, registry, files = {}) => words(question, registry, files).map(quotedWord).join(" ");

  const literal = (value) => (value !== null && typeof value === "object" ? collection(value) : attnreg.quoted(value));

  function collection(value) {
    if (Array.isArray(value)) return value.length > 0 ? `{${value.map(literal).join(", ")}}` : "set()";
    return `{${Object.entries(value).map(([name, item]) => `${literal(name)}: ${literal(item)}`).join(", ")}}`;
  }

  /** A program that selects for the requests of an explanation, each once. */
  function python(question, explanation, overlay) {
    const { registry, answers } = explanation;
    const requests = answers.flatMap((a) => a.selections.slice(0, 1)).map((selection) => selection.request);
    const lines = requests.map((request) => {
      const fields = Object.entries(request).map(([name, value]) => `${name}=${literal(value)}`);
      return `    AttentionRequest(${fields.join(", ")}),`;
    });
    const platform = answers.flatMap((a) => a.selections).at(0)?.platform;
    if (platform === undefined) return "# no layer of this model computes softmax attention";
    const where = [`platform=${literal(platform.platform)}`, `arch=${literal(platform.arch)}`];
    if (platform.device) where.push(`device=${literal(platform.device)}`);
    if (platform.flags.length > 0) where.push(`flags=${literal(platform.flags)}`);
    if (platform.packages !== null) where.push(`packages=${literal(platform.packages)}`);
    const { prefer, deny, draft_backend: ofDraft, selector } = question.more;
    const choices = [...(prefer ? [{ prefer }] : []), ...(deny ? [{ deny: deny.split(",") }] : [])];
    const laid = [...(overlay ? [literal(overlay.file)] : []), ...(choices.length > 0 ? [JSON.stringify({ choices })] : [])];
    const base = literal(overlay ? overlay.base : question.registry);
    const loaded = `load_registry(${laid.length > 0 ? `${base}, [${laid.join(", ")}]` : base})${selector ? ".selector" : ""}`;
    const named = question.backend === null ? "None" : literal(question.backend);
    const backend = ofDraft ? `${literal(ofDraft)} if request.role == "draft" else ${named}` : named;
    const more = backend === "None" ? "" : `, ${backend}`;
    return [
      "from attnreg import AttentionRequest, NoBackendError, Platform, load_registry, select",
      "",
      `registry = ${loaded}  # written for ${registry}`,
      `platform = Platform(${where.join(", ")})`,
      "requests = [",
      ...new Set(lines),
      "]",
      "for request in requests:",
      "    try:",
      `        print(select(request, platform, registry${more}))`,
      "    except NoBackendError as error:",
      "        print(error)",
    ].join("\n");
  }

  attnreg.address = { MORE, empty, droppedName, byPython, toHash, fromHash, read, words, commandLine, python };
})((globalThis.attnreg ??= {}));
