// The question of the start page: the answers that the build computed, a file for each engine, loaded when it is asked for.
(function (attnreg) {
  "use strict";

  const field = (id) => document.getElementById(`ask-${id}`);
  const [model, arch, engine] = ["model", "arch", "engine"].map(field);

  function element(tag, name, ...children) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    made.append(...children);
    return made;
  }

  function stop(kind, name, reason) {
    const mark = element("span", "stop", element("i", `sign ${kind}`));
    return element("li", kind, mark, element("span", "name", name), element("ul", "", element("li", "", reason)));
  }

  function group([layers, kind, name, how, refused]) {
    const mark = kind === "chosen" ? "chosen" : kind === "unknown" ? "unknown" : "refused";
    return element(
      "div",
      "got",
      element("p", "layers", layers),
      element("p", `winner ${mark === "chosen" ? "good" : mark === "refused" ? "bad" : "muted"}`, element("i", `sign ${mark}`), name),
      element("ol", "path", ...refused.map(([other, reason]) => stop("refused", other, reason)), stop(mark, name, how)),
    );
  }

  async function ask() {
    const asked = [model.value, arch.value, engine.value].join();
    field("more").href = `pick.html#registry=${engine.value}&arch=${arch.value}&model=${model.value}`;
    const { archs, models, answers } = await attnreg.store.get(`live/${engine.value}`);
    if (asked !== [model.value, arch.value, engine.value].join()) return;
    const place = archs.indexOf(arch.value);
    const shown = place < 0 ? null : answers[models[model.value][place]];
    const none = () => element("p", "muted", `The data of ${engine.selectedOptions[0].text} has no ${arch.value}.`);
    const nothing = () => element("p", "muted", "No layer of this model computes softmax attention.");
    field("answer").replaceChildren(...(shown ? (shown.length ? shown.map(group) : [nothing()]) : [none()]));
    field("answer").dataset.asked = asked;
  }

  for (const select of [model, arch, engine]) select.addEventListener("change", ask);
})((globalThis.attnreg ??= {}));
