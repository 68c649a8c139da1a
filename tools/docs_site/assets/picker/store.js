// The data of the site, each file loaded when it is first asked for. They are scripts: a page on a disk may read no others.
(function (attnreg) {
  "use strict";

  const registries = new Map();
  const loading = new Map();
  const data = (window.attnregData = {});
  // what the page of the picker says of the site; other pages have none
  const site = document.getElementById("picker-site");
  if (site) window.attnregPicker = JSON.parse(site.textContent);

  function load(path) {
    if (!loading.has(path)) {
      const script = document.createElement("script");
      script.src = `${document.body.dataset.root}data/${path}`;
      const loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`the site has no data/${path}`));
      });
      document.head.append(script);
      loading.set(path, loaded);
    }
    return loading.get(path);
  }

  /** A registry by its name: bundled, or one that a page has added. */
  async function registry(name) {
    if (!registries.has(name)) {
      await load(`${name}/registry.js`);
      registries.set(name, new attnreg.Registry(data[name]));
    }
    return registries.get(name);
  }

  /** The document of a bundled model; `folder` is that of the registries with the same KV dtypes. */
  async function model(name, folder) {
    const key = `${folder}/models/${name}`;
    if (!(key in data)) await load(`${key}.js`);
    return data[key];
  }

  attnreg.store = { load, registry, model, add: (name, document) => registries.set(name, new attnreg.Registry(document)) };
})((globalThis.attnreg ??= {}));
