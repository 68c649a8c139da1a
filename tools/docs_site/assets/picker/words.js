// A question in words: "gpt-oss on 2 x H100 vllm fp8". It finds names that the site knows, and says what it did not read.
(function (attnreg) {
  "use strict";

  const IGNORED = new Set("a an and at cache card cards engine for gets gpu gpus in kernel kv model of on rank ranks run runs the what which will with".split(" "));
  const MOST_WORDS = 4;
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");

  /** The words of a text; "2x" and "tp2" are two words each, and so is "2xH100". */
  function split(text) {
    return text
      .toLowerCase()
      .replace(/×/g, "x")
      .replace(/\b(\d+)\s*x\s*(?=[a-z])/g, "$1 x ")
      .replace(/\b(\d+)x(?=\s|$)/g, "$1 x")
      .replace(/\btp\s*[=:]?\s*(\d+)/g, "tp $1")
      .split(/[\s,;]+/)
      .filter((word) => word !== "");
  }

  /** The names that equal a text, or else begin with it, or else have it inside; none for a short text. */
  function matching(text, names, within) {
    const exact = names.filter((name) => plain(name) === text);
    if (exact.length > 0 || !within || text.length < 3) return exact;
    const starts = names.filter((name) => plain(name).startsWith(text));
    return starts.length > 0 ? starts : names.filter((name) => plain(name).includes(text));
  }

  const named = (text, names) => matching(text, names, false)[0] ?? null;

  /** The registry of an engine and, where one is given, of a release: vllm, vllm-0.33, vllm 0.33.0. */
  function registryOf(words, { registries, newest }) {
    const [, engine, version = words[1] ?? ""] = /^([a-z]+)[-_ ]?v?(\d[\d.]*)?$/.exec(words[0]) ?? [];
    if (engine === undefined || !Object.hasOwn(newest, engine)) return words[0] === "attnreg" ? { name: "default", used: 1 } : null;
    const wanted = version.replace(/^v/, "");
    const found = /^\d/.test(wanted) ? registries.filter((name) => name === `${engine}-${wanted}` || name.startsWith(`${engine}-${wanted}.`)) : [];
    if (found.length > 0) return { name: found.at(-1), used: words[0].includes(wanted) ? 1 : 2 };
    return { name: newest[engine], used: 1 };
  }

  /**
   * The fields of a question that some words state, what each stands for with other models that it may mean, and the
   * words that are none.
   * known: models, registries, newest (engine -> registry), products (product or name -> architecture), kv_dtypes.
   */
  function read(text, known) {
    const words = split(text);
    const fields = {};
    const said = [];
    const unread = [];
    const names = Object.keys(known.products);
    let count = null;
    for (let at = 0; at < words.length; ) {
      const rest = words.slice(at);
      const tell = (name, value, shown, used, others = []) => {
        fields[name] = value;
        said.push([name, shown, others]);
        at += used;
        return true;
      };
      if (/^\d{1,3}$/.test(rest[0]) && rest[1] === "x") { count = Number(rest[0]); at += 2; continue; }
      if (rest[0] === "tp" && /^\d{1,3}$/.test(rest[1] ?? "")) { tell("tp", Number(rest[1]), rest[1], 2); continue; }
      if (IGNORED.has(rest[0])) { at++; continue; }
      const registry = registryOf(rest, known);
      if (registry) { tell("registry", registry.name, registry.name, registry.used); continue; }
      const lengths = [...Array(Math.min(MOST_WORDS, rest.length)).keys()].map((n) => n + 1).reverse();
      const joined = (n) => plain(rest.slice(0, n).join(""));
      const found = ["exact", "within"].some((way) => lengths.some((n) => {
        const own = joined(n);
        if (own === "") return false;
        const product = named(own, names);
        if (product) return tell("arch", known.products[product], product, n) && tell("gpu", product, product, 0);
        const dtype = n === 1 ? named(own, known.kv_dtypes) : null;
        if (dtype) return tell("kv_dtype", dtype, dtype, n);
        // a number alone is no model
        const [model, ...others] = /[a-z]/.test(own) ? matching(own, known.models, way === "within") : [];
        return model ? tell("model", model, model, n, others) : false;
      }));
      if (found) continue;
      const next = named(plain(rest[1] ?? ""), names);
      if (/^\d{1,3}$/.test(rest[0]) && next) { count = Number(rest[0]); at++; continue; }
      unread.push(rest[0]);
      at++;
    }
    if (count !== null && !("tp" in fields)) {
      fields.tp = count;
      said.push(["tp", String(count), []]);
    }
    return { fields, said: said.filter(([name], i) => name !== "gpu" && said.findLastIndex(([other]) => other === name) === i), unread };
  }

  attnreg.words = { read };
})((globalThis.attnreg ??= {}));
