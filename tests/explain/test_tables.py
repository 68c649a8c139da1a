"""Backends and differences as a person reads them: exact texts for a small registry."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console
from support.registries import tiny
from support.registries.tiny import row

from attnreg import Platform, Registry
from attnreg.explain.tables import backend_dict, backends_on, print_backend, print_backends


@pytest.fixture(scope="module")
def registry() -> Registry:
    rows = {
        "A": row(
            status="experimental",
            notes=["as measured"],
            requires={"packages": ["lib>=2"], "flags": ["fast"]},
            capabilities={"kv_dtypes": ["auto"], "features": ["sinks"]},
            emulated={"alibi": "by a bias"},
            rules=[{"when": {"head_size": 64}, "reject": "not [yet]"}],
        ),
        "B": row(variants=[{"name": "NEW", "when": {"arch": "g2"}}, {"name": "OLD"}]),
        "LATE": row(
            platforms=["npu"],
            only_on_request="it is slow",
            module="attnreg.kernels.late",
            contract=1,
            options={"tile": 64, "fused": True},
        ),
    }
    order = [{"backend": "A", "if": {"role": "target"}}, "B"]
    return tiny.load(
        rows, {"gpu": [{"name": "all", "when": {"arch": "g1"}, "order": order}, {"name": "rest", "order": ["B"]}]}
    )


def printed(print_to: Callable[[Console], None], width: int = 90) -> list[str]:
    """What is printed but for claims of `any`, with the lines of data as `file:*` two spaces after the rest."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    print_to(console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if len(line.rstrip()) > width] == []
    lines = [re.sub(r"\.yaml:\d+", ".yaml:*", line).rstrip() for line in lines]
    lines = [re.sub(r"(?<=\S) {2,}(\w+\.yaml:\*)", r"  \1", line) for line in lines]
    return [line for line in lines if not re.search(r" any  backends\.yaml:\*$", line)]


def test_a_backend_with_all_that_its_row_says(registry: Registry) -> None:
    assert printed(lambda console: print_backend(registry, registry.backends["A"], console)) == [
        "A   s",
        "  experimental · knowledge only: no kernel module  backends.yaml:*",
        "  as measured",
        "  source s:p#q",
        "",
        "  needs packages  lib>=2  backends.yaml:*",
        "  needs flags     fast  backends.yaml:*",
        "  platforms       gpu  backends.yaml:*",
        "  attention       mha  backends.yaml:*",
        "  kv_dtypes       auto  backends.yaml:*",
        "  features        sinks  backends.yaml:*",
        "  emulates        alibi: by a bias  backends.yaml:*",
        "  refuses         not [yet] [head_size 64]  backends.yaml:*",
        "",
        "orders  1. in gpu/all",
    ]


def test_variants_are_shown_with_their_conditions(registry: Registry) -> None:
    lines = printed(lambda console: print_backend(registry, registry.backends["B"], console))
    assert lines[4] == "▸ NEW   when arch g2  backends.yaml:*"
    assert "▸ OLD  backends.yaml:*" in lines
    assert [line.split()[:2] for line in lines if line.startswith("  features")] == [["features", "none"]] * 2
    assert lines[-1] == "orders  2. in gpu/all, 1. in gpu/rest"


def test_a_module_is_shown_with_its_contract_and_its_options(registry: Registry) -> None:
    lines = printed(lambda console: print_backend(registry, registry.backends["LATE"], console))
    assert lines[1:4] == [
        "  stable · attnreg.kernels.late · contract 1  backends.yaml:*",
        "  only on request: it is slow",
        "  options tile 64, fused true",
    ]
    found = backend_dict(registry, registry.backends["LATE"])
    assert (found["contract"], found["options"]) == (1, {"tile": 64, "fused": True})


def test_backends_are_listed_with_the_orders_of_their_platforms(registry: Registry) -> None:
    gpu = [Platform(platform="gpu", arch="g1")]
    assert [r.name for r in backends_on(registry, gpu)] == ["A", "B"]
    assert [r.name for r in backends_on(registry, [])] == ["A", "B", "LATE"]
    lines = [" ".join(line.split()) for line in printed(lambda console: print_backends(registry, gpu, console))]
    assert lines[0] == f"registry {registry.title}"
    assert [line for line in lines[1:] if line and "─" not in line] == [
        "backend attention platforms run by what it is",
        "A mha gpu – s (experimental)",
        "B mha gpu – s",
        "–: knowledge only; 2 of 2 rows have no kernel module: they can be explained, not run",
        "gpu/all arch g1 priorities.yaml:*",
        "1 A if role target → 2 B",
        "gpu/rest priorities.yaml:*",
        "1 B",
    ]


def test_a_backend_as_json_has_the_words_of_its_row(registry: Registry) -> None:
    data = backend_dict(registry, registry.backends["A"])
    (variant,) = data["variants"]
    assert (data["name"], data["status"], data["platforms"], data["notes"]) == (
        "A",
        "experimental",
        ["gpu"],
        ["as measured"],
    )
    assert variant["requires"] == "package lib>=2 and flag fast"
    assert (variant["features"], variant["emulated"]) == (["sinks"], {"alibi": "by a bias"})
    assert [rule["reject"] for rule in variant["rules"]] == ["not [yet]"]


def test_json_of_a_backend_has_the_packed_formats_that_it_claims(default: Registry) -> None:
    formats = {f["name"]: f for f in backend_dict(default, default.backends["TURBOQUANT"])["packed_formats"]}
    assert list(formats)[:2] == ["turboquant_k8v4", "turboquant_4bit_nc"]
    assert formats["turboquant_4bit_nc"] == {
        "name": "turboquant_4bit_nc",
        "keys": {"bits": 4, "rotation": "hadamard", "scale": "norm", "group": 0},
        "values": {"bits": 4, "rotation": "none", "scale": "none", "group": 0},
        "head_size": 128,
        "token_bytes": 134,
        "ratio": 3.821,
    }
    assert backend_dict(default, default.backends["TRITON_ATTN"])["packed_formats"] == []
