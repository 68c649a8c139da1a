// What is known of other packages: what installed ones pin, and with which versions backends were proven.
// The same as attnreg/packages/pins.py and proven.py.
(function (attnreg) {
  "use strict";

  const { contains, parse, compare, publicPart } = attnreg.versions;

  const specifiersOf = (text) =>
    text.split(",").filter(Boolean).map((part) => /^\s*(~=|==|!=|<=|>=|<|>)\s*(.*?)\s*$/.exec(part).slice(1));

  function requirement(text) {
    const [, name, versions] = /^([A-Za-z0-9._-]+)(.*)$/.exec(text);
    return { name, versions };
  }

  const pinOf = (pins, name) => (pins ?? []).map(requirement).find((pin) => pin.name === name);
  const isOf = (version, release) => version !== "" && contains([["==", `${release}.*`]], version);

  /** Whether one version meets both: if any does, so does one that they name. */
  function agree(pin, wanted) {
    const both = [...specifiersOf(pin.versions), ...specifiersOf(wanted.versions)];
    return both.some(([, version]) => contains(both, version.replace(/\.\*$/, "")));
  }

  /** `triton 3.8` of `triton~=3.8.0`, `triton 3.7.1` of `triton==3.7.1`. */
  function short({ name, versions }) {
    const version = versions.slice(2);
    return `${name} ${versions[0] === "~" ? version.slice(0, version.lastIndexOf(".")) : version}`;
  }

  /** The versions of a package, nearest to its own, that bring what is wanted, later ones first; with what they bring. */
  function other(table, now, wanted) {
    const after = (a, b) => compare(parse(a), parse(b));
    const releases = Object.keys(table).sort(after);
    const fits = releases.filter((release) => {
      const pin = pinOf(table[release], wanted.name);
      return pin && agree(pin, wanted);
    });
    const later = fits.filter((release) => after(release, now) > 0);
    const follow = later.length > 0 ? releases.slice(releases.indexOf(later[0])) : [];
    const nearest = later[0] ?? fits.at(-1);
    if (nearest === undefined) return null;
    const bound = later.length > 0 && later.length === follow.length ? `>=${nearest}` : `==${nearest}.*`;
    return [bound, pinOf(table[nearest], wanted.name)];
  }

  /** How a package is had beside those that are installed: what to install, what comes with it, or why it cannot be had. */
  function means(wanted, installed, brings) {
    for (const [name, version] of Object.entries(installed ?? {})) {
      const table = brings[name] ?? {};
      const now = Object.keys(table).find((release) => isOf(version, release));
      const pin = now === undefined ? undefined : pinOf(table[now], wanted.name);
      if (pin === undefined || agree(pin, wanted)) continue;
      const barred = { install: wanted, brings: [], barred: `${name} ${version} excludes: it brings ${short(pin)}` };
      const found = other(table, now, wanted);
      if (found === null) return barred;
      const instead = means({ name, versions: found[0] }, installed, brings);
      return instead.barred ? barred : { ...instead, brings: [...instead.brings, found[1]] };
    }
    return { install: wanted, brings: [], barred: "" };
  }

  const written = ({ name, versions }) => `${name}${versions}`;

  function meansText({ install, brings, barred }) {
    const along = brings.length > 0 ? `, which brings ${brings.map(short).join(" and ")}` : "";
    return `${written(install)}${along}${barred ? `, which ${barred}` : ""}`;
  }

  const released = (version) => {
    const parsed = parse(version);
    return parsed && publicPart(parsed);
  };

  const plain = (version) => version.trim().replace(/\+.*$/, "");

  /** The packages of a choice whose versions are newer than any with which it was proven. */
  function unproven({ registry, platform, chosen }) {
    if (chosen === null || platform.packages === null) return [];
    const variant = registry.backends[chosen.name].variants.find((v) => v.name === chosen.variant);
    let runs = (variant?.proven ?? []).filter(([kind]) => kind === platform.platform);
    const alike = runs.filter(([, arch]) => arch === platform.arch);
    runs = alike.length > 0 ? alike : runs;
    const out = [];
    for (const name of Object.keys(platform.packages).sort()) {
      const version = platform.packages[name];
      const here = version ? released(version) : null;
      const proofs = runs.filter((run) => run[3][name]);
      if (here === null || proofs.length === 0) continue;
      const newest = proofs.reduce((best, run) => (compare(released(run[3][name]), released(best[3][name])) > 0 ? run : best));
      const order = compare(here, released(newest[3][name]));
      if (order < 0 || (order === 0 && !version.includes("+git"))) continue;
      const fact = { package: name, version, newest: plain(newest[3][name]), device: newest[2] };
      const text = `not proven with ${name} ${version}; newest proven ${fact.newest} (${fact.device})`;
      out.push({ ...fact, text });
    }
    return out;
  }

  Object.assign(attnreg, { means, meansText, requirement, written, unproven });
})((globalThis.attnreg ??= {}));
