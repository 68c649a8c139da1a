"""Runs a model under a probe, and what of it its own run did not reach."""

from __future__ import annotations

import contextlib
import re
import traceback

from torch import nn
from transformers import PreTrainedModel

from transformers_truth.inputs import candidates, layer_inputs
from transformers_truth.probe import Probe, looks_like_attention

# a module of this name, less its family's prefix, is a mixer of this kind
_MIXERS = (
    ("mamba", re.compile(r"Mamba2?(Mixer|Layer)$|^Mixer$|SSM$")),
    ("conv", re.compile(r"^(Text|Moe|Vl|Vision)?ShortConv$")),
    ("linear", re.compile(r"(DeltaNet|DeltaAttention|DeltaRule|LinearAttention|LightningAttention|RecurrentBlock|"
                          r"mLSTMLayer|xLSTMLayer|^RwkvSelfAttention)$")),
)  # fmt: skip
# mixers that are named like attention but for the family
_WHOLE = {"RwkvSelfAttention", "xLSTMLayer"}
CROSS = re.compile(r"cross|encoder_attn|EncDecAttention|encoder_attention|encoder_decoder_attention", re.IGNORECASE)


def towers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The models within a model, outer before inner."""
    return [(n, m) for n, m in model.named_modules() if n and isinstance(m, PreTrainedModel)]


def _attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The innermost modules that look like attention, by name."""
    found = {n: m for n, m in model.named_modules(remove_duplicate=False) if looks_like_attention(m)}
    found = {n: m for n, m in found.items() if any(True for _ in m.parameters())}
    return {n: m for n, m in found.items() if not any(o.startswith(n + ".") for o in found)}


def run(model: PreTrainedModel, probe: Probe) -> tuple[list[str], dict[str, nn.Module]]:
    """Runs the model, and what of it that did not reach on its own; the errors met, and the modules never reached."""
    wanted = {n: m for n, m in _attention_modules(model).items() if mixer_kind(m) is None}
    errors: list[str] = []
    if not wanted:
        return errors, {}

    def missing(prefix: str = "") -> dict[str, nn.Module]:
        seen = {c.path for c in probe.calls} | {n for c in probe.calls for n in probe.names.get(id(c.module), [])}
        left = {n: m for n, m in wanted.items() if n not in seen and n.startswith(prefix)}
        return {n: m for n, m in left.items() if not any(n.startswith(s + ".") for s in seen)}

    parts = [("", model, False), *((n, m, False) for n, m in towers(model)), ("", model, True)]
    for name, part, whole in parts:
        prefix = f"{name}." if name else ""
        left = missing(prefix)
        if not left:
            continue
        composite = any(True for _ in towers(part))
        crossed = any(CROSS.search(n.removeprefix(prefix)) or "Cross" in type(m).__name__ for n, m in left.items())
        for kwargs in candidates(part, composite=composite, crossed=crossed, whole=whole):
            probe.stack.clear()
            probe.runs += 1
            try:
                part(**kwargs)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                errors.append(f"{name or 'model'}({', '.join(kwargs)}): {type(error).__name__}: {error} [{where.name}]")
                if missing(prefix):
                    continue
            if not missing(prefix):
                errors = [e for e in errors if not e.startswith(f"{name or 'model'}(")]
                break
    probe.runs += 1
    for name, module in missing().items():
        for kwargs in layer_inputs(module):
            if name not in missing():
                break
            probe.stack[:] = [model.get_submodule(name.rpartition(".")[0])] if "." in name else [model]
            with contextlib.suppress(Exception):
                module(**kwargs)
    probe.alone = probe.runs
    return errors, missing()


# ---- rows ----------------------------------------------------------------------------------------------------------
def mixer_kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    name = name if name in _WHOLE else _bare_name(module)
    for kind, pattern in _MIXERS:
        if pattern.search(name):
            return kind
    return None


def _bare_name(module: nn.Module) -> str:
    """The class's name less the family's: `BambaMixer` is a Mixer."""
    name = type(module).__name__
    config = getattr(module, "config", None)
    folder = type(module).__module__.split(".")[-2:-1] or [""]
    prefixes = [type(config).__name__.removesuffix("Config"), folder[0].replace("_", "")]
    cuts = [len(p) for p in prefixes if p and name.lower().startswith(p.lower()) and len(p) < len(name)]
    return name[max(cuts, default=0) :]
