"""What attnreg itself runs is said beside the backend that an order names, and no kernel module is imported for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from support.registries import tiny
from support.registries.asking import at

from attnreg import AttentionRequest, Platform, Registry, load_registry
from attnreg.explain import Question, explain
from attnreg.explain.own_kernels import run_lines, runs_of
from attnreg.loader import unloadable
from attnreg.selection.selector import evaluate

GPU = Platform(platform="gpu", arch="g1", packages={})
# a module that no machine has: it is taken to load
MODULE = {"module": "attnreg.kernels.no_such"}
PLAIN = AttentionRequest(head_size=64)


def variant(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "when": {"arch": "g1"}, "source": "s:p#q", **changes}


NAMED_ONLY = tiny.row(variants=[variant("V", **MODULE, run_on_request="it is new"), variant("W")])
NOTHING = "attnreg itself runs nothing here: A has no kernel module that attnreg can run"
SAID: list[tuple[str, dict[str, Any], str | None, list[str]]] = [
    ("what is named is run", {"A": tiny.row(**MODULE), "B": tiny.row()}, None, []),
    ("no module", {"A": tiny.row(), "B": tiny.row(**MODULE)}, None,
     ["attnreg itself runs B: A has no kernel module that attnreg can run"]),
    ("by name alone", {"A": NAMED_ONLY, "B": tiny.row(**MODULE)}, None,
     ["attnreg itself runs B: A/V runs where it is named: it is new"]),
    ("by name, and named", {"A": NAMED_ONLY, "B": tiny.row(**MODULE)}, "A", []),
    ("nothing", {"A": tiny.row()}, None, [NOTHING]),
    ("a name that cannot be run", {"A": tiny.row(), "B": tiny.row(**MODULE)}, "A", [NOTHING]),
    ("refused", {"A": tiny.row(capabilities={"head_sizes": 8})}, None, []),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "backend", "lines"), [s[1:] for s in SAID], ids=[s[0] for s in SAID])
def test_what_attnreg_runs(rows: dict[str, Any], backend: str | None, lines: list[str]) -> None:
    said = run_lines(evaluate(PLAIN, GPU, tiny.load(rows), backend))
    assert [line.rpartition(" (")[0] for line in said] == lines


def test_it_is_what_a_selection_to_run_takes(default: Registry) -> None:
    """Where every module loads: the torch of the tests has them all for a processor."""
    for size, features in ((64, ()), (100, ("sinks",)), (600, ("alibi", "lse"))):
        request = AttentionRequest(head_size=size, num_heads=8, num_kv_heads=2, features=set(features))
        platform = at("x86_64", default)
        (run,) = runs_of(evaluate(request, platform, default))
        chosen = evaluate(request, platform, default, unloadable=unloadable).chosen
        assert chosen is not None
        assert run.title == chosen.title


def test_prompts_and_tokens_have_orders_of_their_own(default: Registry) -> None:
    plain = AttentionRequest(head_size=72, num_heads=32, num_kv_heads=8)
    hopper = at("sm90", default)
    runs = runs_of(evaluate(plain, hopper, default))
    assert [(run.phase, run.title, run.alone) for run in runs] == [
        ("any", "TRITON_ATTN", False),
        ("prefill", "FLASH_ATTN/FA3", True),
    ]
    assert "runs where it is named" in runs[0].text
    assert runs[1].text.startswith(
        "attnreg itself runs FLASH_ATTN/FA3 for prompts alone (order cuda/hopper-mha-prefill"
    )
    asked = AttentionRequest(head_size=96, num_heads=32, num_kv_heads=8, phase="prefill")
    assert run_lines(evaluate(asked, hopper, default)) == ()
    # an encoder reads no cache, token by token
    encoder = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, attn_type="encoder_only")
    assert len(runs_of(evaluate(encoder, hopper, default))) == 1


def test_the_backends_of_an_engine_are_its_own() -> None:
    registry = load_registry("vllm-0.33.0")
    assert runs_of(evaluate(AttentionRequest(head_size=128), at("sm90", registry), registry)) == ()


def test_programs_get_it_always(default: Registry) -> None:
    loaded = set(sys.modules)
    asked = [Question(AttentionRequest(head_size=128), "q")]
    explanation = explain(asked, [at("sm100", default), at("gfx942", default)], default).to_dict()
    first, second = (selection["runs"] for selection in explanation["answers"][0]["selections"])
    assert first[0]["backend"] == {"name": "TRITON_ATTN", "variant": None}
    assert first[0]["why"][0]["where"].startswith("registry/backends.yaml:")
    assert second[0]["backend"]["name"] == "ROCM_ATTN"
    assert second[0]["why"] == []
    assert not [name for name in set(sys.modules) - loaded if name.startswith("attnreg.kernels")]


def test_platforms_on_which_it_differs_share_no_verdict() -> None:
    rows = {
        "A": tiny.row(variants=[variant("V", when={"arch": "g1"}), {**variant("W", when={"arch": "g2"}), **MODULE}]),
        "B": tiny.row(**MODULE),
    }
    registry = tiny.load(rows, {"gpu": [{"name": "o", "order": ["A", "B"]}]})
    platforms = [Platform(platform="gpu", arch=arch, packages={}) for arch in ("g1", "g2")]
    verdicts = explain([Question(PLAIN, "q")], platforms, registry).answers[0].verdicts
    assert [len(v.runs) for v in verdicts] == [1, 0]
