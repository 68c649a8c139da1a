// The answers of `attnreg explain`, in the form of its --json: selections with their traces, remedies, and KV bytes.
(function (attnreg) {
  "use strict";

  const { RequestError, evaluate, consequences, failuresOf, makeRequest, expanded, remedy, configurationOf } = attnreg;
  const { requestDict, requestWords, platformWords, facetWords, cacheWords, featureWords } = attnreg;

  /** A selection with everything that is said of it; without `remedies`, which take longest, if that is false. */
  function selectionDict(selection, remedies = true) {
    const { registry, request, platform, order, choice, chosen } = selection;
    const derived = Object.values(registry.derived).map((d) => {
      return [d.name, { value: selection.point.get(d.name), where: registry.derivedCase(d, selection.point).where.text }];
    });
    return {
      registry: registry.title,
      platform,
      request: requestDict(registry, request),
      backend: chosen && { name: chosen.name, variant: chosen.variant },
      requested: selection.requested,
      order: order && { name: order.title, where: order.where.text },
      ...evidenceOf(selection),
      choice: choice && { strength: choice.strength, where: choice.where.text },
      derived: Object.fromEntries(derived),
      ...(selection.start === null ? {} : { start: startDict(selection.start) }),
      ...(silenceOf(selection) ? { silence: silenceOf(selection) } : {}),
      warnings: selection.warnings,
      consequences: consequences(selection).map(followingDict),
      alternatives: alternatives(selection),
      candidates: selection.candidates.map((c) => candidateDict(selection, c, remedies)),
    };
  }

  /** That the registry has neither an order nor a step that chooses on the platform; null where it has. */
  function silenceOf({ registry, platform, chosen, requested, start }) {
    if (chosen !== null || requested !== null || start?.refusal || start?.named) return null;
    const silent = (registry.orders[platform.platform] ?? []).length === 0;
    return silent ? `${registry.name} says nothing of ${platform.platform}` : null;
  }

  const followingDict = ({ kind, text, where, value, source }) => ({ kind, text, where: where.text, value, source });

  /** What was measured of the choice. */
  function evidenceOf({ order, chosen }) {
    const [of, text] = order?.evidence ?? [];
    return of !== undefined && chosen?.title === of ? { evidence: text } : {};
  }

  /** What the engine did before it chose. */
  function startDict({ taken, refusal }) {
    const plain = (value) => (value instanceof Set ? [...value].sort() : value);
    const steps = taken.map(({ step, sets, because, where }) => {
      const written = sets.map(([facet, before, after]) => [facet, { before: plain(before), after: plain(after) }]);
      return { step, sets: Object.fromEntries(written), because, where: where.text };
    });
    return { steps, refused: refusal && { ...refusal, where: refusal.where.text } };
  }

  /** Whether something has to change for a candidate to be chosen. */
  const isLost = ({ chosen }, { name, reasons }) => reasons.length > 0 && chosen?.name !== name;

  function candidateDict(selection, candidate, remedies) {
    const { rank, name, variant, emulates, reasons } = candidate;
    return {
      rank,
      name,
      variant,
      accepted: reasons.length === 0,
      emulates,
      reasons: reasons.map((r) => r.toDict()),
      where: candidate.where.text,
      fails: failuresOf(selection, candidate).map(followingDict),
      would_win: remedies && isLost(selection, candidate) ? remedy(selection, candidate) : null,
    };
  }

  /** The backends that serve a refused request if a user names them, those of the order first. */
  function alternatives(selection) {
    // the rows of a registry that says nothing of a platform are another release's
    if (selection.chosen !== null || silenceOf(selection)) return [];
    const { registry, request, platform, order, requested } = selection;
    const names = [...new Set([...(order?.entries ?? []).map((e) => e.backend.split("/")[0]), ...Object.keys(registry.backends)])];
    const ofVariant = requested !== null && !(requested in registry.backends) ? requested.split("/")[0] : "";
    const out = [];
    for (const name of names) {
      const row = registry.backends[name];
      if (!row.platforms.includes(platform.platform) || !row.attention.includes(request.attention)) continue;
      // a fallback may choose another backend than the one named; what is chosen and then fails has a reason against it
      const verdict = configurationOf(selection).verdict(name, name);
      if (verdict?.reasons.length === 0) out.push(name === ofVariant ? verdict.title : name);
    }
    return out;
  }

  /** What attnreg itself runs of what an order names, as attnreg/explain/own_kernels.py finds it. */
  function runsOf(selection) {
    const { registry, request, platform, chosen, choice, requested } = selection;
    if (chosen === null || !registry.imports) return [];
    const named = choice === null ? requested : null;
    const own = (phase) => {
      const asked = phase === request.phase ? request : makeRequest(registry, { ...request, phase });
      return evaluate(asked, platform, registry, named, true);
    };
    const run = (phase, { order, chosen: backend }, why = []) => ({
      phase,
      backend: backend && { name: backend.name, variant: backend.variant },
      order: order && { name: order.title, where: order.where.text },
      why: why.map((r) => r.toDict()),
    });
    const first = own(request.phase);
    const lost = first.candidates.find((c) => c.name === chosen.name && c.reasons.length > 0);
    const moved = first.chosen?.title !== chosen.title;
    const runs = [run(request.phase, first, moved ? lost?.reasons : [])];
    const byPhase = request.phase === "any" && request.attention === "mha" && request.attn_type === "decoder";
    const phases = ["prefill", "decode"].filter((phase) => registry.facets.phase?.known.has(phase));
    for (const phase of byPhase && requested === null ? phases : []) {
      const other = own(phase);
      if (other.chosen?.title !== first.chosen?.title) runs.push(run(phase, other));
    }
    return runs;
  }

  // in place of what an engine asks: nobody knows what it stores
  const UNKNOWN = "unknown";

  // the fields of every request that change no layer and no byte of a model; Python reads the model anew for others
  const HARMLESS = ["kv_dtype", "block_size", "phase"];

  /** Whether a model's document answers, whatever is asked of every layer. */
  const documentAnswers = (given) => Object.keys(given).every((name) => HARMLESS.includes(name));

  /** The questions of a model's groups of layers, from its document; `options` are those of `explain`. */
  function modelQuestions(registry, model, options) {
    if (!documentAnswers(options.given)) throw new Error(`${Object.keys(options.given)} is a question for Python`);
    const asked = questionsOf(registry, model, options);
    const anew = anewOf(registry, model, options);
    const questions = placed(asked.questions).map(([question, places]) => ({ ...question, anew: (given) => anew(places, given) }));
    return { ...asked, questions };
  }

  /** Each question with the places of its layers, which stay when other layers join it. */
  function placed(questions) {
    const counts = new Map();
    return questions.map((question) => {
      const layers = question.members.map((member) => [member, counts.get(member) ?? 0]);
      for (const [member, count] of layers) counts.set(member, count + 1);
      return [question, layers.map(([member, count]) => `${member}|${count}`)];
    });
  }

  /** A function that gives each request of some layers of a model once a user gives further options, as a list. */
  function anewOf(registry, model, options) {
    const kept = new Map();
    const read = (facets) => {
      const found = new Map();
      const core = ([name]) => name in registry.core;
      const given = { ...options.given, ...Object.fromEntries(facets.filter(core)) };
      const extra = { ...options.extra, ...Object.fromEntries(facets.filter((facet) => !core(facet))) };
      try {
        for (const [{ request }, places] of placed(questionsOf(registry, model, { ...options, given, extra }).questions)) {
          for (const place of request === null ? [] : places) found.set(place, request);
        }
      } catch (error) {
        if (!(error instanceof RequestError)) throw error;
        return new Map();
      }
      return found;
    };
    return (places, facets) => {
      const key = JSON.stringify([...facets].sort());
      if (!kept.has(key)) kept.set(key, read(facets));
      const requests = places.map((place) => kept.get(key).get(place));
      return requests.includes(undefined) ? [] : [...new Set(requests)];
    };
  }

  /** The questions of a model's groups, whatever is given: bytes and words are those of what its document answers. */
  function questionsOf(registry, model, options) {
    const kv = options.given.kv_dtype === undefined ? "" : options.given.kv_dtype ?? "none";
    const answer = model.answers[`${kv}|${options.ranks}`];
    if (answer === undefined) throw new RequestError(`no data on ${model.name} with TP ${options.ranks} and KV cache ${kv}`);
    const found = model.cases[answer];
    if (found.error) throw new RequestError(found.error);
    const labels = [];
    const firsts = [];
    const isRead = ([name]) => !(registry.facets[name].unless in options.given);
    const stated = Object.fromEntries(Object.entries({ ...model.stated, ...found.stated }).filter(isRead));
    const questions = found.groups.flatMap(([about, index]) => {
      const group = model.groups[about];
      const fields = index === null ? null : { features: [], extra: {}, ...model.requests[index] };
      const { label, asked, stores } = groupQuestions(registry, group, fields, { ...model, stated }, options);
      labels.push([label, group.indices]);
      const members = group.indices.map((i) => `${group.stack}|${i}`);
      firsts.push(stores ?? asked[0][0]);
      return asked.map(([request, words]) => ({ request, label: words, layers: group.layers, members }));
    });
    const memory = (started) => memoryDict(registry, model, found, labels, firsts.map((r) => r && [r, started(r)]), options);
    return { questions, title: [model.head, ...optionWords(found, options)].join(" · "), notes: found.notes, memory };
  }

  /**
   * The label of a group of layers, and its requests with theirs: one, or one for each phase. stores: the request of what
   * the cache holds, where none of these is that.
   */
  function groupQuestions(registry, group, fields, model, options) {
    let label = model.labels[group.label];
    if (fields === null) return { label, asked: [[null, label]] };
    const { kv_dtype: _, ...changes } = options.given;
    const before = makeRequest(registry, fields);
    const both = before.attention.startsWith("mla") && before.qk_nope_head_dim !== null;
    // prompts of MLA have no latents, but keys for each head
    const alone = both && changes.phase === "prefill";
    if (alone) delete changes.phase;
    const features = [...before.features, ...options.features];
    const changed = { ...fields, ...changes, features, extra: { ...before.extra, ...options.extra } };
    let request = makeRequest(registry, changed);
    const labelled = (about) => {
      const words = requestWords(registry, about, group.phrases, ["dtype", "model"]);
      return [...new Set([...words, ...group.beside])].join(" · ");
    };
    const isChanged = JSON.stringify(request) !== JSON.stringify(before);
    if (isChanged) label = labelled(request);
    const promptLabel = both ? (isChanged ? labelled(expanded(registry, request)) : `${label} · prefill`) : null;
    // no label repeats what the config states
    request = makeRequest(registry, { ...changed, extra: { ...model.stated, ...request.extra } });
    const prompts = both ? [expanded(registry, request), promptLabel] : null;
    if (alone) return { label, asked: [prompts], stores: request };
    if ("phase" in options.given) return { label, asked: [[request, label]] };
    if (both) return { label, asked: [[request, label], prompts] };
    const phases = registry.phases.map((phase) => [makeRequest(registry, { ...request, phase }), `${label} · ${phase}`]);
    return { label, asked: phases.length > 0 ? phases : [[request, label]] };
  }

  function optionWords(found, options) {
    const { kv_dtype: kvDtype = "auto", ...rest } = options.given;
    const words = options.ranks > 1 ? [`TP ${options.ranks}`] : [];
    words.push(found.dtype);
    if (kvDtype !== "auto") words.push(cacheWords(kvDtype));
    words.push(...facetWords(rest), ...facetWords(options.extra));
    const features = [...new Set(options.features)].sort().map(featureWords);
    return features.length > 0 ? [...words, `with ${features.join(", ")}`] : words;
  }

  /** Bytes of one token in one layer of a registry with steps, whose words are none of a packed format. */
  function layerBytes(registry, request, kvDtype, dtype) {
    const [bits, ofHead, ofLatent] = registry.kvBytes[kvDtype === "auto" ? dtype : kvDtype] ?? [32, 0, null];
    const mla = request.attention.startsWith("mla");
    if (mla && ofLatent !== null) return ofLatent;
    const elements = mla ? request.head_size : request.head_size + (request.head_size_v || request.head_size);
    return Math.round((mla ? 1 : request.num_kv_heads ?? 0) * ((elements * bits) / 8 + ofHead));
  }

  /** What a group stores once the engine has started: its part of the document, counted anew where the start changes that. */
  function partStored(registry, part, pair, layers, found) {
    if (pair === null || pair[1] === null) return part;
    const [asked, started] = pair;
    if (started === UNKNOWN) {
      return { token_bytes: 0, keeps: null, compress: null, told: { ...part.told, kv_dtype: null, keeps_tokens: null, note: "not known" } };
    }
    const named = ["attention", "dtype", "kv_dtype", "head_size", "head_size_v", "num_kv_heads"];
    if (named.every((name) => started[name] === asked[name])) return part;
    const { note, kv_dtype: before } = part.told;
    const counted = note.match(/^[\d,]+( B per token.*)/);
    if (note && !counted) return part;
    const kvDtype = started.kv_dtype ?? "auto";
    const bytes = layerBytes(registry, started, kvDtype, started.dtype === asked.dtype ? found.dtype : started.dtype) * layers;
    if (counted) return { ...part, told: { ...part.told, note: bytes.toLocaleString("en") + counted[1] } };
    return { ...part, token_bytes: bytes, told: { ...part.told, kv_dtype: before && kvDtype } };
  }

  /**
   * Bytes of the KV cache: of each group, and in total, for a token and for requests of some lengths. pairs: for each
   * group its first request, and what the engine asks in its place once it has started, null where it has no steps.
   */
  function memoryDict(registry, model, found, labels, pairs, options) {
    const lengths = options.lengths?.length ? options.lengths : model.lengths;
    const kept = (part, length) => {
      const tokens = part.keeps === null ? length : Math.min(length, part.keeps);
      return part.token_bytes * (tokens + (part.compress ? Math.floor(length / part.compress) : 0));
    };
    const parts = found.memory.map((part, i) => partStored(registry, part, pairs[i], labels[i][1].length, found));
    const groups = parts.map((part, i) => ({
      label: labels[i][0],
      layers: labels[i][1],
      bytes_per_token: part.token_bytes,
      ...part.told,
      bytes_at: Object.fromEntries(lengths.map((n) => [n, kept(part, n)])),
    }));
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    return {
      kv_dtype: options.given.kv_dtype ?? "auto",
      ranks: options.ranks,
      groups,
      bytes_per_token: sum(groups.map((g) => g.bytes_per_token)),
      bytes_at: Object.fromEntries(lengths.map((n) => [n, sum(groups.map((g) => g.bytes_at[n]))])),
    };
  }

  /** A request's question, without a model. */
  function requestQuestions(registry, options) {
    const fields = { head_size: registry.core.head_size.ordinary, ...options.given };
    const request = makeRequest(registry, { ...fields, features: options.features, extra: options.extra });
    const label = requestWords(registry, request).join(" · ");
    const { head_size: given, head_size_v: given_v } = options.given;
    const notes = given === undefined ? [`no --head-size and no --model: head_size ${request.head_size} was assumed`] : [];
    if (given_v != null && given_v === request.head_size) {
      notes.push(`--head-size-v ${given} is --head-size, as it is without that option`);
    }
    return { questions: [{ request, label, layers: "" }], title: label, notes, memory: null };
  }

  function idleFlags(asked, ask, platform) {
    const said = (s) => JSON.stringify([s.candidates, s.warnings], (key, value) => (key === "where" ? value.text : value));
    const idle = (flag) => {
      const without = { ...platform, flags: platform.flags.filter((f) => f !== flag) };
      return asked.length > 0 && asked.every(([request, selection]) => said(selection) === said(ask(request, without)));
    };
    return platform.flags
      .filter(idle)
      .map((flag) => `flag ${flag} changes nothing here: without it, every answer and every reason is the same`);
  }

  /** The facets that a step gave another value. */
  const changedBy = ({ sets }) => {
    return Object.fromEntries(sets.filter(([, before, after]) => before !== after).map(([facet, , after]) => [facet, after]));
  };

  /**
   * The explanation of a question on a platform. options: given (fields of every request), features, extra, ranks,
   * backend. model: the document of a model, null for the request that the options describe.
   */
  function explain(registry, platform, options, model = null) {
    const asked = model === null ? requestQuestions(registry, options) : modelQuestions(registry, model, options);
    const ask = (request, where) => evaluate(request, where, registry, options.backend ?? null);
    const answers = asked.questions.map((question) => {
      return { ...question, selection: question.request && ask(question.request, platform) };
    });
    const choice = options.backend ? [`backend ${options.backend}`] : [];
    const title = [asked.title, ...choice, ...platformWords(registry, platform), `registry ${registry.title}`];
    const pairs = answers.filter((a) => a.request !== null).map((a) => [a.request, a.selection]);
    const notes = [...(registry.silence ? [registry.silence] : []), ...asked.notes, ...idleFlags(pairs, ask, platform)];
    const started = (request) => {
      const selection = pairs.find(([other]) => other === request)?.[1] ?? ask(request, platform);
      const { start } = selection;
      if (start?.refusal?.unknown) return UNKNOWN;
      const stored = consequences(selection).find((follows) => follows.kind === "stores");
      const changes = [...(start?.taken ?? []).map(changedBy), ...(stored ? [{ kv_dtype: stored.value }] : [])];
      return changes.length === 0 ? null : Object.assign({ ...request }, ...changes);
    };
    const memory = asked.memory && asked.memory(started);
    return { registry, title: title.filter(Boolean).join(" · "), notes, answers, memory };
  }

  /** An explanation as `attnreg explain --json` prints it, without the command; without `remedies`, if that is false. */
  function explanationDict(explanation, remedies = true) {
    const { registry, title, notes, answers, memory } = explanation;
    const document = {
      registry: registry.title,
      title,
      notes,
      answers: answers.map(({ label, layers, selection }) => {
        if (selection === null) return { label, layers, selections: [] };
        const more = { runs: runsOf(selection), unproven: attnreg.unproven(selection) };
        return { label, layers, selections: [{ ...selectionDict(selection, false), ...more }] };
      }),
      ...(memory === null ? {} : { kv_cache: memory }),
    };
    if (remedies) for (const { search } of remedySearches(explanation, document)) search();
    return document;
  }

  /** For each candidate of an explanation's document that lost: `candidate`, and `search`, which writes its remedy there. */
  function remedySearches({ answers }, document) {
    return answers.flatMap(({ selection, anew }, i) => {
      const lost = (selection?.candidates ?? []).map((candidate, j) => [candidate, j]).filter(([c]) => isLost(selection, c));
      return lost.map(([candidate, j]) => {
        const told = document.answers[i].selections[0].candidates[j];
        return { candidate: told, search: () => { told.would_win = remedy(selection, candidate, anew); } };
      });
    });
  }

  Object.assign(attnreg, { documentAnswers, explain, explanationDict, remedySearches, selectionDict });
})((globalThis.attnreg ??= {}));
