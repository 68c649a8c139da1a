// A question as the address of a page, and as the words of the command.
(function (attnreg) {
  "use strict";

  /**
   * A question: registry, fingerprint, arch, gpu (the product that was chosen, "" for none), model ("" for none), tp, backend (null for none), facets (name -> value as
   * the command takes it), features, flags, packages (null where every package is assumed), lengths, and `more`: other
   * options, by their names in MORE, as the command takes them. `beside` is the hash of a question that is shown beside
   * it, without its #; "" for none.
   */
  const EMPTY = { registry: "default", fingerprint: "", arch: "sm90", gpu: "", model: "", tp: 1, backend: null, beside: "" };
  const MORE = ["draft", "draft_kv_dtype", "draft_backend", "layer", "prefer", "deny", "selector"];

  // facets that have a place of their own in an address, or none; the first is no name of a facet
  const ELSEWHERE = ["__proto__", "platform", "arch", "device", "flags", "packages", "features", "model"];

  function empty() {
    return { ...EMPTY, facets: {}, features: [], flags: [], packages: null, lengths: [], more: {} };
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
    for (const name of packageWords(question)) out.append("package", name);
    if (question.beside) out.append("beside", question.beside);
    return `#${out}`.replaceAll("%40", "@").replaceAll("%2F", "/").replaceAll("%3D", "=").replaceAll("%2C", ",");
  }

  /** The question of a hash, and what in it no question has. */
  function fromHash(hash) {
    const question = empty();
    const unread = [];
    for (const [name, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
      if (name === "registry") [question.registry, question.fingerprint = ""] = value.split("@");
      else if (name === "arch" || name === "gpu" || name === "model" || name === "backend" || name === "beside") question[name] = value;
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

  /** Each package as the command takes it; `none` where none is installed. */
  function packageWords({ packages }) {
    if (packages === null) return [];
    const words = Object.entries(packages).map(([name, version]) => (version ? `${name}==${version}` : name));
    return words.length > 0 ? words : ["none"];
  }

  /** The product that was chosen, where some condition of the registry tells it from others of its architecture. */
  const deviceOf = (question, lists) => (lists.devices.includes(question.gpu) ? question.gpu : null);

  /** Whether a question says nothing but its registry, its architecture and its model: the build answers such. */
  function isPlain(question, lists) {
    const { registry, arch, model, gpu } = question;
    return deviceOf(question, lists) === null && toHash({ ...question, fingerprint: "" }) === toHash({ ...empty(), registry, arch, model, gpu });
  }

  function option(name, value, files) {
    const written = `--${name.replaceAll("_", "-")}`;
    if (name === "selector") return [written];
    if (name === "deny") return value.split(",").flatMap((backend) => [written, backend]);
    return [written, name === "draft" ? files.draft ?? value : value];
  }

  const quotedWord = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

  /**
   * The options of the command that asks the question. lists: those of its registry. files: what was dropped, as the
   * command names it: the config of the model, that of its draft, and an overlay.
   */
  function words(question, lists, files = {}) {
    const known = lists.architectures.find(({ name }) => name === question.arch);
    const out = known ? ["--platform", known.platform] : [];
    out.push("--arch", question.arch);
    const device = deviceOf(question, lists);
    if (device !== null) out.push("--device-name", device);
    for (const flag of question.flags) out.push("--flag", flag);
    for (const name of packageWords(question)) out.push("--package", name);
    if (question.model) out.push("--model", files.model ?? question.model);
    if (question.tp !== 1) out.push("--tp", String(question.tp));
    for (const length of question.lengths) out.push("--length", String(length));
    for (const name of MORE) if (name in question.more) out.push(...option(name, question.more[name], files));
    for (const [name, value] of Object.entries(question.facets)) {
      if (Object.hasOwn(lists.options, name)) out.push(lists.options[name], String(value));
      else out.push("--set", `${name}=${value}`);
    }
    for (const feature of question.features) out.push("--feature", feature);
    if (question.backend !== null) out.push("--backend", question.backend);
    const name = files.overlay?.base ?? question.registry;
    if (name !== "default") out.push("--engine", name);
    if (files.overlay) out.push("--overlay", files.overlay.file);
    return out;
  }

  const commandLine = (given) => ["attnreg", "explain", ...given].map(quotedWord).join(" ");

  attnreg.address = { MORE, empty, droppedName, toHash, fromHash, isPlain, words, commandLine };
})((globalThis.attnreg ??= {}));
