// The form of the picker: its lists, made once for a registry and what was dropped on the page, and the question that they show.
(function (attnreg) {
  "use strict";

  const { element } = attnreg.answer;
  const site = window.attnregPicker;
  const field = (id) => document.getElementById(id);
  // list -> the option of a value that it does not offer
  const strangers = new WeakMap();
  // what the form was made for, and the functions that write a question into the parts that differ between registries
  let made = {};
  let writers = [];

  /** Let a list offer groups of values, each with its text. */
  function offer(select, groups) {
    const options = (items) => items.map(([value, text]) => element("option", { value }, text));
    const parts = groups.filter(([, items]) => items.length > 0);
    select.replaceChildren(
      ...parts.flatMap(([name, items]) => (name ? [element("optgroup", { label: name }, ...options(items))] : options(items))),
    );
  }

  /** Show a value in a list, which also shows one that it does not offer. */
  function choose(select, value) {
    if (select.value === value && select.selectedIndex >= 0) return;
    strangers.get(select)?.remove();
    select.value = value;
    if (select.selectedIndex >= 0) return;
    const stranger = element("option", { value }, `${value} (not in the data)`);
    strangers.set(select, stranger);
    select.append(stranger);
    select.value = value;
  }

  const plain = (names) => names.map((name) => [name, name]);

  const write = (input, value) => {
    if (input.value !== value) input.value = value;
  };

  /** The architectures by platform, each under every product's name. */
  function products(lists) {
    const platforms = new Map();
    for (const { name, platform, products: named } of lists.architectures) {
      const items = (named.length > 0 ? named : [""]).map((product) => {
        return [`${name}/${product}`, product ? `${product} · ${name}` : name];
      });
      platforms.set(platform, [...(platforms.get(platform) ?? []), ...items]);
    }
    return [...platforms];
  }

  const checked = (id) => [...field(id).querySelectorAll("input[type=checkbox]:checked")].map((box) => box.value);

  function checkboxes(id, words, change) {
    const lines = words.map(([name, legend]) => {
      const box = element("input", { type: "checkbox", value: name });
      box.addEventListener("change", () => change({ [id]: checked(id) }));
      writers.push((question) => { box.checked = question[id].includes(name); });
      return element("p", {}, element("label", {}, box, ` ${name}`), element("small", {}, legend));
    });
    field(id).replaceChildren(...lines);
  }

  function facetField({ name, ...facet }, question, change) {
    const id = `facet-${name}`;
    const free = facet.kind === "integer" || facet.kind === "text";
    const input = free
      ? element("input", { id, type: "text", ...(facet.kind === "integer" ? { inputmode: "numeric" } : {}) })
      : element("select", { id });
    if (!free) offer(input, [["", [["", "not stated"], ...plain(facet.words)]]]);
    writers.push(({ facets }) => (free ? write : choose)(input, facets[name] ?? ""));
    input.title = facet.legend;
    input.addEventListener("change", () => {
      const { [name]: _, ...facets } = question().facets;
      const value = input.value.trim();
      change({ facets: value === "" ? facets : { ...facets, [name]: value } });
    });
    return element("p", {}, element("label", { for: id }, name), input);
  }

  function packageLine([name, legend], question, change) {
    const box = element("input", { type: "checkbox", value: name, "aria-label": name });
    const version = element("input", { type: "text", placeholder: "version", "aria-label": `version of ${name}` });
    const changed = () => {
      const { [name]: _, ...packages } = question().packages;
      change({ packages: box.checked ? { ...packages, [name]: version.value.trim() } : packages });
    };
    box.addEventListener("change", changed);
    version.addEventListener("change", () => { box.checked = true; changed(); });
    writers.push(({ packages }) => {
      box.disabled = version.disabled = packages === null;
      box.checked = packages !== null && name in packages;
      write(version, packages?.[name] ?? "");
    });
    return element("p", {}, element("label", {}, box, ` ${name} `), version, element("small", {}, legend));
  }

  /**
   * Make the lists for a registry, for configs and registries that were dropped on the page; nothing where they are made.
   *
   * To make them anew would take the focus from the key that asks. question: the one that is
   * asked now. change: takes the fields of it that a list changes.
   */
  function make(lists, configs, overlays, question, change) {
    const dropped = JSON.stringify([configs, overlays]);
    if (made.lists === lists && made.dropped === dropped) return;
    made = { lists, dropped };
    writers = [];
    offer(field("registry"), [["", plain([...site.registries, ...overlays])]]);
    offer(field("arch"), products(lists));
    const models = [["Dropped", configs.map((name) => [name, `${name} (dropped)`])], ["Bundled", plain(site.models)]];
    offer(field("model"), [["", [["", "one request, no model"]]], ...models]);
    offer(field("draft"), [["", [["", "none"], ["mtp", "mtp: the model's own MTP layers"]]], ...models]);
    const kv = [["none", "none: not given"], ...plain(lists.kv_dtypes)];
    offer(field("kv_dtype"), [["", [["", ""], ...kv]]]);
    offer(field("draft_kv_dtype"), [["", [["", "as the model's"], ...kv]]]);
    offer(field("tp"), [["", site.ranks.map((n) => [String(n), n === 1 ? "1, whole" : String(n)])]]);
    const rows = lists.backends.map((names) => [names[0], plain(names)]);
    offer(field("backend"), [["", [["", "the order decides"]]], ...rows]);
    offer(field("draft_backend"), [["", [["", "as the model's"]]], ...rows]);
    offer(field("prefer"), [["", [["", "none"]]], ...rows]);
    field("facets").replaceChildren(...lists.facets.map((facet) => facetField(facet, question, change)));
    checkboxes("features", lists.features, change);
    checkboxes("flags", lists.flags, change);
    field("packages").replaceChildren(...lists.packages.map((line) => packageLine(line, question, change)));
  }

  /** Show a question in the lists that were made for its registry. */
  function fill(question) {
    const { lists } = made;
    const { facets, more, model } = question;
    const unstated = model ? "the model's own" : "not stated";
    const [first] = field("kv_dtype").options;
    if (first.text !== unstated) first.text = unstated;
    const product = question.gpu || (lists.architectures.find(({ name }) => name === question.arch)?.products[0] ?? "");
    const shown = { registry: question.registry, arch: `${question.arch}/${product}`, model, tp: String(question.tp) };
    Object.assign(shown, { kv_dtype: facets.kv_dtype ?? "", backend: question.backend ?? "" });
    for (const name of ["draft", "draft_kv_dtype", "draft_backend", "prefer"]) shown[name] = more[name] ?? "";
    for (const [name, value] of Object.entries(shown)) choose(field(name), value);
    field("tp").disabled = model === "" && question.tp === 1;
    write(field("layer"), more.layer ?? "");
    write(field("deny"), more.deny ?? "");
    write(field("lengths"), question.lengths.join(", "));
    field("selector").checked = "selector" in more;
    field("selector").closest("p").hidden = !lists.steps && !field("selector").checked;
    field("facets-summary").textContent = model ? "What every layer is asked with" : "The request";
    field("every-package").checked = question.packages === null;
    for (const writes of writers) writes(question);
  }

  attnreg.form = { field, make, fill };
})((globalThis.attnreg ??= {}));
