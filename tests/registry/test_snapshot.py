"""registry/selections.yaml: what `attnreg check` says of data that was lost, and that the snapshot misses nothing."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest, Platform, Registry, RegistryError, Selection
from attnreg.analysis.check.findings import _selections, check
from attnreg.analysis.snapshot import moved_selections
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.compile.source.yaml_source import Document
from attnreg.selection.selector import evaluate

SNAPSHOT = ROOT / "registry/selections.yaml"


def changed(registry: Registry) -> Iterator[tuple[str, str, Registry]]:
    """What was lost or exchanged, its order, and the registry after it: each order, entry and pair of neighbours."""
    for platform, orders in registry.orders.items():
        for i, order in enumerate(orders):
            # a measured order is of one device, and `attnreg check` holds it to its samples
            if order.measured is not None:
                continue
            before, after, entries = orders[:i], orders[i + 1 :], order.entries
            variants = [(f"no {order.title}", (*before, *after))] if after else []
            for k, entry in enumerate(entries):
                left = (*entries[:k], *entries[k + 1 :])
                other = dataclasses.replace(order, entries=left)
                variants.append((f"{order.title} without {entry.backend}", (*before, other, *after)))
                if k:
                    swapped = (*entries[: k - 1], entry, entries[k - 1], *entries[k + 1 :])
                    other = dataclasses.replace(order, entries=swapped)
                    variants.append((f"{order.title}: {entry.backend} moved up", (*before, other, *after)))
            for what, changed_orders in variants:
                yield (
                    what,
                    order.title,
                    dataclasses.replace(registry, orders={**registry.orders, platform: changed_orders}),
                )


def asked(registry: Registry) -> dict[str, list[tuple[AttentionRequest, Platform, str | None]]]:
    """Order -> the snapshot's requests that it decides, with what they get."""
    found: dict[str, list[tuple[AttentionRequest, Platform, str | None]]] = {}
    for entry in Document(SNAPSHOT.read_text(encoding="utf-8"), "selections.yaml").data["selections"]:
        request = AttentionRequest.from_dict(entry["request"])
        for text in " ".join(entry["selected"].values()).split():
            arch, *flags = text.split("+")
            where = registry.vocabulary.architectures[arch].platform
            platform = Platform(platform=where, arch=arch, flags=frozenset(flags))
            selection = evaluate(request, platform, registry)
            assert selection.order is not None
            found.setdefault(selection.order.title, []).append((request, platform, title(selection)))
    return found


def title(selection: Selection) -> str | None:
    return selection.chosen.title if selection.chosen else None


@pytest.mark.slow(reason="evaluates the snapshot for each of 140 changed registries")
def test_every_loss_and_exchange_moves_a_selection_of_the_snapshot(default: Registry) -> None:
    """What the snapshot does not see changes no selection at all, as long as every package is installed."""
    requests = asked(default)
    # what another order decides stays as it is
    unseen = [
        (what, after)
        for what, order, after in changed(default)
        if all(title(evaluate(request, where, after)) == was for request, where, was in requests.get(order, []))
    ]
    # what stands behind HOPPER_ATTN over fp8 and for heads of 80 and 96 is chosen where packages are missing alone
    first = "cuda/hopper-fp8", "cuda/hopper-80", "cuda/hopper-96-decodes"
    behind = [what for what, _ in unseen if what.startswith(first)]
    assert len(behind) <= 15
    assert len(unseen) - len(behind) < 20
    space = Space([default])
    d = space.diagrams
    installed = d.conjoin(d.among(i, [v.class_of("")]) for i, v in enumerate(space.variables) if v.facet == "packages")

    def selections(registry: Registry) -> object:
        return d.ite(d.conjoin([space.possible, installed]), Model(space, registry).chosen(), d.terminal(None))

    expected = selections(default)
    lost = [what for what, after in unseen if selections(after) != expected]
    assert lost == [], lost


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the registry's own files."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("vocabulary", "backends", "priorities", "invariants", "selections"):
        shutil.copy(ROOT / f"registry/{name}.yaml", folder)
    if (ROOT / "registry/measurements").is_dir():
        shutil.copytree(ROOT / "registry/measurements", folder / "measurements")
    return folder


def moved(folder: Path) -> list[str]:
    """What a check says of the snapshot, without all else that it looks at."""
    return [str(f) for f in _selections(attnreg.load_registry(folder))]


@pytest.mark.slow(reason="evaluates the snapshot for changed orders")
def test_an_order_that_is_lost(copy: Path) -> None:
    file = copy / "priorities.yaml"
    text = file.read_text(encoding="utf-8")
    begin = text.index("  - name: blackwell-mha\n")
    file.write_text(text[:begin] + text[text.index("  # SM 9.0, as an H200", begin) :], encoding="utf-8")
    found = [str(f).replace(str(copy), "copy") for f in check(attnreg.load_registry(copy))]
    assert re.fullmatch(
        r"copy/selections\.yaml:\d+:7: moved-selection \[FLASHINFER/trtllm-gen, FLASH_ATTN/FA4\]: "
        r"\d+ selections of the snapshot move from FLASHINFER/trtllm-gen to "
        r"FLASH_ATTN/FA4, the first for head size 128 · bfloat16 · KV cache auto on sm100, sm103\n"
        r"  help: mend the data, or the snapshot where the move is meant",
        found[0],
    )
    assert all("snapshot" in f for f in found)


def test_a_claim_that_is_lost(copy: Path) -> None:
    file = copy / "backends.yaml"
    text = file.read_text(encoding="utf-8")
    claims = (
        "add: {features: [batch_invariant, sinks]}",
        "add: {features: [batch_invariant, fp8_query, per_head_quant_scales, sinks], kv_dtypes: [fp8, fp8_e4m3]}",
    )
    for claim in claims:
        assert text.count(claim) == 1
        text = text.replace(claim, claim.replace(", sinks", ""))
    file.write_text(text, encoding="utf-8")
    found = moved(copy)
    assert any("moves from FLASH_ATTN/FA3 to FLASH_ATTN/FA4-Hopper" in f for f in found)
    assert all("snapshot" in f for f in found)


def test_a_registry_without_a_snapshot_and_an_overlay_have_nothing_to_compare(copy: Path) -> None:
    overlay = {"choices": [{"when": {"arch": "sm90"}, "deny": "FLASH_ATTN"}]}
    assert list(_selections(attnreg.load_registry(copy, [overlay]))) == []
    (copy / "selections.yaml").unlink()
    assert moved(copy) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: expected a list under `selections`"),
        ("selections: {}\n", "1:1: expected a list under `selections`"),
        (
            "selections:\n  - request: {head_size: 128}\n",
            "2:5: expected a `request`, and under `selected` the platforms of each backend: 'selected'",
        ),
        (
            "selections:\n  - {request: {head_sizes: 128}, selected: {A: sm90}}\n",
            "2:5: expected a `request`, and under `selected` the platforms of each backend: unknown request field",
        ),
        ("selections:\n  - {request: {head_size: 128}, selected: {A: sm9}}\n", "2:47: unknown architecture 'sm9'"),
        ("selections:\n  - {request: {head_size: 128}, selected: {A: sm90+fast}}\n", "2:47: flags names 'fast'"),
        (
            "selections:\n  - {request: {head_size: 128, dtype: int7}, selected: {A: sm90}}\n",
            "2:60: dtype names 'int7'",
        ),
    ],
)
def test_what_is_no_snapshot_is_refused_with_its_place(default: Registry, text: str, message: str) -> None:
    with pytest.raises(RegistryError, match=re.escape(f"selections.yaml:{message}")):
        list(moved_selections(Document(text, "selections.yaml"), default))
