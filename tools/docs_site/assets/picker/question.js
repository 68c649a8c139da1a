// Requests and platforms: made of fields as attnreg validates them, and in words as it prints them.
(function (attnreg) {
  "use strict";

  const { RequestError, quoted } = attnreg;
  const WITHOUT_CACHE = ["encoder", "encoder_only"];
  const PLATFORM_NAMES = { cuda: "CUDA", rocm: "ROCm", xpu: "XPU", cpu: "CPU" };
  // how features are said that have a phrase, in the order in which they are said
  const PHRASES = {
    sliding_window: "sliding window",
    chunk: "chunks",
    sinks: "sinks",
    softcap: "softcap",
    alibi: "ALiBi",
    score_bias: "score bias",
    sparse_blocks: "sparse blocks",
    mm_prefix: "multimodal prefix",
    mm_prefix_in_window: "held in the window",
    non_causal: "bidirectional",
  };
  const PLACES = Object.keys(PHRASES);

  /** Throws `RequestError` for a value that a field of a request does not take. */
  function checkField(facet, value) {
    if (value === null && !facet.required) return;
    if (facet.kind === "integer") {
      if (!Number.isSafeInteger(value)) {
        throw new RequestError(`${facet.name} is ${quoted(value)}; expected an integer of at least ${facet.least}`);
      }
      if (value < facet.least) throw new RequestError(`${facet.name} is ${value}; expected at least ${facet.least}`);
    } else if (typeof value !== "string" || value === "") {
      throw new RequestError(`${facet.name} is ${quoted(value)}; expected a word of the registry's vocabulary`);
    }
  }

  /** Throws `RequestError` where no group of query heads shares a KV head. */
  function checkHeads({ num_heads: heads, num_kv_heads: kvHeads }) {
    if (heads && kvHeads && heads % kvHeads !== 0) {
      throw new RequestError(
        `num_heads is ${heads} and num_kv_heads is ${kvHeads}; ` +
          "the second must divide the first (each KV head serves a whole group of query heads)",
      );
    }
  }

  /** A request of some fields; the others have their defaults. Throws `RequestError` for a field that is not valid. */
  function makeRequest(registry, fields) {
    const request = { extra: {}, ...registry.ordinary, ...fields };
    for (const facet of registry.checked) checkField(facet, request[facet.name]);
    checkHeads(request);
    if (request.head_size_v === request.head_size) request.head_size_v = null;
    request.features = [...new Set(request.features ?? [])].sort();
    const extra = {};
    for (const name of Object.keys(request.extra).sort()) {
      extra[name] = request.extra[name];
      if (Object.hasOwn(request, name)) {
        throw new RequestError(`extra names ${quoted(name)}, which is a field of AttentionRequest; pass it by keyword`);
      }
    }
    request.extra = extra;
    return request;
  }

  /** A request that is valid with another value of one field; what that field has no part in is not checked again. */
  function withField(registry, request, name, value) {
    const changed = { ...request, [name]: value };
    checkField(registry.core[name], value);
    checkHeads(changed);
    if (changed.head_size_v === changed.head_size) changed.head_size_v = null;
    return changed;
  }

  /** A platform; `packages` maps names to versions, null where every package is installed. */
  function makePlatform(platform, arch, flags = [], packages = null, device = null) {
    const pairs = packages && Object.entries(packages).sort(([a], [b]) => (a < b ? -1 : 1));
    return { platform, arch, flags: [...new Set(flags)].sort(), packages: pairs && Object.fromEntries(pairs), ...(device === null ? {} : { device }) };
  }

  /** An MLA request in the expanded form that prefill computes. */
  function expanded(registry, request) {
    const { qk_nope_head_dim: nope, qk_rope_head_dim: rope } = request;
    const headSize = nope === null || rope === null ? request.head_size : nope + rope;
    const more = { phase: "prefill", head_size: headSize, head_size_v: request.v_head_dim, num_kv_heads: request.num_heads };
    return makeRequest(registry, { ...request, ...more });
  }

  /** The fields of a request that differ from their defaults. */
  function requestDict(registry, request) {
    const out = { head_size: request.head_size };
    for (const facet of Object.values(registry.core)) {
      if (facet.of !== "request" || facet.name === "features" || facet.name === "head_size") continue;
      if (request[facet.name] !== facet.ordinary) out[facet.name] = request[facet.name];
    }
    if (request.features.length > 0) out.features = request.features;
    if (Object.keys(request.extra).length > 0) out.extra = request.extra;
    return out;
  }

  // a letter, digit or underscore of any alphabet, or one of these marks
  const PLAIN = /^[\p{L}\p{N}_.+*=<>!~/-]+$/u;

  /** A text as JSON in ASCII, as Python writes it. */
  function asciiText(text) {
    return JSON.stringify(text).replace(/[^ -~]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
  }

  function valueWords(value) {
    if (typeof value === "boolean") return value ? "true" : "false";
    if (typeof value === "string" && !PLAIN.test(value)) return asciiText(value);
    return value === null ? "not given" : String(value);
  }

  const facetWords = (facets) => Object.entries(facets).map(([name, value]) => `${name} ${valueWords(value)}`);
  const cacheWords = (kvDtype) => `KV cache ${valueWords(kvDtype)}`;

  /** A feature in words, without a number. */
  function featureWords(feature) {
    if (Object.hasOwn(PHRASES, feature)) return PHRASES[feature];
    const taken = Object.entries(PHRASES).some(([name, phrase]) => phrase === feature && name !== feature);
    return taken ? asciiText(feature) : valueWords(feature);
  }

  function headWords(heads, kvHeads, size, sizeV) {
    const sizes = sizeV === null || sizeV === size ? `${size}` : `${size}/${sizeV}`;
    if (heads === null && kvHeads === null) return `head size ${sizes}`;
    const noun = kvHeads === null ? "query " : heads === null ? "KV " : "";
    const numbers = [...new Set([heads, kvHeads].filter((n) => n !== null))].join("/");
    return `${numbers} ${noun}head${numbers === "1" ? "" : "s"} of ${sizes}`;
  }

  /** A request in words. phrases: the features that are said with a number. without: fields to leave out. */
  function requestWords(registry, request, phrases = {}, without = []) {
    const said = ["head_size", "head_size_v", "num_heads", "num_kv_heads", "dtype", "kv_dtype", "features"];
    const words = [headWords(request.num_heads, request.num_kv_heads, request.head_size, request.head_size_v)];
    if (!without.includes("dtype")) words.push(valueWords(request.dtype));
    const cached = !WITHOUT_CACHE.includes(request.attn_type) || request.kv_dtype !== "auto";
    if (cached && !without.includes("kv_dtype")) words.push(cacheWords(request.kv_dtype));
    for (const facet of Object.values(registry.core)) {
      if (facet.of !== "request" || [...said, ...without].includes(facet.name)) continue;
      if (request[facet.name] !== facet.ordinary) words.push(...facetWords({ [facet.name]: request[facet.name] }));
    }
    if (!without.includes("extra")) words.push(...facetWords(request.extra));
    const place = (feature) => (PLACES.includes(feature) ? PLACES.indexOf(feature) : PLACES.length);
    const ordered = [...request.features].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
    return [...words, ...ordered.map((feature) => phrases[feature] ?? featureWords(feature))];
  }

  /** A platform in words: CUDA sm90 (H100), flag aiter, every package assumed. */
  function platformWords(registry, platform) {
    const { flags, packages } = platform;
    const name = PLATFORM_NAMES[platform.platform] ?? platform.platform;
    const { device } = platform;
    const words = [`${name} ${device ? `${platform.arch} (device ${device})` : registry.architectures[platform.arch].title}`];
    if (flags.length > 0) words.push(`flag${flags.length > 1 ? "s" : ""} ${flags.map(valueWords).join(", ")}`);
    if (packages === null) return [...words, "every package assumed"];
    const names = Object.entries(packages).map(([p, version]) => valueWords(version ? `${p}==${version}` : p));
    return [...words, names.length > 0 ? `only packages ${names.join(", ")}` : "no package"];
  }

  Object.assign(attnreg, {
    makeRequest, withField, makePlatform, expanded, requestDict, requestWords, platformWords, facetWords, cacheWords, featureWords,
  });
})((globalThis.attnreg ??= {}));
