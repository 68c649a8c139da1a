// A registry read from its document: conditions and matchers that can be asked, and the point at which they are asked.
(function (attnreg) {
  "use strict";

  const FORMAT = 4;

  /** A question that is not valid; `message` says what is wrong with it. */
  class RequestError extends Error {}

  /** What Python prints for a value. */
  function printed(value) {
    if (value === null || value === undefined) return "None";
    return typeof value === "boolean" ? (value ? "True" : "False") : String(value);
  }

  // what cannot be seen, or turns the text around it: a space is seen
  const UNPRINTABLE = /(?! )[\p{C}\p{Z}]/gu;

  function escaped(character) {
    const code = character.codePointAt(0);
    const [mark, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${mark}${code.toString(16).padStart(digits, "0")}`;
  }

  /** A value as Python writes it in a program. */
  function quoted(value) {
    if (typeof value !== "string") return printed(value);
    const mark = value.includes("'") && !value.includes('"') ? '"' : "'";
    const text = value.replace(/\\/g, "\\\\").replace(/\n/g, "\\n").replace(/\r/g, "\\r").replace(/\t/g, "\\t").replace(UNPRINTABLE, escaped);
    return mark + (mark === "'" ? text.replace(/'/g, "\\'") : text) + mark;
  }

  const subset = (words, of) => words.every((word) => of.has(word));

  function installed(requirement, packages) {
    if (packages === null) return true;
    const version = packages[requirement.package];
    if (version === undefined || requirement.versions === "" || version === "") return version !== undefined;
    return attnreg.versions.contains(requirement.specifiers, version);
  }

  function within(low, high, step, value) {
    if (value === null) return false;
    return (low === null || value >= low) && (high === null || value <= high) && (step === 1 || value % step === 0);
  }

  // operation -> a function of what stands behind it, which gives the test of a value
  const OPERATIONS = {
    anything: () => () => true,
    is: (wanted) => (value) => value === wanted,
    in: (words) => ((set) => (value) => set.has(value))(new Set(words)),
    within: (low, high, step) => (value) => within(low, high, step, value),
    "all of": (words) => (held) => subset(words, held),
    "any of": (words) => (held) => words.some((word) => held.has(word)),
    "none of": (words) => (held) => !words.some((word) => held.has(word)),
    only: (words) => ((set) => (held) => subset([...held], set))(new Set(words)),
    installed: (requirements) => (packages) => requirements.every((r) => installed(r, packages)),
    not: (test) => ((inner) => (value) => !inner(value))(predicate(test)),
    or: (...tests) => ((all) => (value) => all.some((t) => t(value)))(tests.map(predicate)),
    and: (...tests) => ((all) => (value) => all.every((t) => t(value)))(tests.map(predicate)),
  };

  function predicate([operation, ...operands]) {
    return OPERATIONS[operation](...operands);
  }

  /**
   * Facet -> value at one question, null where none is given; a derived facet is worked out when it is first read.
   *
   * `values` are in the registry's own order of facets, their places. `base` is the point that this one was made of by
   * changes, `touched` the places in which they differ: what reads none of them answers here as it does there.
   */
  class Point {
    constructor(registry, values, base = null, touched = []) {
      this.registry = registry;
      this.values = values;
      this.base = base ?? this;
      this.touched = touched;
      // number of a condition -> whether it holds, at a base
      this.known = [];
    }

    get(facet) {
      return this.at(this.registry.placeOf(facet));
    }

    /** In words, how this point differs from its base. */
    get difference() {
      const text = (value) => JSON.stringify(value instanceof Set ? [...value].sort() : value);
      return [...this.touched].sort((a, b) => a - b).map((place) => `${place} ${text(this.values[place])}`).join();
    }

    /** The value of the facet that has a place. */
    at(place) {
      const value = this.values[place];
      if (value !== undefined) return value;
      const derived = this.registry.derivedAt[place];
      return (this.values[place] = derived === undefined ? null : this.registry.derivedValue(derived, this));
    }

    has(facet) {
      return this.values[this.registry.placeOf(facet)] !== undefined;
    }

    /** The point for a backend that a user named; this point where the registry asks for no such thing. */
    byName(name) {
      const { facets } = this.registry;
      if (!this.has("asked") && !("named" in facets)) return this;
      const named = { asked: "by_name", named: name.split("/")[0] };
      return this.changed(Object.fromEntries(Object.entries(named).filter(([facet]) => facet in facets)));
    }

    /** The point for a backend that an order tries. */
    automatic() {
      const automatic = { asked: "automatic", named: null };
      return this.changed(Object.fromEntries(Object.entries(automatic).filter(([facet]) => this.has(facet))));
    }

    /** The point with other values; derived facets that read them are worked out anew. */
    changed(facts) {
      const { registry, base } = this;
      const [values, touched] = [this.values.slice(), this.touched.slice()];
      for (const facet of Object.keys(facts)) {
        for (const place of registry.readersOf(registry.placeOf(facet))) values[place] = undefined;
      }
      for (const facet of Object.keys(facts)) {
        const place = registry.placeOf(facet);
        values[place] = facts[facet];
        const known = touched.indexOf(place);
        if (facts[facet] !== base.at(place)) {
          if (known < 0) touched.push(place);
        } else if (known >= 0) touched.splice(known, 1);
      }
      return new Point(registry, values, base, touched);
    }
  }

  /** Whether a condition holds at a point; asked once of all points that agree in what it reads. */
  function holds(condition, point) {
    const { base, touched } = point;
    if (touched.length > 0) {
      const reads = readsOf(condition, point.registry);
      for (const place of touched) if (reads[place]) return tested(condition, point);
    }
    return (base.known[condition.number] ??= tested(condition, base));
  }

  /** For each place whether its facet decides a condition, also behind a derived one. */
  function readsOf(condition, registry) {
    return (condition.reads ??= reached([...clausesOf(condition)].map((clause) => clause.place), registry));
  }

  /** For each place whether its facet is at one of some places, or behind a derived one there. */
  function reached(places, registry) {
    const out = [];
    const add = (place) => {
      if (out[place]) return;
      out[place] = true;
      for (const { when, value } of registry.derivedAt[place]?.cases ?? []) {
        for (const clause of clausesOf(when)) add(clause.place);
        if (value !== null && typeof value === "object") add(registry.placeOf(value.from));
      }
    };
    places.forEach(add);
    return out;
  }

  function tested(condition, point) {
    for (const { matcher, place } of condition.clauses) if (!matcher.test(point.at(place))) return false;
    for (const group of condition.any) if (!group.of.some((part) => holds(part, point))) return false;
    for (const part of condition.none) if (holds(part.of, point)) return false;
    return true;
  }

  const all = (answers) => (answers.includes(false) ? false : answers.includes(null) ? null : true);
  const negated = (answer) => (answer === null ? null : !answer);

  /** Whether a condition holds where only some facets are known; null where that depends on the others. */
  function decided(condition, known) {
    return all([
      ...condition.clauses.map((c) => (c.facet in known ? c.matcher.test(known[c.facet]) : null)),
      ...condition.any.map((group) => negated(all(group.of.map((part) => negated(decided(part, known)))))),
      ...condition.none.map((part) => negated(decided(part.of, known))),
    ]);
  }

  /** Every clause of a condition, those of nested conditions too. */
  function* clausesOf(condition) {
    yield* condition.clauses;
    for (const group of condition.any) for (const part of group.of) yield* clausesOf(part);
    for (const part of condition.none) yield* clausesOf(part.of);
  }

  // names come from addresses: without a prototype, `constructor` is in no table that does not hold it
  const table = (entries) => Object.assign(Object.create(null), Object.fromEntries(entries));
  const mapped = (object, change) => table(Object.entries(object).map(([k, v]) => [k, change(v, k)]));

  /** The parts of a document put in place of their indices. */
  class Registry {
    constructor(document) {
      if (document.format !== FORMAT) throw new Error(`data of format ${document.format}, and a page of ${FORMAT}`);
      const { title, silence, name, fingerprint, linked, phases, imports, vocabulary, core, kvBytes, byPython = "" } = document;
      Object.assign(this, { title, silence, name, fingerprint, linked, phases, imports, vocabulary, kvBytes, byPython });
      this.hasSteps = (document.steps ?? []).length > 0;
      this.core = table(core.map((facet) => [facet.name, facet]));
      // the fields of a request, those whose values are checked in the order of their errors, and what each is when not given
      this.requested = core.filter((facet) => facet.of === "request");
      const ofKind = (...kinds) => this.requested.filter(({ kind }) => kinds.includes(kind));
      this.checked = [...ofKind("integer"), ...ofKind("word", "text")];
      this.ordinary = table(this.requested.map((facet) => [facet.name, facet.ordinary]));
      this.facets = mapped(vocabulary.facets, (f) => ({ ...f, known: new Set(f.words) }));
      this.architectures = table(Object.entries(vocabulary.architectures));
      this.packages = table(Object.entries(vocabulary.packages));
      this.brings = table(Object.entries(vocabulary.brings));
      // such data has names alone: Python answers its questions
      this.backends = mapped(document.backends, (row, backend) => ({ ...row, name: backend }));
      if (byPython === "") this.readConditions(document);
    }

    readConditions(document) {
      const { files, places, matchers, clauses, conditions, rules, consequences } = this.tables(document);
      this.places = places.map(([file, line, column]) => ({
        file: files[file],
        line,
        text: `${files[file]}:${line}:${column}`,
        short: `${files[file].split("/").pop()}:${line}`,
      }));
      const at = (index) => this.places[index];
      const tests = matchers.map((m) => ({ ...m, form: m.form ?? "", inWords: m.inWords ?? m.text, expression: m.test, test: predicate(m.test) }));
      this.facetPlaces = new Map();
      const clause = clauses.map((c) => ({ ...c, place: this.placeOf(c.facet), matcher: tests[c.matcher], where: at(c.where) }));
      this.tellsDevices = "device" in this.facets && clause.some((c) => c.facet === "device");
      // a condition stands behind those that it is made of
      this.conditions = [];
      const when = (index) => this.conditions[index];
      for (const c of conditions) {
        this.conditions.push({
          number: this.conditions.length,
          reads: null,
          clauses: (c.clauses ?? []).map((i) => clause[i]),
          any: (c.any ?? []).map((g) => ({ ...g, of: g.of.map(when), where: at(g.where) })),
          none: (c.none ?? []).map((p) => ({ ...p, of: when(p.of), where: at(p.where) })),
        });
      }
      const placed = (part) => ({ ...part, when: when(part.when), where: at(part.where) });
      const ruled = rules.map(placed);
      const following = consequences.map(placed);
      const variant = (v) => ({
        ...v,
        when: when(v.when),
        requires: when(v.requires),
        claims: v.claims.map((i) => clause[i]),
        featuresAt: at(v.featuresAt),
        served: new Set(v.served),
        emulated: Object.fromEntries(Object.entries(v.emulated).map(([f, [why, i]]) => [f, { why, where: at(i) }])),
        unchecked: v.unchecked.map(([word, i]) => ({ word, where: at(i) })),
        rules: v.rules.map((i) => ruled[i]),
        consequences: v.consequences.map((i) => following[i]),
        where: at(v.where),
      });
      this.derived = mapped(document.derived, (d, name) => ({
        name,
        cases: d.cases.map(([c, value, where]) => ({ when: when(c), value, where: at(where) })),
        where: at(d.where),
      }));
      // place of a derived facet -> how it is derived; place of a facet -> those of the derived ones that read it
      this.derivedAt = [];
      for (const derived of Object.values(this.derived)) this.derivedAt[this.placeOf(derived.name)] = derived;
      this.readers = [];
      this.likenesses = new Map();
      this.orders = mapped(document.orders, (orders) =>
        orders.map((o) => ({
          ...placed(o),
          entries: o.entries.map(([backend, c, where]) => ({ backend, condition: when(c), where: at(where) })),
        })),
      );
      const effect = (e) => ({ ...placed(e), sets: Object.entries(e.sets) });
      this.steps = document.steps.map((step) => ({ ...step, when: when(step.when), effects: step.effects.map(effect) }));
      this.choices = document.choices.map(placed);
      this.fallbacks = document.fallbacks.map(placed);
      this.waivers = document.waivers.map(placed);
      this.backends = mapped(document.backends, (row, name) => ({
        ...row,
        name,
        where: at(row.where),
        variants: row.variants.map(variant),
      }));
    }

    /** Where points keep the value of a facet. */
    placeOf(facet) {
      let place = this.facetPlaces.get(facet);
      if (place === undefined) this.facetPlaces.set(facet, (place = this.facetPlaces.size));
      return place;
    }

    /** The places of the derived facets that read the facet at a place. */
    readersOf(place) {
      const derived = () => Object.keys(this.derived).map((name) => this.placeOf(name));
      return (this.readers[place] ??= derived().filter((reader) => reached([reader], this)[place]));
    }

    /** What tells changes apart where rows are judged on a platform. */
    likenessFor(platform, names) {
      const key = [platform, ...names].join(" ");
      if (!this.likenesses.has(key)) this.likenesses.set(key, new attnreg.Likeness(this, platform, names));
      return this.likenesses.get(key);
    }

    tables(document) {
      const empty = { files: [], places: [], matchers: [], clauses: [], conditions: [], rules: [], consequences: [] };
      return { ...empty, ...document.tables };
    }

    /** The case that gives a derived facet its value at a point. */
    derivedCase(derived, point) {
      const found = derived.cases.find((c) => holds(c.when, point));
      return found ?? { value: null, where: derived.where };
    }

    derivedValue(derived, point) {
      const { value } = this.derivedCase(derived, point);
      return value !== null && typeof value === "object" ? point.get(value.from) : value;
    }

    /** The row of a backend; of FLASH_ATTN/FA3 with this variant alone; null where there is none. */
    row(name) {
      if (Object.hasOwn(this.backends, name)) return this.backends[name];
      const slash = name.indexOf("/");
      const row = slash > 0 ? this.backends[name.slice(0, slash)] : undefined;
      const alone = row?.variants.filter((v) => v.name !== null && v.name === name.slice(slash + 1)) ?? [];
      return alone.length > 0 && slash < name.length - 1 ? { ...row, variants: alone } : null;
    }

    devicesOf(arch) {
      return Object.entries(this.vocabulary.devices).filter(([, its]) => its === arch).map(([device]) => device);
    }

    architecturesOf(platform) {
      return Object.keys(this.architectures).filter((name) => this.architectures[name].platform === platform);
    }

    /** The point of a request as an order sees it. Throws `RequestError` for a word or a facet that is not known. */
    point(request, platform) {
      const values = new Map();
      for (const { name } of this.requested) values.set(name, request[name]);
      values.set("features", new Set(request.features));
      for (const [name, value] of Object.entries(request.extra)) values.set(name, this.extra(name, value));
      values.set("platform", platform.platform).set("arch", platform.arch);
      if ("device" in this.facets) values.set("device", platform.device ?? null);
      values.set("flags", new Set(platform.flags)).set("packages", platform.packages);
      for (const [name, value] of values) {
        const facet = this.facets[name];
        if (facet.kind === "word" || facet.kind === "arch") {
          if (value !== null && !facet.known.has(value)) throw this.unknown(value, name);
        } else if (facet.kind === "words") {
          const strangers = [...value].filter((word) => !facet.known.has(word)).sort();
          if (strangers.length > 0) throw this.unknown(strangers[0], name);
        }
      }
      const owner = this.architectures[platform.arch].platform;
      if (owner !== platform.platform) {
        throw new RequestError(`arch is ${platform.arch}, which belongs to platform ${owner}, not ${platform.platform}`);
      }
      if ("asked" in this.facets) values.set("asked", "automatic");
      const placed = [];
      for (const [name, value] of values) placed[this.placeOf(name)] = value;
      return new Point(this, placed);
    }

    extra(name, value) {
      const facet = Object.hasOwn(this.facets, name) ? this.facets[name] : null;
      if (facet === null) throw new RequestError(`${name} is no facet of ${this.title}`);
      if (facet.of !== "request") {
        const whose = { derived: "is derived from others", start: "is set by steps alone" };
        const why = whose[facet.of] ?? `belongs to the ${facet.of}`;
        throw new RequestError(`extra names ${quoted(name)}, which ${why} and cannot be given`);
      }
      if (value === null) return null;
      // in Python 1 is true
      if (facet.kind === "boolean" && (value === 0 || value === 1)) return value === 1;
      const wrong = (expected) => new RequestError(`${name} is ${quoted(value)}; expected ${expected}`);
      if (facet.kind === "integer" && !(Number.isSafeInteger(value) && value >= 0)) throw wrong("an integer of at least 0");
      if (facet.kind === "text" && typeof value !== "string") throw wrong("text");
      if (!["integer", "text"].includes(facet.kind) && !facet.known.has(value)) throw this.unknown(value, name);
      return value;
    }

    unknown(word, facet) {
      return new RequestError(`${facet} names ${quoted(word)}, which ${this.title} does not know`);
    }
  }

  Object.assign(attnreg, { RequestError, Registry, holds, decided, clausesOf, installed, printed, quoted });
})((globalThis.attnreg ??= {}));
