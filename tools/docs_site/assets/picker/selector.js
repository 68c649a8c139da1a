// The selector: a request, a platform and a registry -> a selection with every reason, as attnreg/selection has it.
(function (attnreg) {
  "use strict";

  const { RequestError, holds, decided, installed, printed, quoted, clausesOf } = attnreg;
  const WITHOUT_CACHE = ["encoder", "encoder_only"];

  function shown(value) {
    if (typeof value === "boolean") return value ? "true" : "false";
    return value === null ? "not given" : String(value);
  }

  /** One reason against a candidate; `text` is its sentence. */
  class Reason {
    constructor(kind, facets, where, { asked = null, supported = "", sentence = "", case: because = null } = {}) {
      this.kind = kind;
      this.facets = facets;
      this.where = where;
      this.asked = asked;
      this.supported = supported;
      this.sentence = sentence;
      this.because = because;
    }

    get text() {
      if (this.sentence) return this.sentence;
      if (this.kind === "feature") return `${this.asked} is not supported`;
      const facet = this.facets[0];
      if (facet === "flags") return `flag ${this.asked} is off`;
      if (facet === "packages") {
        return `package ${this.asked} is not installed` + (this.supported ? `; needs ${this.supported}` : "");
      }
      const verb = this.kind === "claim" ? "supported:" : "needs";
      const because = this.because ? ` (${this.because.short})` : "";
      return `${facet} is ${shown(this.asked)}${because}; ${verb} ${this.supported}`;
    }

    toDict() {
      const { kind, facets, asked, supported, text } = this;
      return { kind, facets, asked, supported, text, where: this.where.text };
    }
  }

  const candidateTitle = (name, variant) => (variant ? `${name}/${variant}` : name);

  /** Judges backends at one point: each accepts, or has every reason against it listed. */
  class Judge {
    /** toRun: whether attnreg itself has to run the backend; each kernel module that the data name is taken to load. */
    constructor(registry, point, denied, toRun = false) {
      this.registry = registry;
      this.point = point;
      this.denied = denied;
      this.toRun = toRun;
      this.features = point.get("features");
      this.waived = new Map();
      for (const waiver of registry.waivers) {
        if (holds(waiver.when, point)) for (const facet of waiver.facets) this.waived.set(facet, waiver);
      }
    }

    candidate(rank, row, where, condition) {
      const reasons = [];
      if (this.denied.has(row.name)) reasons.push(denial(this.denied.get(row.name)));
      if (condition !== null) {
        if (!holds(condition, this.point)) reasons.push(...this.unmet(condition, "order"));
        if (row.status === "experimental") {
          reasons.push(new Reason("status", [], row.where, { sentence: "experimental: never chosen automatically" }));
        }
      }
      const best = this.bestVariant(row, this.toRun && condition !== null);
      reasons.push(...best.reasons);
      const emulates = best.variant ? this.emulated(best.variant) : [];
      let variant = best.variant;
      // a variant that a user names is the only one of its row
      if (variant === null && row !== this.registry.backends[row.name]) variant = row.variants[0];
      const name = variant ? variant.name : null;
      return { rank, name: row.name, variant: name, title: candidateTitle(row.name, name), reasons, where, emulates };
    }

    emulated(variant) {
      return Object.keys(variant.emulated).filter((feature) => this.features.has(feature)).sort();
    }

    /** The variant by which a row is judged, and the reasons against it. */
    bestVariant(row, automatic) {
      let emulating = null;
      let nearest = null;
      for (const variant of row.variants) {
        if (!holds(variant.when, this.point)) continue;
        const reasons = this.reasons(variant);
        const denied = this.denied.get(`${row.name}/${variant.name}`);
        if (denied) reasons.unshift(denial(denied));
        reasons.push(...this.unrunnable(row, variant, automatic));
        if (reasons.length === 0) {
          if (this.emulated(variant).length === 0) return { variant, reasons };
          emulating ??= variant;
        } else if (nearest === null || reasons.length < nearest.reasons.length) {
          nearest = { variant, reasons };
        }
      }
      if (emulating !== null) return { variant: emulating, reasons: [] };
      if (nearest !== null) return nearest;
      let best = null;
      for (const variant of row.variants) {
        const [reasons, count] = [this.reasonsAgainst(variant), this.architectureCount(variant)];
        const key = [Number(count === 0), reasons.length, -count];
        if (best === null || before(key, best.key)) best = { key, reasons };
      }
      return { variant: null, reasons: best.reasons };
    }

    /** Why attnreg itself does not run a variant. automatic: nobody named its row. */
    unrunnable(row, variant, automatic) {
      if (!this.toRun) return [];
      const title = candidateTitle(row.name, variant.name);
      const reason = (kind, sentence) => [new Reason(kind, [], variant.where, { sentence })];
      // an order that names a variant names no other
      if (automatic && variant.runOnRequest && row.variants.length > 1) {
        return reason("status", `${title} runs where it is named: ${variant.runOnRequest}`);
      }
      if (variant.runs && this.registry.imports) return [];
      return reason("module", `${title} has no kernel module that attnreg can run`);
    }

    reasonsAgainst(variant) {
      const reasons = this.reasons(variant);
      const key = (r) => JSON.stringify([r.facets, r.asked]);
      const required = new Set(reasons.filter((r) => r.kind === "requires").map(key));
      return [...this.unmet(variant.when, "variant").filter((r) => !required.has(key(r))), ...reasons];
    }

    architectureCount(variant) {
      const platform = this.point.get("platform");
      return this.registry.architecturesOf(platform).filter((arch) => decided(variant.when, { platform, arch }) !== false).length;
    }

    reasons(variant) {
      const out = this.unmet(variant.requires, "requires");
      for (const claim of variant.claims) {
        const value = this.point.at(claim.place);
        if (value !== null && !claim.matcher.test(value) && !this.waived.has(claim.facet)) {
          out.push(this.mismatch("claim", claim));
        }
      }
      const unserved = [...this.features].filter((f) => !variant.served.has(f));
      for (const feature of unserved.sort()) {
        out.push(new Reason("feature", ["features", feature], variant.featuresAt, { asked: feature }));
      }
      for (const rule of variant.rules) {
        if (holds(rule.when, this.point)) out.push(new Reason("rule", rule.facets, rule.where, { sentence: rule.reject }));
      }
      return out;
    }

    /** A reason for each part of a condition that does not hold. */
    unmet(condition, kind) {
      const out = [];
      for (const clause of condition.clauses) {
        const value = this.point.at(clause.place);
        if (clause.matcher.test(value)) continue;
        if (clause.facet === "packages") {
          const missing = clause.matcher.mentions.filter((r) => !installed(r, value));
          out.push(...missing.map((r) => missingPackage(r, value, clause.where, kind)));
        } else if (clause.matcher.form) {
          out.push(...wrongWords(clause, value, kind));
        } else {
          out.push(this.mismatch(kind, clause));
        }
      }
      for (const group of condition.any) {
        if (!group.of.some((part) => holds(part, this.point))) {
          out.push(new Reason(kind, group.facets, group.where, { sentence: group.text }));
        }
      }
      for (const part of condition.none) {
        if (holds(part.of, this.point)) out.push(new Reason(kind, part.facets, part.where, { sentence: part.text }));
      }
      return out;
    }

    mismatch(kind, clause) {
      const derived = this.registry.derived[clause.facet];
      return new Reason(kind, [clause.facet], clause.where, {
        asked: this.point.get(clause.facet),
        // the text of a claim lists what is supported, so it has no "or"
        supported: kind === "claim" ? clause.matcher.text : clause.matcher.inWords,
        case: derived ? this.registry.derivedCase(derived, this.point).where : null,
      });
    }

    variantOf(candidate) {
      return this.registry.backends[candidate.name].variants.find((v) => v.name === candidate.variant);
    }

    /** A candidate that would emulate what the winner serves natively. */
    passedOver(candidate, winner) {
      const words = candidate.emulates.join(", ");
      const pronoun = candidate.emulates.length > 1 || words.endsWith("s") ? "them" : "it";
      const sentence = `emulates ${words} (slow); ${winner.title} serves ${pronoun} natively`;
      const { where } = this.variantOf(candidate).emulated[candidate.emulates[0]];
      const facets = ["features", ...candidate.emulates];
      return { ...candidate, reasons: [new Reason("emulated", facets, where, { asked: words, sentence })] };
    }

    /** Sentences on claims that a waiver suspends, unchecked words, emulated features and known failures. */
    warnings(candidate) {
      const variant = this.variantOf(candidate);
      const out = [];
      for (const claim of this.waived.size ? variant.claims : []) {
        const [waiver, value] = [this.waived.get(claim.facet), this.point.get(claim.facet)];
        if (waiver && value !== null && !claim.matcher.test(value)) {
          const isFor = `${claim.facet} is ${printed(value)}, and ${candidate.title} is for ${claim.matcher.text}`;
          out.push(`${isFor}: ${waiver.because} (${waiver.where.short})`);
        }
      }
      const unchecked = variant.unchecked.filter(({ word }) => this.features.has(word) || this.isUnusual(word));
      if (unchecked.length > 0) {
        const places = [...new Set(unchecked.map((u) => u.where.short))].join(", ");
        out.push(`${candidate.title} does not check ${unchecked.map((u) => u.word).join(", ")} here (${places})`);
      }
      if (candidate.emulates.length > 0) {
        const why = candidate.emulates.map((feature) => variant.emulated[feature].why).join("; ");
        out.push(`${candidate.title} emulates ${candidate.emulates.join(", ")} (slow): ${why}`);
      }
      for (const { text, where } of this.failures(candidate)) {
        out.push(`${candidate.title} is chosen, and then fails: ${text} (${where.short})`);
      }
      return out;
    }

    /** Why the engine is known to stop with a candidate that is chosen. */
    failures(candidate) {
      return following(this.variantOf(candidate), this.point).filter((follows) => follows.kind === "fails");
    }

    isUnusual(facet) {
      const core = this.registry.core[facet];
      return core?.of === "request" && (core.required && facet === "head_size" || this.point.get(facet) !== core.ordinary);
    }
  }

  function before(a, b) {
    const i = a.findIndex((n, place) => n !== b[place]);
    return i >= 0 && a[i] < b[i];
  }

  /** What fails once a candidate is chosen, as a reason against it. */
  function failureReason({ text, where, known }) {
    const facets = known.fails ? [...new Set([...clausesOf(known.when)].map((clause) => clause.facet))] : ["block_size"];
    return new Reason("fails", facets, where, { sentence: text });
  }

  const denial = (choice) => new Reason("denied", [], choice.where, { sentence: choice.denial });

  /** A reason for each word that a set lacks or must not hold; one for all words of which it needs any. */
  function wrongWords(clause, value, kind) {
    const { form, mentions } = clause.matcher;
    const flags = clause.facet === "flags";
    const one = (more) => new Reason(kind, [clause.facet], clause.where, more);
    if (form === "any") {
      return [one({ sentence: `${flags ? "needs" : "only for requests with"} ${clause.nouns.join(" or ")}` })];
    }
    if (form === "all") {
      const missing = mentions.filter((word) => !value.has(word));
      return missing.map((word) => one({ asked: word, sentence: flags ? "" : `only for requests with ${word}` }));
    }
    const tooMany = [...value].filter((word) => mentions.includes(word) === (form === "none")).sort();
    return tooMany.map((word) =>
      one({ asked: word, sentence: flags ? `flag ${word} is on; needs it off` : `not for requests with ${word}` }),
    );
  }

  function missingPackage(requirement, packages, where, kind) {
    const version = packages[requirement.package];
    const is = `package ${requirement.package} is version ${version}; needs ${requirement.versions}`;
    const { package: asked, versions: supported } = requirement;
    return new Reason(kind, ["packages"], where, { asked, supported, sentence: version === undefined ? "" : is });
  }

  /** Bytes as 2.3 MiB. */
  function readable(size) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (size < 1024) return `${unit === "B" || size >= 100 ? rounded(size, 0) : rounded(size, 1)} ${unit}`;
      size /= 1024;
    }
    return `${rounded(size, 1)} TiB`;
  }

  // as Python rounds: a number in the middle goes to the even digit
  function rounded(value, digits) {
    const scaled = value * 10 ** digits;
    const floor = Math.floor(scaled);
    const whole = scaled - floor === 0.5 ? floor + (floor % 2) : Math.round(scaled);
    return (whole / 10 ** digits).toFixed(digits);
  }

  /** What follows from choosing a variant at a point. Of several entries on blocks the first that holds counts. */
  function following(variant, point) {
    const out = [];
    let blocksKnown = false;
    for (const known of variant.consequences.filter((c) => holds(c.when, point))) {
      const { where, source } = known;
      const add = (kind, text, value = null) => out.push({ kind, text, where, value, source, known });
      const says = (text) => (known.says ? `${text}; ${known.says}` : text);
      if (known.fails) add("fails", known.fails);
      else if (known.runs) add("runs", known.runs);
      else if (known.workspace !== null) add("workspace", says(workspaceWords(known, point)), known.workspace);
      else if (known.stores) {
        const stored = !WITHOUT_CACHE.includes(point.get("attn_type")) && point.get("kv_dtype") !== known.stores;
        if (stored) add("stores", says(`the KV cache is stored as ${known.stores}`), known.stores);
      } else if (!blocksKnown) {
        blocksKnown = true;
        const page = point.get("block_size");
        if (page === null || WITHOUT_CACHE.includes(point.get("attn_type"))) continue;
        const [sizes, multiples, text] = known.blocks;
        const fitting = sizes.filter((size) => page % size === 0);
        const block = multiples.some((n) => page % n === 0) ? page : fitting.length ? Math.max(...fitting) : null;
        if (block === null) {
          add("fails", says(`the kernel reads blocks of ${text} tokens, and none divides a page of ${page}`));
        } else {
          const how = block === page ? "each as one block" : `in blocks of ${block}`;
          add("kernel_block", says(`pages of ${page} tokens, which the kernel reads ${how}`), block);
        }
      }
    }
    return out;
  }

  function workspaceWords(known, point) {
    const text = `a workspace of ${readable(known.workspace)} on each GPU, beside the KV cache`;
    if (known.perQueryElement === null) return text;
    const heads = point.get("num_heads");
    const each = readable(known.perQueryElement * point.get("head_size") * (heads || 1));
    return `${text}; ${each} for each ${heads ? "token" : "token and query head"} of the longest step, if that is more`;
  }

  /** A product or a remainder of two numbers, of which facets may be one or both; null where there is none. */
  function computed(value, point) {
    const [left, right] = (value.product ?? value.remainder).map((o) => typeof o === "string" ? point.get(o) : o);
    if (left === null || right === null || ("remainder" in value && right === 0)) return null;
    return "product" in value ? left * right : left % right;
  }

  /** The value that a step gives a facet: a constant, another facet's, one computed of two, or a set with words put in and taken out. */
  function valueSet(value, facet, point) {
    if (value === null || typeof value !== "object") return value;
    if ("from" in value) return point.get(value.from);
    if ("product" in value || "remainder" in value) return computed(value, point);
    const words = new Set([...point.get(facet), ...value.on]);
    for (const word of value.off) words.delete(word);
    return words;
  }

  /** What an engine does before it chooses: the steps that wrote, and the point at which it then chooses. */
  function startOf(at) {
    const taken = [];
    let point = at;
    let named = null;
    for (const step of point.registry.steps) {
      if (!holds(step.when, point)) continue;
      const effect = step.effects.find((e) => holds(e.when, point));
      if (effect === undefined) continue;
      const { where, because } = effect;
      if (effect.refuses) {
        return { taken, refusal: { step: step.name, text: effect.refuses, unknown: effect.unknown, where }, named, point };
      }
      if (effect.sets.length === 0) continue;
      const after = Object.fromEntries(effect.sets.map(([facet, value]) => [facet, valueSet(value, facet, point)]));
      const sets = Object.entries(after).map(([facet, value]) => [facet, point.get(facet), value]);
      const done = { step: step.name, sets, because, where };
      taken.push(done);
      if ("named" in after) {
        named = after.named === null ? null : done;
        after.asked = named ? "by_model" : "automatic";
      }
      point = point.changed(after);
    }
    return { taken, refusal: null, named, point };
  }

  const orderAt = (point) => {
    return (point.registry.orders[point.get("platform")] ?? []).find((o) => holds(o.when, point)) ?? null;
  };

  /** What decides a selection: the points, the order, the choices that apply, and what the engine did before. */
  function planOf(request, platform, registry, backend, at = registry.point(request, platform)) {
    let point = at;
    const choices = registry.choices.filter((c) => holds(c.when, point));
    // a later overlay overrides an earlier one, and an argument overrides both
    const choice = backend === null ? choices.findLast((c) => c.strength !== "deny") ?? null : null;
    const denied = new Map(choices.filter((c) => c.strength === "deny").flatMap((c) => c.backends.map((name) => [name, c])));
    let requested = choice?.strength === "require" ? choice.backends[0] : backend;
    if (requested !== null && registry.row(requested) === null) {
      throw new RequestError(`unknown backend ${quoted(requested)}`);
    }
    let start = null;
    if (registry.steps.length > 0) {
      start = startOf(requested === null ? point : point.byName(requested));
      ({ point } = start);
    }
    const named = start?.named ? point.get("named") : null;
    const preferred = requested ?? choice?.backends[0] ?? null;
    const first = preferred !== null && named === null ? point.byName(preferred) : point;
    if (named !== null) requested = null;
    return { registry, first, point, order: orderAt(point), choice, requested, named, denied, start };
  }

  /** The plan in which the order decides, after the same steps. */
  function automatic(plan) {
    const point = plan.point.automatic();
    const choice = plan.choice?.strength === "prefer" ? plan.choice : null;
    const first = choice ? point.byName(choice.backends[0]) : point;
    const start = plan.start && { ...plan.start, named: null, point };
    return { ...plan, first, point, order: orderAt(point), choice, requested: null, named: null, start };
  }

  /** Row, line and condition of each candidate, as they are tried; the condition is null where the row was named. */
  function entriesOf({ registry, order, choice, requested, named, start }) {
    if (named !== null) return [[registry.backends[named], start.named.where, null]];
    const byUser = requested ?? choice?.backends[0] ?? null;
    const row = byUser === null ? null : registry.row(byUser);
    const out = row === null ? [] : [[row, choice ? choice.where : row.where, null]];
    for (const entry of requested === null ? order?.entries ?? [] : []) {
      if (entry.backend !== byUser) out.push([registry.row(entry.backend), entry.where, entry.condition]);
    }
    return out;
  }

  /** The candidates of a plan, each judged when it is first read: a search for remedies reads few of them. */
  class Candidates {
    constructor(plan, toRun = false) {
      const judge = new Judge(plan.registry, plan.point, plan.denied, toRun);
      const first = plan.first === plan.point ? judge : new Judge(plan.registry, plan.first, plan.denied, toRun);
      this.plan = plan;
      this.judge = judge;
      this.first = first;
      this.judged = [];
      this.entries = plan.start?.refusal ? [] : entriesOf(plan);
    }

    /** The verdict on one entry by itself, whatever the others are. */
    at(i) {
      return (this.judged[i] ??= (i === 0 ? this.first : this.judge).candidate(i + 1, ...this.entries[i]));
    }

    find(wanted) {
      for (let i = 0; i < this.entries.length; i++) if (wanted(this.at(i))) return this.at(i);
      return null;
    }

    /** The first that accepts without emulating anything. */
    get native() {
      return this.find((c) => c.reasons.length === 0 && c.emulates.length === 0);
    }

    get chosen() {
      return this.native ?? this.find((c) => c.reasons.length === 0);
    }

    /** The verdict on one entry beside the others: one that emulates loses to a native one. */
    verdict(i) {
      const candidate = this.at(i);
      const native = candidate.reasons.length === 0 && candidate.emulates.length > 0 ? this.native : null;
      return native ? this.judge.passedOver(candidate, native) : candidate;
    }

    judgeOf(candidate) {
      return candidate.rank === 1 ? this.first : this.judge;
    }

    /** The winner; where it is known to fail then, with that as a reason against it. */
    get serving() {
      const { chosen } = this;
      const reasons = this.judgeOf(chosen).failures(chosen).map(failureReason);
      return reasons.length > 0 ? { ...chosen, reasons } : chosen;
    }
  }

  /** The selection for a request. Where no backend is valid its `chosen` is null. */
  function evaluate(request, platform, registry, backend = null, toRun = false) {
    return evaluated(planOf(request, platform, registry, backend), request, platform, toRun);
  }

  function evaluated(plan, request, platform, toRun) {
    const { registry, choice, requested, start } = plan;
    const judged = new Candidates(plan, toRun);
    const fallback = fallbackFor(plan, judged);
    if (fallback !== undefined) {
      const given = evaluated(automatic(plan), request, platform, toRun);
      const out = judged.at(0);
      const why = `${out.title} was asked for (${out.reasons[0].text}), but ${fallback.because}`;
      return { ...given, warnings: [`${why} (${fallback.where.short})`, ...given.warnings] };
    }
    const { chosen } = judged;
    const candidates = judged.entries.map((_, i) => judged.verdict(i));
    const order = start?.refusal ? null : plan.order;
    const byUser = requested ?? (choice && chosen?.rank === 1 ? choice.backends[0] : null);
    const point = byUser === null || start?.named ? plan.point : plan.point.byName(byUser);
    const warnings = [...notPreferred(plan, candidates), ...(chosen ? judged.judgeOf(chosen).warnings(chosen) : [])];
    return { request, platform, registry, order, candidates, chosen, requested, choice, start, point, warnings, judged };
  }

  /** The candidates of a question at the point that is given, after an engine's fallback. */
  function judgedAt(point, request, platform, registry, backend) {
    const plan = planOf(request, platform, registry, backend, point);
    const judged = new Candidates(plan);
    return fallbackFor(plan, judged) === undefined ? judged : new Candidates(automatic(plan));
  }

  /**
   * What a selection says of one backend or variant: the candidate where it is chosen, with what is known to fail then,
   * else the first with a reason against it; null where there is neither. The others are judged only where it is valid.
   */
  function verdictOn(name, judged) {
    const own = ownEntries(name, judged);
    if (own.some((i) => judged.at(i).reasons.length === 0) && isNamed(judged.chosen, name)) return judged.serving;
    return own.map((i) => judged.verdict(i)).find((c) => c.reasons.length > 0) ?? null;
  }

  /** Whether no candidate of one backend or variant accepts, so that the others do not matter. */
  const isRefused = (name, judged) => ownEntries(name, judged).every((i) => judged.at(i).reasons.length > 0);

  const isNamed = (candidate, name) => candidate.name === name || candidate.title === name;

  function ownEntries(name, judged) {
    const [row] = name.split("/");
    const out = [];
    for (let i = 0; i < judged.entries.length; i++) {
      if (judged.entries[i][0].name === row && isNamed(judged.at(i), name)) out.push(i);
    }
    return out;
  }

  function fallbackFor({ registry, requested, named, choice, first }, judged) {
    const byArgument = requested !== null && choice === null;
    if (!(byArgument || named) || registry.fallbacks.length === 0 || judged.entries.length === 0) return undefined;
    const { reasons } = judged.at(0);
    if (reasons.length === 0) return undefined;
    const about = new Set(reasons.flatMap((r) => r.facets));
    return registry.fallbacks.find((f) => [...about].every((facet) => f.only.includes(facet)) && holds(f.when, first));
  }

  function notPreferred({ choice, named }, candidates) {
    if (choice?.strength !== "prefer" || candidates.length === 0) return [];
    const [preferred] = choice.backends;
    const isNot = `${preferred} is preferred (${choice.where.short}) but not chosen`;
    if (named !== null && named !== preferred.split("/")[0]) return [`${isNot}: ${named} is named`];
    if (candidates[0].reasons.length === 0) return [];
    return [`${isNot}: ${candidates[0].reasons.map((r) => r.text).join("; ")}`];
  }

  /** What follows from the choice of a selection. */
  function consequences(selection) {
    if (selection.chosen === null) return [];
    const row = selection.registry.backends[selection.chosen.name];
    return following(row.variants.find((v) => v.name === selection.chosen.variant), selection.point);
  }

  /** Why the engine is known to stop once a candidate of a selection, which is accepted, is chosen. */
  function failuresOf(selection, candidate) {
    return candidate.reasons.length > 0 ? [] : selection.judged.judgeOf(candidate).failures(candidate);
  }

  Object.assign(attnreg, { evaluate, judgedAt, verdictOn, isRefused, consequences, failuresOf, readable });
})((globalThis.attnreg ??= {}));
