// One question of the tests, answered by the picker's evaluator in Node or in a browser.
globalThis.answerQuestion = function (registry, question, remedies, models) {
  const { attnreg } = globalThis;
  const { platform: p, backend } = question;
  try {
    const platform = attnreg.makePlatform(p.platform, p.arch, p.flags, p.packages);
    if (question.model !== undefined) {
      const explanation = attnreg.explain(registry, platform, question.options, models[question.model]);
      return attnreg.explanationDict(explanation);
    }
    const request = attnreg.makeRequest(registry, question.request);
    const selection = attnreg.evaluate(request, platform, registry, backend);
    return attnreg.selectionDict(selection, remedies);
  } catch (error) {
    if (error instanceof attnreg.RequestError) return { error: error.message };
    throw error;
  }
};
