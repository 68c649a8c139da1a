// The data of the site, each file loaded when it is first asked for. They are scripts: a page on a disk may read no others.
(function (attnreg) {
  "use strict";

  const loading = new Map();
  const data = (window.attnregData = {});
  // what the page of the picker says of the site; other pages have none
  const site = document.getElementById("picker-site");
  if (site) window.attnregPicker = JSON.parse(site.textContent);

  function load(path) {
    if (!loading.has(path)) {
      const script = document.createElement("script");
      script.src = `${document.body.dataset.root}data/${path}.js`;
      const loaded = new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = () => reject(new Error(`the site has no data/${path}.js`));
      });
      document.head.append(script);
      loading.set(path, loaded);
    }
    return loading.get(path);
  }

  /** What a file holds, once it is loaded; undefined where it is not. */
  const read = (path) => (Object.hasOwn(data, path) ? data[path] : undefined);

  async function get(path) {
    if (read(path) === undefined) await load(path);
    return read(path);
  }

  attnreg.store = { load, read, get, add: (path, value) => { data[path] = value; } };
})((globalThis.attnreg ??= {}));
