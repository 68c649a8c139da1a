// Changes of a facet that a backend's verdict does not tell apart: where one of them leaves a reason, so do those like it.
(function (attnreg) {
  "use strict";

  const { clausesOf } = attnreg;

  /**
   * All that a verdict of refusal on one backend depends on: the conditions of its row, and those of orders, choices, steps and
   * derived facets. Two values of a facet are alike at a point where each of these conditions that is undecided there takes both
   * for the same; the backend is then refused for both, with as many reasons from the same lines, or for neither.
   */
  class Likeness {
    /** names: the row of the backend, and of another that a question asks for. */
    constructor(registry, platform, names) {
      this.registry = registry;
      this.abouts = new Map();
      const { choices, fallbacks, waivers, steps } = registry;
      const effects = steps.flatMap((step) => step.effects);
      this.sets = effects.flatMap((effect) => effect.sets);
      const orders = registry.orders[platform] ?? [];
      const derived = Object.values(registry.derived).flatMap((d) => d.cases);
      // conditions, and the clauses that matter where they hold
      this.conditions = [choices, fallbacks, waivers, steps, effects, orders, derived, names.flatMap((name) => this.rulesOf(name))]
        .flat()
        .map(({ when }) => [[when], [...clausesOf(when)]]);
      const isTried = ({ backend }) => names.includes(backend.split("/")[0]);
      for (const { when, entries } of orders) {
        this.conditions.push([[when], entries.filter(isTried).flatMap((entry) => [...clausesOf(entry.condition)])]);
      }
      // where a step names a backend, that one is judged before an engine falls back to its order
      for (const step of steps) {
        for (const { when, sets } of step.effects) {
          for (const [, name] of sets.filter(([facet, value]) => facet === "named" && value !== null)) {
            const rules = this.rulesOf(name).flatMap((rule) => [...clausesOf(rule.when)]);
            this.conditions.push([[step.when, when], [...this.clausesOf(name), ...rules]]);
          }
        }
      }
      // each of these may be a reason, whatever holds beside it
      this.clauses = names.flatMap((name) => this.clausesOf(name));
    }

    rulesOf(name) {
      return this.registry.backends[name].variants.flatMap((variant) => variant.rules);
    }

    clausesOf(name) {
      const { variants } = this.registry.backends[name];
      return variants.flatMap((v) => [...v.claims, ...clausesOf(v.when), ...clausesOf(v.requires)]);
    }

    /** The kinds of changes of a facet at a point: a function that gives a change's kind, null where none is like it. */
    at(point, facet) {
      const { kind } = this.registry.facets[facet];
      const isWord = kind === "word" || kind === "arch";
      if (!isWord && facet !== "flags" && facet !== "packages") return () => null;
      const { always, guarded } = this.about(facet);
      const clauses = [...always];
      for (const { guards, asked } of guarded) {
        if (guards.every(({ matcher, place }) => matcher.test(point.at(place)))) clauses.push(...asked);
      }
      if (isWord) return ({ value }) => clauses.map(({ matcher }) => (matcher.test(value) ? 1 : 0)).join("");
      // to a set, one word that nothing names is like another
      return ({ value, drop }) => (drop || clauses.some((clause) => namesOf(clause).has(bare(value))) ? null : "unnamed");
    }

    /** The clauses that ask for a facet: those that always do, and those of conditions that fail already where a guard does. */
    about(facet) {
      if (!this.abouts.has(facet)) {
        const takers = this.takers(facet);
        const isAsked = (clause) => takers.has(clause.facet);
        // of another architecture no device is given
        const changed = new Set([...takers, ...this.sets.map(([set]) => set), "asked", "named", "device"]);
        const readers = [...changed].flatMap((name) => this.registry.readersOf(this.registry.placeOf(name)));
        const places = new Set([...[...changed].map((name) => this.registry.placeOf(name)), ...readers]);
        const guarded = this.conditions
          .map(([whens, clauses]) => ({
            guards: whens.flatMap((when) => when.clauses.filter((clause) => !places.has(clause.place))),
            asked: clauses.filter(isAsked),
          }))
          .filter(({ asked }) => asked.length > 0);
        this.abouts.set(facet, { always: this.clauses.filter(isAsked), guarded });
      }
      return this.abouts.get(facet);
    }

    /** A facet, and those that steps and derived facets give its value. */
    takers(facet) {
      const out = new Set([facet]);
      const given = Object.values(this.registry.derived).flatMap((d) => d.cases.map(({ value }) => [d.name, value]));
      for (const taken of out) {
        for (const [taker, value] of [...this.sets, ...given]) if (value?.from === taken) out.add(taker);
      }
      return out;
    }
  }

  const bare = (name) => name.split(/[<>=!~]/)[0];

  /** The words and packages that a clause about a set names. */
  function namesOf(clause) {
    return (clause.names ??= new Set(clause.matcher.expression.flat(Infinity).map((part) => part?.package ?? part)));
  }

  attnreg.Likeness = Likeness;
})((globalThis.attnreg ??= {}));
