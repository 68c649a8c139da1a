"""Any data is a registry, or is refused with typed errors; and any registry answers."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.registries.files import write
from support.registries.spoiling import paths, spoil
from support.suite.examples import examples

import attnreg

# an overlay that says something of everything
EVERYTHING: dict[str, Any] = {
    "vocabulary": {
        "features": {"new": "l"},
        "flags": {"slow": {"legend": "l", "platforms": ["gpu"]}},
        "packages": {"pkg": {"legend": "l", "import": "pkg", "distributions": ["p"]}},
        "words": {"kv_dtypes": {"int8": {"bits": 8, "legend": "l"}}},
        "architectures": {"gpu": {"g3": {"family": "f", "products": ["p"], "capability": "3.0", "series": "gpu"}}},
        "facets": {"mode": {"of": "request", "kind": "boolean", "legend": "l", "claim": "modes", "rows_below": "any"}},
        "derived": {
            "version": {
                "legend": "l",
                "cases": [{"when": {"arch": "g1"}, "value": 3}, {"value": 1}],
                "claim": "versions",
                "rows_below": "any",
            }
        },
        "retired_environment": {"OLD": {"engine": "e", "use": "u"}},
    },
    "sources": {"t": {"url": "u", "version": "1", "read": "2026-11-21"}},
    "backends": {
        "C": {
            "summary": "s",
            "status": "stable",
            "platforms": ["gpu"],
            "attention": "mha",
            "phase": ["any"],
            "requires": {"arch": {"min": "g1"}, "packages": ["lib>=3"]},
            "capabilities": {
                "dtypes": ["float16", "bfloat16"],
                "kv_dtypes": ["auto"],
                "head_sizes": [64, {"multiple_of": 8, "max": 256}],
                "head_sizes_v": ["same", 64],
                "block_sizes": "any",
                "num_heads": {"max": 128},
                "num_kv_heads": 1,
                "features": ["sinks"],
                "modes": True,
                "versions": [1, 3],
            },
            "emulated": {"alibi": "slow"},
            "unchecked": ["new"],
            "variants": [
                {
                    "name": "v",
                    "when": {"arch": "g1"},
                    "requires": {"flags": ["fast"]},
                    "capabilities": {
                        "add": {"features": ["alibi"], "kv_dtypes": ["fp8"], "head_sizes": [512]},
                        "remove": {"features": ["sinks"], "dtypes": ["float16"], "head_sizes": [64]},
                    },
                    "rules": [{"when": {"kv_dtype": "fp8*"}, "reject": "r", "facets": ["kv_dtype"], "source": "t:a#b"}],
                }
            ],
            "rules": [{"when": {"any": [{"head_size": 96}, {"not": {"without": ["sinks"]}}]}, "reject": "r"}],
            "only_on_request": "x",
            "source": "s:a#b",
        },
        "B": {"status": "experimental", "capabilities": {"add": {"dtypes": ["bfloat16"]}}},
    },
    "orders": {
        "gpu": [{"name": "mine", "when": {"role": "draft"}, "order": ["C", {"backend": "A", "if": {"arch": "g1"}}]}]
    },
    "place": [{"backend": "C", "before": "A", "orders": ["gpu/all"], "if": {"head_size": {"not": None}}}],
    "choices": [{"when": {"role": "draft"}, "prefer": "C"}, {"deny": ["B"]}, {"require": "A", "when": {"model": "x"}}],
    "invariants": [{"name": "i", "says": "s", "when": {"arch": "g1"}, "chosen": ["A", None], "while": "native"}],
}
WORDS = st.sampled_from(
    [
        *("A", "B", "C", "g1", "gpu", "sinks", "auto", "fp8*", "arch", "head_size", "packages", "flags", "lib>=2"),
        *("any", "not", "without", "only", "min", "max", "multiple_of", "add", "remove", "features", "when", "name"),
        *("", "*", "null", "a\nb", "\x1b", "é", "os.path", "s:a#b"),
    ]
)
VALUES: st.SearchStrategy[Any] = WORDS | st.sampled_from(
    [None, True, 0, 1, -1, 3, 64, 10**9, 10**30, 2.5, [], {}, [[]], {"a": 1}, [{}]]
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("small"))


def test_the_overlay_that_says_something_of_everything_is_right(small: Path) -> None:
    assert attnreg.load_registry(small, EVERYTHING | {"extends": str(small)}).name == f"{small.name}+overlay"


@examples(200)
@given(st.data())
def test_any_data_is_a_registry_or_a_refusal_and_any_registry_answers(small: Path, data: st.DataObject) -> None:
    overlay = copy.deepcopy(EVERYTHING | {"extends": str(small)})
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(overlay)))
        spoil(overlay, path, data.draw(st.none() | WORDS), copy.deepcopy(data.draw(VALUES)))
    try:
        registry = attnreg.load_registry(small, [overlay])
    except attnreg.RegistryError:
        return
    request = attnreg.AttentionRequest(head_size=64, kv_dtype="fp8", features=frozenset({"alibi"}), role="draft")
    for arch in ("g1", "g2"):
        with contextlib.suppress(attnreg.NoBackendError, attnreg.RequestError):
            attnreg.select(request, attnreg.Platform(platform="gpu", arch=arch, packages=(("lib", "3.1"),)), registry)
