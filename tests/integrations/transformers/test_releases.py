"""Releases of transformers with other forms: refused by name and version, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.models import small_models as models
from support.models.small_models import by, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api, input_outputs
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import attnreg.integrations.transformers as attention
from attnreg import Registry, UnclaimedError
from attnreg.integrations.transformers.compressed.layers import PREPARE, stand_in
from attnreg.integrations.transformers.forms import releases
from attnreg.integrations.transformers.masks import lazy_mask
from attnreg.integrations.transformers.unsupported_classes import DECIDE

HERE = rf"^transformers {transformers.__version__}: .*{{}}.*install transformers {releases.NEWEST}"
NAMES = ("sdpa", "paged|eager")


def hooks() -> dict[str, Any]:
    """Whatever a block of continuous batching replaces."""
    interface = AttentionInterface()  # type: ignore[no-untyped-call]
    return {
        **{name: interface[name] for name in NAMES},
        "mask": input_outputs.attn_mask_is_needed,
        "cache": continuous_api.PagedAttentionCache,
        "update": PagedAttentionCache.update,
    }


def refused(form: str) -> Any:
    return pytest.raises(UnclaimedError, match=HERE.format(form))


@pytest.mark.parametrize(("newest", "lines"), [("5.0.0", 1), (transformers.__version__, 0), ("99.0", 0)])
def test_a_newer_release_is_told_once(
    newest: str, lines: int, default: Registry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "NEWEST", newest)
    monkeypatch.setattr(releases, "_told", set())
    with caplog.at_level(logging.WARNING, "attnreg.integrations.transformers"):
        for name in ("first", "second"):
            attention.register(name, default)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == lines
    assert all(f"transformers {transformers.__version__} is newer than {newest}" in line for line in said)


def test_the_tests_run_with_no_release_that_is_newer() -> None:
    assert releases.Version(transformers.__version__) <= releases.Version(releases.NEWEST)


@pytest.mark.parametrize(("owner", "name"), [(GenerationMixin, PREPARE), (PreTrainedModel, DECIDE)])
def test_nothing_is_registered_where_a_method_is_gone(
    owner: Any, name: str, default: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with refused(f"{owner.__name__} has no {name}"):
        attention.register("elsewhere", default)
    for table in (AttentionInterface(), AttentionMaskInterface()):  # type: ignore[no-untyped-call]
        assert "elsewhere" not in table.valid_keys()


def test_a_mask_of_an_unknown_argument_is_refused() -> None:
    with refused("masks are asked for with mask_rule"):
        lazy_mask(1, 3, 3, mask_rule=lambda b, h, q, k: k == q)


@pytest.fixture
def packed(default: Registry) -> Callable[[Any], Any]:
    """A model whose generate makes its cache by another function."""

    def made(prepare: Any) -> Any:
        attention.register("packed", default, kv_dtype="turboquant_4bit_nc")
        monkeypatch.setattr(GenerationMixin, PREPARE, prepare)
        stand_in(attention._engines)
        model = models.qwen3(head_dim=32, num_hidden_layers=5)
        model.set_attn_implementation("packed")
        return model

    with pytest.MonkeyPatch.context() as monkeypatch:
        yield made  # type: ignore[misc]


def prepared(model: Any, **model_kwargs: Any) -> dict[str, Any]:
    getattr(model, PREPARE)(transformers.GenerationConfig(), model_kwargs, None, 1, 20)
    return model_kwargs


def test_a_packed_cache_has_the_name_that_generate_gives(packed: Callable[[Any], Any]) -> None:
    def prepare(self: Any, generation_config: Any, model_kwargs: Any, *more: Any) -> None:
        model_kwargs.setdefault("keys_of_before", DynamicCache(config=self.config))

    model = packed(prepare)
    made = prepared(model)
    assert [type(layer).__name__ for layer in made.pop("keys_of_before").layers][2] == "PackedLayer"
    assert made == {}
    # a cache that is given stays
    given = DynamicCache(config=model.config)
    assert prepared(model, keys_of_before=given) == {"keys_of_before": given}
    # and so does that of a model which attnreg does not pack
    model.set_attn_implementation("eager")
    assert type(prepared(model)["keys_of_before"].layers[2]) is not type(attention.new_cache(model, name="packed"))


def nowhere(self: Any, generation_config: Any, model_kwargs: Any, *more: Any) -> None:
    """Makes no cache among the arguments."""


def twice(self: Any, generation_config: Any, model_kwargs: Any, *more: Any) -> None:
    model_kwargs |= {name: DynamicCache(config=self.config) for name in ("first", "second")}


def renamed(self: Any, settings: Any, inputs: Any, *more: Any) -> None:
    inputs["cache"] = DynamicCache(config=self.config)


@pytest.mark.parametrize(
    ("prepare", "form"),
    [
        (nowhere, "generate makes its cache elsewhere"),
        (twice, "generate makes several caches .first, second."),
        (renamed, "_?prepare.* of generate has another form|renamed of generate has another form"),
    ],
)
def test_a_cache_of_generate_that_is_not_known_is_refused(
    prepare: Any, form: str, packed: Callable[[Any], Any]
) -> None:
    model = packed(prepare)
    with refused(f"(?:{form})"):
        prepared(model)
    # models of other names are as they were
    model.set_attn_implementation("eager")
    prepared(model)


def other_update(self: Any, keys: Any, values: Any, layer: int) -> None:
    """As no release has it."""


@pytest.mark.parametrize(
    ("break_it", "form"),
    [
        (lambda m: m.setattr(PagedAttentionCache, "update", other_update), "stores by self, keys, values, layer"),
        (lambda m: m.delattr(input_outputs, "attn_mask_is_needed"), "has no attn_mask_is_needed"),
        (lambda m: m.delattr(continuous_api, "PagedAttentionCache"), "has no PagedAttentionCache"),
        (lambda m: m.delattr(input_outputs, "PagedAttentionArgs"), "has no PagedAttentionArgs"),
        (lambda m: m.delitem(input_outputs.PagedAttentionArgs.__annotations__, "read_index"), "has no read_index"),
        (lambda m: m.delitem(AttentionInterface._global_mapping, "sdpa"), "table of attention functions has another"),
    ],
    ids=["update", "mask", "cache", "arguments", "an argument", "function"],
)
def test_continuous_batching_of_another_form_changes_nothing(
    break_it: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.llama()
    break_it(monkeypatch)
    before = AttentionInterface._global_mapping | vars(input_outputs) | vars(continuous_api)
    with refused(form), attention.continuous_batching(model):
        raise AssertionError("the block runs")
    assert AttentionInterface._global_mapping | vars(input_outputs) | vars(continuous_api) == before
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.undo()
    with attention.continuous_batching(model):
        pass


def step(**more: Any) -> dict[str, Any]:
    """The arguments of a call of an attention function under "paged|eager", of two requests of two tokens."""
    q = torch.zeros(1, 4, 4, 16)
    return {"module": models.llama().model.layers[0].self_attn, "query": q, "key": q, "value": q,
            "attention_mask": None, "scaling": 1.0, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more", "form"),
    [
        ("sdpa", {"read_index": [torch.arange(4)]}, "made before continuous_batching, or that is of another form"),
        ("paged|eager", {"write_index": [torch.arange(4)]}, "made before continuous_batching"),
        # whatever a step's arguments are called
        ("paged|eager", {"places": [torch.arange(4)]}, "attends without a mask and without a paged cache"),
        ("paged|eager", {"cache": object()}, "paged cache has another form"),
    ],
)
def test_a_step_of_another_form_is_refused(name: str, more: dict[str, Any], form: str) -> None:
    call = step(**more)
    with attention.continuous_batching():
        attend = AttentionInterface()[name]  # type: ignore[no-untyped-call]
        with refused(form):
            attend(call.pop("module"), call.pop("query"), call.pop("key"), call.pop("value"),
                   call.pop("attention_mask"), **call)  # fmt: skip


def test_a_paged_cache_without_an_attribute_generates_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = models.llama(), hooks()

    class Bare(PagedAttentionCache):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.layer_to_allocator = {0: object()}

    monkeypatch.setattr(continuous_api, "PagedAttentionCache", Bare)
    greedy = transformers.GenerationConfig(max_new_tokens=2, pad_token_id=0, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(use_cuda_graph=False, num_blocks=8, page_size=16, max_batch_tokens=8)
    said = ""
    with attention.continuous_batching(model):
        try:
            # some releases make the cache in a thread that logs errors
            found = model.generate_batch([[5, 6, 7]], generation_config=greedy, continuous_batching_config=config)
            assert all(not one.generated_tokens for one in found.values())
        except UnclaimedError as error:
            said = str(error)
    assert "transformers' paged cache has another form" in said + caplog.text
    monkeypatch.undo()
    assert hooks() == before
    by("sdpa", model, lambda model: model(**tokens(7)))
