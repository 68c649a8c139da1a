// Versions of packages as PEP 440 compares them, and the specifiers of a requirement.
(function (attnreg) {
  "use strict";

  const VERSION =
    /^\s*v?(?:(\d+)!)?(\d+(?:\.\d+)*)(?:[-_.]?(alpha|a|beta|b|preview|pre|c|rc)[-_.]?(\d+)?)?(?:-(\d+)|[-_.]?(post|rev|r)[-_.]?(\d+)?)?(?:[-_.]?(dev)[-_.]?(\d+)?)?(?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?\s*$/i;
  const PHASES = { alpha: "a", beta: "b", preview: "rc", pre: "rc", c: "rc" };

  /** The parts of a version; null for a text that is none. */
  function parse(text) {
    const m = VERSION.exec(text);
    if (m === null) return null;
    const number = (digits) => (digits === undefined ? 0 : Number(digits));
    return {
      epoch: number(m[1]),
      release: m[2].split(".").map(Number),
      pre: m[3] === undefined ? null : [PHASES[m[3].toLowerCase()] ?? m[3].toLowerCase(), number(m[4])],
      post: m[5] === undefined && m[6] === undefined ? null : number(m[5] ?? m[7]),
      dev: m[8] === undefined ? null : number(m[9]),
      local: m[10] === undefined ? null : m[10].toLowerCase().split(/[-_.]/),
    };
  }

  const compareNumbers = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

  function compareLists(a, b, compare) {
    for (let i = 0; i < Math.min(a.length, b.length); i++) {
      const order = compare(a[i], b[i]);
      if (order) return order;
    }
    return compareNumbers(a.length, b.length);
  }

  function trimmed(release) {
    let end = release.length;
    while (end > 0 && release[end - 1] === 0) end--;
    return release.slice(0, end);
  }

  // a development release stands before the alphas, a release behind its candidates
  function preKey(v) {
    if (v.pre !== null) return [["a", "b", "rc"].indexOf(v.pre[0]), v.pre[1]];
    return v.post === null && v.dev !== null ? [-1, 0] : [3, 0];
  }

  const numeric = /^\d+$/;

  // in a local version numbers stand behind words
  function compareLocal(a, b) {
    if (numeric.test(a) && numeric.test(b)) return compareNumbers(Number(a), Number(b));
    return numeric.test(a) ? 1 : numeric.test(b) ? -1 : compareNumbers(a, b);
  }

  function compareLocals(a, b) {
    if (a === null || b === null) return compareNumbers(a !== null, b !== null);
    return compareLists(a, b, compareLocal);
  }

  /** Below 0, 0 or above 0, as one version stands before, beside or behind another. */
  function compare(a, b) {
    return (
      compareNumbers(a.epoch, b.epoch) ||
      compareLists(trimmed(a.release), trimmed(b.release), compareNumbers) ||
      compareLists(preKey(a), preKey(b), compareNumbers) ||
      compareNumbers(a.post ?? -1, b.post ?? -1) ||
      compareNumbers(a.dev ?? Infinity, b.dev ?? Infinity) ||
      compareLocals(a.local, b.local)
    );
  }

  const isPre = (v) => v.pre !== null || v.dev !== null;
  const publicPart = (v) => ({ ...v, local: null });
  const firstOf = (v) => ({ ...v, dev: 0, local: null });

  /** The first version behind all that begin with a release. */
  function behind(v) {
    const release = [...v.release];
    release.push(release.pop() + 1);
    return firstOf({ ...v, release, pre: null, post: null });
  }

  const between = (v, low, high) => compare(v, low) >= 0 && compare(v, high) < 0;

  function equal(v, text) {
    if (text.endsWith(".*")) {
      const prefix = parse(text.slice(0, -2));
      return between(v, firstOf(prefix), behind(prefix));
    }
    const wanted = parse(text);
    return compare(wanted.local === null ? publicPart(v) : v, wanted) === 0;
  }

  // the bound alone is read: of an interval each operator is one end, or both
  const TESTS = {
    "==": equal,
    "!=": (v, text) => !equal(v, text),
    ">=": (v, text) => compare(v, parse(text)) >= 0,
    "<=": (v, text) => compare(publicPart(v), parse(text)) <= 0,
    // a bound that is no candidate itself leaves out its own candidates
    "<": (v, text) => {
      const bound = parse(text);
      return compare(v, isPre(bound) ? bound : firstOf(bound)) < 0;
    },
    // and a bound leaves out its own post releases and local versions
    ">": (v, text) => {
      const bound = parse(text);
      if (bound.dev !== null) return compare(v, { ...bound, dev: bound.dev + 1, local: null }) >= 0;
      if (bound.post !== null) return compare(v, { ...bound, post: bound.post + 1, dev: 0, local: null }) >= 0;
      return compare(v, bound) > 0 && compare({ ...v, post: null, dev: null, local: null }, publicPart(bound)) !== 0;
    },
    "~=": (v, text) => {
      const bound = parse(text);
      return between(v, bound, behind({ ...bound, release: bound.release.slice(0, -1) }));
    },
  };

  /** Whether a version meets every specifier, each an operator and a version; a text that is no version meets none. */
  function contains(specifiers, text) {
    const version = parse(text);
    return version !== null && specifiers.every(([operation, bound]) => TESTS[operation](version, bound));
  }

  attnreg.versions = { contains, parse, compare, publicPart };
})((globalThis.attnreg ??= {}));
