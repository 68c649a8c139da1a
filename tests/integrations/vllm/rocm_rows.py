"""Ask vLLM on one simulated AMD GPU about the rows recorded for it, without the plugin and with it; print both as JSON.

A process of its own, because vLLM's modules ask once, when they are imported, which GPU they are on. Arguments: the
architecture, and "on", "off" or "pkg_missing" for aiter.
"""

from __future__ import annotations

import json
import os
import sys

import engine

if __name__ == "__main__":
    arch, switch = sys.argv[1:]
    rows = [r["in"] for r in engine.recorded("rocm") if (r["in"]["arch"], r["in"]["aiter"]) == (arch, switch)]
    vllm = engine.Engine(engine.boot(arch, switch))
    own = vllm.answers(rows)
    os.environ["ATTNREG_VLLM"] = "1"
    from attnreg.integrations.vllm import decider
    from attnreg.integrations.vllm.plugin import register

    if switch != "pkg_missing":
        # where the rows were recorded every package was there
        decider.installed_packages = lambda known: dict.fromkeys(known, "99")
    register()
    json.dump([own, vllm.answers(rows)], sys.stdout)
