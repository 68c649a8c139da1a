"""Records what vLLM settles for a whole run: the block size, the layout of the KV cache, and the CUDA-graph mode.

    python tools/record/vllm_runs.py --tree .cache/vllm-0.33.0 --asked asked.jsonl --out decisions.jsonl

The arguments and the rows are those of vllm_config.py, which starts the run. vLLM's own functions then decide, on the
processor: `resolve_kv_cache_layout` and `resolve_cudagraph_mode_and_sizes`. A row may also ask for a `kv_cache_layout`
(VLLM_KV_CACHE_LAYOUT) or for `compilation_config`. Only the first `BUILT` layers of a model are built, because the
others repeat them; a row may name another number, `built`.

`out` has `layout` and `graphs`, each a value or the `error` that the function raises, and for each group of layers the
backend's own `layouts` and `level`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import vllm_config
import vllm_drafts
import vllm_machine

# layers of a model that are built, if a row does not name their number
BUILT = 8


class RunRecorder(vllm_config.Recorder):
    """vLLM on one machine, and what it settles for a run once its layers are built."""

    models: list[Any]

    def config(self, given: dict[str, Any], model: Path, draft: Path | None, out: dict[str, Any]) -> Any:
        """The configuration of the engine."""
        self.built = given.get("built", BUILT)
        self.layout_asked = given.get("kv_cache_layout")
        # vLLM turns this on for some models, for the rest of the process
        os.environ.pop("VLLM_USE_BREAKABLE_CUDAGRAPH", None)
        return super().config(given, model, draft, out)

    def layers(self, config: Any, out: dict[str, Any]) -> None:
        """Build the model, and keep it."""
        from vllm.model_executor.model_loader import utils
        from vllm.v1.attention.backends import utils as backends

        # before 0.30.0 a backend imposes its layout on all that the process starts later
        if hasattr(backends, "set_kv_cache_layout"):
            backends.set_kv_cache_layout(None)
        self.models = []
        build = utils.initialize_model

        def kept(*args: Any, **kwargs: Any) -> Any:
            self.models.append(build(*args, **kwargs))
            return self.models[-1]

        with mock.patch.object(utils, "initialize_model", kept), _few_layers(self.built):
            super().layers(config, out)
        for layer in out["layers"]:
            # the number of layers is not of the whole model
            del layer["layers"]

    def block_size(self, config: Any, out: dict[str, Any]) -> None:
        """Choose the block size, then the layout and the graph mode."""
        super().block_size(config, out)
        from vllm.config import set_current_vllm_config

        environment = {"VLLM_KV_CACHE_LAYOUT": self.layout_asked} if self.layout_asked else {}
        with set_current_vllm_config(config), mock.patch.dict(os.environ, environment):
            groups = list(self._groups(config))
            out["groups"] = [group for group, _, _ in groups]
            out["layout"] = _decided(lambda: self._layout(config, [spec for _, spec, _ in groups if spec is not None]))
            out["graphs"] = _decided(lambda: self._graphs(config, groups, out))

    def _groups(self, config: Any) -> Iterator[tuple[dict[str, Any], Any, Any]]:
        """Each kind of layer that has a say: what it states, its cache's spec, and its builder."""
        from vllm.v1.kv_cache_interface import AttentionSpec

        seen = set()
        for layer in config.compilation_config.static_forward_context.values():
            if not hasattr(layer, "get_attn_backend"):
                continue
            backend = layer.get_attn_backend()
            spec = None
            if not getattr(layer, "kv_sharing_target_layer_name", None):
                spec = layer.get_kv_cache_spec(config)
            if isinstance(spec, AttentionSpec) and hasattr(backend, "customize_spec"):
                spec = backend.customize_spec(spec)
            # releases before 0.30.0 ask for one layout, if for any
            ask = next(n for n in ("supported_kv_cache_layouts", "get_required_kv_cache_layout") if hasattr(backend, n))
            layouts = getattr(backend, ask)()
            builder = backend.get_builder_cls()
            level = builder.get_cudagraph_support(config, spec)
            about: dict[str, Any] = {"kind": type(layer).__name__, "backend": backend.get_name(), "level": level.name}
            if layouts is not None:
                about["layouts"] = layouts if isinstance(layouts, str) else [layout.name for layout in layouts]
            if spec is not None:
                about["shape"] = _shape(spec)
            key = str(about), backend
            if key not in seen:
                seen.add(key)
                yield about, spec, (backend, level)

    def _layout(self, config: Any, specs: list[Any]) -> str:
        from vllm.v1.attention.backends import utils

        if not hasattr(utils, "resolve_kv_cache_layout"):
            utils.get_kv_cache_layout.cache_clear()
            return str(utils.get_kv_cache_layout() or "NHD")
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        names = [x.name for x in utils.get_supported_kv_cache_layouts(get_current_attn_backends(config))]
        return str(utils.resolve_kv_cache_layout(config, [names], specs).name)

    def _graphs(self, config: Any, groups: list[tuple[dict[str, Any], Any, Any]], out: dict[str, Any]) -> str:
        from vllm.v1.attention.backend import AttentionCGSupport

        backend, least = None, AttentionCGSupport.ALWAYS
        for _, _, (each, level) in groups:
            if level.value < least.value:
                backend, least = each.__name__, level
        compilation, speculative = config.compilation_config, config.speculative_config
        tokens = 1 + (speculative.num_speculative_tokens if speculative is not None else 0)
        given: dict[str, Any] = {}
        out["asked_graphs"] = compilation.cudagraph_mode.name
        out["runner"] = "v2" if vllm_drafts.second_runner(config) else "v1"
        try:
            from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule
        except ImportError:
            pass
        else:
            if vllm_drafts.second_runner(config):
                breaks = os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1"
                given["piecewise_capture_available"] = breaks or has_compiled_submodule(self.models[0])
                given["use_v2_model_runner"] = True
        return str(compilation.resolve_cudagraph_mode_and_sizes(least, backend, tokens, **given).name)


def _shape(spec: Any) -> list[int]:
    """Heads, states and bytes of a block; releases before 0.30.0 have no states."""
    heads = getattr(spec, "num_heads", getattr(spec, "num_kv_heads", 1))
    return [heads, getattr(spec, "num_states", spec.block_size), spec.page_size_bytes]


def _decided(decide: Any) -> Any:
    """What vLLM's function decides, or the error that it raises."""
    try:
        return decide()
    except (ValueError, AssertionError) as error:
        return {"error": str(error)[:300]}


@contextmanager
def _few_layers(most: int) -> Iterator[None]:
    """Build the first layers of a model, at most ``most``, and leave the others out."""
    import torch
    from vllm.model_executor.models import utils

    build = utils.make_layers

    def make_layers(count: int, layer_fn: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        few = min(count, most)
        start, _, modules = build(few, layer_fn, prefix, *args, **kwargs)
        missing = [utils.PPMissingLayer() for _ in range(count - few)]
        return start, count, torch.nn.ModuleList([*modules, *missing])

    using: list[Any] = [m for m in [*sys.modules.values()] if getattr(m, "make_layers", None) is build]
    for module in using:
        module.make_layers = make_layers
    try:
        with mock.patch.object(utils, "make_layers", make_layers):
            yield
    finally:
        # modules that were imported meanwhile have it too
        replaced: list[Any] = [m for m in [*sys.modules.values()] if getattr(m, "make_layers", None) is make_layers]
        for module in replaced:
            module.make_layers = build


vllm_config.ARGUMENTS = (*vllm_config.ARGUMENTS, "compilation_config")
vllm_config.Recorder = RunRecorder  # type: ignore[misc]
# each machine has a process of its own, which runs this file again
vllm_config.__file__ = __file__

if __name__ == "__main__":
    assert vllm_machine.STUBBED
    vllm_config.main()
