// Remedies: the fewest changes after which a candidate is chosen, and is not known to fail then, confirmed by the selector.
(function (attnreg) {
  "use strict";

  const { RequestError, judgedAt, verdictOn, isRefused, withField, clausesOf } = attnreg;
  const MOST_CHANGES = 5;
  const NO_CHANGE_HELPS = ["denied", "status", "module", "emulated"];

  /** What a function answers; null where the question is not valid. */
  function unlessInvalid(ask) {
    try {
      return ask();
    } catch (error) {
      if (error instanceof RequestError) return null;
      throw error;
    }
  }

  /**
   * A request and a platform after one change, another value of a facet or a word more or less of a set, and the facts of
   * their point that differ. Throws `RequestError` where there is no such question.
   */
  function applied({ facet, value, drop, means }, registry, request, platform) {
    const changed = (words) => (drop ? words.filter((word) => word !== value) : [...words, value].sort());
    if (facet === "arch") {
      // the device is another with it
      const { device: _, ...others } = platform;
      return [request, { ...others, arch: value }, { arch: value, ...("device" in registry.facets ? { device: null } : {}) }];
    }
    if (facet === "device") return [request, { ...platform, device: value }, { device: value }];
    if (facet === "flags") {
      const flags = changed(platform.flags);
      return [request, { ...platform, flags }, { flags: new Set(flags) }];
    }
    if (facet === "packages") {
      // "" is a version that meets every requirement
      const added = [means.install, ...means.brings].map(({ name }) => [name, ""]);
      const packages = { ...platform.packages, ...Object.fromEntries(added) };
      return [request, { ...platform, packages }, { packages }];
    }
    if (facet === "features") {
      const features = changed(request.features);
      return [{ ...request, features }, platform, { features: new Set(features) }];
    }
    if (registry.core[facet]?.of === "request") {
      const after = withField(registry, request, facet, value);
      return [after, platform, { [facet]: after[facet], head_size_v: after.head_size_v }];
    }
    const fact = registry.extra(facet, value);
    return [{ ...request, extra: { ...request.extra, [facet]: value } }, platform, { [facet]: fact }];
  }

  /** A change in words: a preposition, and what follows it. */
  function phrase(change, registry) {
    const { facet, value, drop } = change;
    if (facet === "features") return drop ? ["without", value] : ["with", `--feature ${value}`];
    if (facet === "flags") return drop ? ["without", `flag ${value}`] : ["with", `--flag ${value}`];
    if (facet === "packages") return ["with", `package ${attnreg.meansText(change.means)}`];
    if (facet === "arch" || facet === "device") return ["on", String(value)];
    const core = registry.core[facet];
    if (core) {
      if (core.decidedBy === "model") return ["for", `${facet} ${attnreg.printed(value)}`];
      return ["with", `--${facet.replaceAll("_", "-")} ${attnreg.printed(value)}`];
    }
    return ["with", `--set ${facet}=${typeof value === "boolean" ? value : attnreg.printed(value)}`];
  }

  function remedyOf(changes, byName, leadsTo, registry) {
    const phrases = changes.map((change) => phrase(change, registry));
    if (byName !== null) phrases.push(["with", `--backend ${byName}`]);
    const out = [];
    for (const word of ["without", "for", "on", "with"]) {
      const parts = phrases.filter(([preposition]) => preposition === word).map(([, what]) => what);
      if (parts.length > 0) out.push(`${word} ${parts.join(word === "with" ? " " : ", ")}`);
    }
    const ofModel = changes.some((c) => registry.core[c.facet]?.decidedBy === "model");
    const plain = changes.map(({ facet, value, drop }) => ({ facet, value, drop }));
    return { text: out.join(", "), changes: plain, by_name: byName, leads_to: leadsTo, of_model: ofModel };
  }

  /** A request and a platform, and what is selected for them; the searches of all candidates of a selection share it. */
  class Configuration {
    constructor(registry, request, platform, point) {
      this.registry = registry;
      this.request = request;
      this.platform = platform;
      this.point = point;
      this.judged = new Map();
      this.following = new Map();
    }

    /** The candidates where a backend is asked for by name; null where there is no such question. */
    candidates(backend) {
      if (!this.judged.has(backend)) {
        const { point, request, platform, registry } = this;
        this.judged.set(backend, unlessInvalid(() => judgedAt(point, request, platform, registry, backend)));
      }
      return this.judged.get(backend);
    }

    /** The verdict on a backend, null where it is no candidate. */
    verdict(name, backend) {
      const judged = this.candidates(backend);
      return judged === null ? null : verdictOn(name, judged);
    }

    /** Whether no candidate of a backend accepts. */
    isRefused(name, backend) {
      const judged = this.candidates(backend);
      return judged === null || isRefused(name, judged);
    }

    /** The configuration after a change; null where there is no such question. */
    after(change) {
      const key = `${change.facet} ${change.drop} ${typeof change.value} ${change.value}`;
      if (!this.following.has(key)) this.following.set(key, unlessInvalid(() => this.changed(change)));
      return this.following.get(key);
    }

    changed(change) {
      const [request, platform, facts] = applied(change, this.registry, this.request, this.platform);
      return new Configuration(this.registry, request, platform, this.point.changed(facts));
    }
  }

  const configurations = new WeakMap();

  /** The configuration that a selection is about. */
  function configurationOf(selection) {
    if (!configurations.has(selection)) {
      const { registry, request, platform } = selection;
      configurations.set(selection, new Configuration(registry, request, platform, registry.point(request, platform)));
    }
    return configurations.get(selection);
  }

  /** One configuration of a search for changes after which one backend is chosen. */
  class Attempt {
    constructor(search, at, changed, path = []) {
      this.search = search;
      this.at = at;
      this.request = at.request;
      this.platform = at.platform;
      this.changed = changed;
      this.path = path;
      this.verdict = undefined;
      this.text = undefined;
    }

    /** What attempts at the same configuration share. A deeper search comes here again. */
    get key() {
      return (this.text ??= `${this.at.point.difference} ${[...this.changed].sort()}`);
    }

    /** The verdict on the backend in this configuration; null where it is no candidate. A deeper search asks again. */
    candidate() {
      if (this.verdict === undefined) this.verdict = this.judged();
      return this.verdict;
    }

    judged() {
      const { name, backend } = this.search;
      return this.at.verdict(name, backend);
    }

    after(change) {
      const { registry } = this.search;
      const after = this.at.after(change);
      if (after === null) return null;
      const changed = registry.core[change.facet]?.isSet ? this.changed : new Set([...this.changed, change.facet]);
      return new Attempt(this.search, after, changed, [...this.path, change]);
    }

    /**
     * Whether the backend is chosen too for what layers of a model ask for once the changes are options: of some options
     * a model's layers take their own share.
     */
    holds() {
      const { registry, name, backend, anew } = this.search;
      const options = this.path.filter((change) => isOption(change, registry));
      if (anew === null || options.length === 0) return true;
      const others = this.path.filter((change) => !options.includes(change));
      const requests = anew(options.map(({ facet, value }) => [facet, value]));
      return requests.length > 0 && requests.every((request) => {
        const { platform } = this.search;
        let at = new Configuration(registry, request, platform, registry.point(request, platform));
        for (const change of others) at = at?.after(change) ?? null;
        return at?.verdict(name, backend)?.reasons.length === 0;
      });
    }
  }

  function find(attempt, limit) {
    const candidate = attempt.candidate();
    if (candidate === null) return null;
    if (candidate.reasons.length === 0) return attempt.holds() ? [] : null;
    if (limit === 0) return null;
    const { steps } = attempt.search;
    const key = attempt.key;
    if (!steps.has(key)) steps.set(key, stepsFrom(attempt, candidate));
    for (const [change, following] of steps.get(key)) {
      const rest = find(following, limit - 1);
      if (rest !== null) return [change, ...rest];
    }
    return null;
  }

  /** Changes that remove the first reason: for each facet, the two that leave the fewest reasons. */
  function stepsFrom(attempt, candidate) {
    const { registry } = attempt.search;
    const [reason] = candidate.reasons;
    if (NO_CHANGE_HELPS.includes(reason.kind)) return [];
    // no option of a model sets what follows another
    const isFree = (facet) => !attempt.changed.has(facet) && !(attempt.search.anew && registry.facets[facet].follows);
    const facets = plainFacets(reason.facets, registry).filter(isFree);
    return facets.flatMap((facet) => {
      const best = bestChanges(attempt, facet, reason);
      return best.map((change) => [change, attempt.after(change)]);
    });
  }

  /** The two changes of a facet that leave the fewest reasons, and not the given one. */
  function bestChanges(attempt, facet, reason) {
    const { registry, name, backend, likeness } = attempt.search;
    const kindOf = likeness.at(attempt.at.point, facet);
    // kind of a change after which the backend is refused -> the number of reasons; infinite where the given one is among them
    const counts = new Map();
    const out = [];
    let valid = 0;
    for (const change of changesOf(attempt, facet, reason)) {
      const kind = kindOf(change);
      let count = counts.get(kind);
      if (count === undefined) {
        const after = attempt.after(change);
        const verdict = after?.candidate() ?? null;
        const removes = verdict !== null && !verdict.reasons.some((r) => isSame(r, reason, registry));
        count = removes ? verdict.reasons.length : Infinity;
        if (kind !== null && (after?.at.isRefused(name, backend) ?? true)) counts.set(kind, count);
      }
      if (count < Infinity) out.push([count, change]);
      // no change is better than two after which nothing is against the backend
      if (count === 0 && ++valid === 2) break;
    }
    return out.sort((a, b) => a[0] - b[0]).slice(0, 2).map(([, change]) => change);
  }

  /** Whether two reasons differ by a value at most. */
  function isSame(a, b, registry) {
    if (a.kind !== b.kind || a.where.text !== b.where.text || a.facets.length !== b.facets.length) return false;
    const isSet = registry.core[a.facets[0]]?.isSet;
    return (!isSet || a.asked === b.asked) && a.facets.every((facet, i) => facet === b.facets[i]);
  }

  /** The facets that a user can change: in place of a derived facet, those that it is computed from. */
  function plainFacets(facets, registry) {
    const out = new Set();
    for (const facet of facets) {
      const derived = registry.derived[facet];
      if (derived) {
        const from = derived.cases.flatMap((c) => [...new Set([...clausesOf(c.when)].map((clause) => clause.facet))]);
        for (const f of plainFacets(from, registry)) out.add(f);
      } else if (facet in registry.facets) out.add(facet);
    }
    return [...out];
  }

  /** Other values of a facet, the nearest first. */
  function changesOf(attempt, facet, reason) {
    const { registry } = attempt.search;
    const { kind, words } = registry.facets[facet];
    if (facet === "packages") return packageChanges(attempt, reason);
    if (facet === "features" || facet === "flags") {
      const held = facet === "flags" ? attempt.platform.flags : attempt.request.features;
      const more = facet === "flags" ? words.filter((word) => !held.includes(word)) : [];
      const fewer = held.map((value) => ({ facet, value, drop: true }));
      return [...fewer, ...more.map((value) => ({ facet, value, drop: false }))];
    }
    const { request, platform } = attempt;
    const current = platform[facet] ?? request[facet] ?? request.extra[facet] ?? null;
    let values = [];
    if (kind === "arch") values = registry.architecturesOf(platform.platform);
    else if (facet === "device") values = registry.devicesOf(platform.arch);
    else if ((kind === "word" || kind === "boolean") && facet !== "platform") values = words;
    else if (kind === "integer") values = integers(attempt, facet, current ?? 0);
    return values.filter((value) => value !== current).map((value) => ({ facet, value, drop: false }));
  }

  function packageChanges(attempt, reason) {
    const known = Object.keys(attempt.search.registry.packages);
    const missing = known.filter((p) => !(p in (attempt.platform.packages ?? {})));
    const names = known.includes(reason.asked) ? [`${reason.asked}${reason.supported}`] : missing;
    const { brings } = attempt.search.registry;
    const ways = names.map((name) => attnreg.means(attnreg.requirement(name), attempt.platform.packages, brings));
    return ways.map((means) => ({ facet: "packages", value: attnreg.written(means.install), drop: false, means }));
  }

  /** The integers at which a test of the backend or of an order changes its answer: larger first, by distance. */
  function integers(attempt, facet, current) {
    const matchers = tests(attempt).filter((test) => test.facet === facet).map((test) => test.matcher);
    const edges = new Set([current, ...matchers.flatMap((m) => m.constants ?? [])]);
    const steps = new Set([1, ...matchers.flatMap((m) => m.moduli ?? [])]);
    const near = new Set();
    for (const edge of edges) {
      for (const step of steps) near.add(Math.floor(edge / step) * step).add(Math.ceil(edge / step) * step);
    }
    const distance = (n) => Math.abs(n - current);
    return [...near].filter((n) => n > 0).sort((a, b) => (a < current) - (b < current) || distance(a) - distance(b));
  }

  /** Every test that decides whether the backend is chosen: its own, and those of the platform's orders. */
  function tests(attempt) {
    const { registry, name } = attempt.search;
    const out = [];
    const row = registry.row(name);
    for (const variant of row.variants) {
      out.push(...variant.claims);
      const others = [...variant.rules, ...variant.consequences.filter((known) => known.fails)];
      for (const when of [variant.when, variant.requires, ...others.map((o) => o.when)]) out.push(...clausesOf(when));
    }
    for (const order of registry.orders[attempt.platform.platform] ?? []) {
      out.push(...clausesOf(order.when));
      for (const entry of order.entries) if (entry.backend.split("/")[0] === row.name) out.push(...clausesOf(entry.condition));
    }
    return out;
  }

  /**
   * The fewest changes after which a candidate is chosen; null where more are needed, or the backend is chosen. anew: gives
   * what layers of a model ask for under further options; the candidate is then to be chosen for all of it.
   */
  function remedy(selection, candidate, anew = null) {
    const { registry, requested } = selection;
    if (selection.chosen?.name === candidate.name) return null;
    // an order may name one variant of a backend
    const entry = selection.order?.entries.find((e) => e.where.text === candidate.where.text);
    const name = entry?.backend ?? candidate.name;
    for (const backend of requested !== null ? [requested] : [null, name]) {
      const rows = [...new Set([name, backend ?? name].map((n) => n.split("/")[0]))];
      const likeness = registry.likenessFor(selection.platform.platform, rows);
      const at = configurationOf(selection);
      const search = { name, backend, registry, anew, steps: new Map(), likeness, platform: at.platform };
      const start = new Attempt(search, at, new Set());
      for (let limit = 0; limit <= MOST_CHANGES; limit++) {
        const found = find(start, limit);
        if (found !== null) {
          const changes = needed(start, backend, found);
          const enough = backend === requested || isChosen(start, requested, changes);
          return remedyOf(changes, enough ? null : name, otherVariant(start, changes, candidate), registry);
        }
      }
    }
    return null;
  }

  /** Changes without those that are idle: a later one may have had another variant chosen, which needs less. */
  function needed(start, backend, changes) {
    for (const change of changes) {
      const rest = changes.filter((other) => other !== change);
      if (isChosen(start, backend, rest)) return needed(start, backend, rest);
    }
    return changes;
  }

  function isChosen(start, backend, changes) {
    const end = endOf(new Attempt({ ...start.search, backend }, start.at, start.changed), changes);
    return end?.candidate()?.reasons.length === 0 && end.holds();
  }

  /** The variant that is chosen after some changes, where the candidate that was told of is another. */
  function otherVariant(start, changes, told) {
    const title = endOf(start, changes)?.candidate()?.title ?? null;
    return told.variant && title !== told.title ? title : null;
  }

  /** The configuration after some changes; null where one is not valid. */
  function endOf(attempt, changes) {
    return changes.reduce((at, change) => at?.after(change) ?? null, attempt);
  }

  /** Whether a change is a value that a user gives every layer of a model, from which the layers take their own. */
  function isOption({ facet }, registry) {
    const core = registry.core[facet];
    return !core || (core.of === "request" && core.decidedBy === "user");
  }

  Object.assign(attnreg, { remedy, configurationOf });
})((globalThis.attnreg ??= {}));
