"""The facet `device`: devices of one architecture that get different backends, in selection, analysis and commands."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.registries import tiny

import attnreg
from attnreg import AttentionRequest, Platform, Registry, RegistryError, RequestError, select
from attnreg.analysis.check.findings import check
from attnreg.analysis.diff import diff
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.cli.commands import main
from attnreg.selection.remedies import remedy
from attnreg.selection.selector import evaluate

DEVICES: dict[str, Any] = {
    "facets": {
        **tiny.VOCABULARY["facets"],
        "device": {"of": "platform", "kind": "word", "words": "devices", "legend": "l"},
    },
    "words": {
        **tiny.VOCABULARY["words"],
        "devices": {
            name: {"arch": arch, "legend": "l"} for name, arch in (("big", "g1"), ("small", "g1"), ("x", "g2"))
        },
    },
}
ROWS = {"A": tiny.row(), "B": tiny.row()}
ORDERS = {"gpu": [{"name": "small", "when": {"device": "small"}, "order": ["B"]}, {"name": "all", "order": ["A"]}]}
LAYER = AttentionRequest(head_size=64)
OVERLAY = """
orders:
  cuda:
    - {name: h20, when: {attention: mha, device: H20}, order: [TRITON_ATTN], because: of the test}
"""


def registry(orders: dict[str, Any] | None = None) -> Registry:
    return tiny.load(ROWS, orders or ORDERS, vocabulary=DEVICES)


def on(device: str | None, arch: str = "g1") -> Platform:
    return Platform(platform="gpu", arch=arch, device=device)


def test_devices_of_one_architecture_are_told_apart() -> None:
    chosen = {device: select(LAYER, on(device), registry()).backend for device in (None, "big", "small")}
    assert {device: backend and backend.name for device, backend in chosen.items()} == {
        None: "A",
        "big": "A",
        "small": "B",
    }


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        (on("x"), "device is x, which is g2, not g1"),
        (on("tiny"), "device names 'tiny', which"),
    ],
)
def test_a_device_that_cannot_be(platform: Platform, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        select(LAYER, platform, registry())


def test_a_registry_without_devices_does_not_look_at_them() -> None:
    plain = tiny.load(ROWS)
    assert select(LAYER, on("small"), plain).backend == select(LAYER, on(None), plain).backend


def test_a_device_is_part_of_a_platform() -> None:
    platform = Platform(platform="cuda", arch="sm90", device="H20")
    assert platform != Platform(platform="cuda", arch="sm90")
    assert pickle.loads(pickle.dumps(platform)) == platform
    assert platform.to_dict()["device"] == "H20"
    assert "device" not in Platform(platform="cuda", arch="sm90").to_dict()
    with pytest.raises(RequestError, match="device is 5"):
        Platform(platform="cuda", arch="sm90", device=5)  # type: ignore[arg-type]


def test_the_model_of_a_selection_is_exact_about_devices() -> None:
    data = registry({"gpu": [
        {"name": "none", "when": {"device": None, "head_size": {"min": 5}}, "order": ["B"]},
        {"name": "some", "when": {"device": ["small", "x"]}, "order": ["B", "A"]},
        {"name": "all", "order": ["A"]},
    ]})  # fmt: skip
    space = Space([data])
    titles = Model(space, data).titles()
    for arch, devices in (("g1", (None, "big", "small")), ("g2", (None, "x"))):
        for device in devices:
            for size in (4, 5):
                request, platform = AttentionRequest(head_size=size), on(device, arch)
                backend = evaluate(request, platform, data).backend
                point = space.point(request, platform)
                assert space.diagrams.evaluate(titles, point) == (backend and backend.name), (arch, device, size)
    # a device of another architecture is no configuration
    assert space.diagrams.count(space.possible) < space.diagrams.count(space.diagrams.true)
    request, platform = space.example(space.point(LAYER, on("x", "g2")))
    assert (platform.arch, platform.device) == ("g2", "x")
    assert not [f for f in check(data) if f.code == "unreachable-order"]


def test_a_difference_names_the_device() -> None:
    (change,) = diff(registry({"gpu": [{"name": "all", "order": ["A"]}]}), registry()).changes
    assert (change.before, change.after, change.frame[:2]) == ("A", "B", (("arch", "g1"), ("device", "small")))
    assert diff(registry(), registry({"gpu": [{"name": "all", "order": ["A"]}]}), within={"device": ["big"]}).count == 0


def test_a_remedy_on_another_device() -> None:
    data = tiny.load({"A": tiny.row(requires={"device": "big"}), "B": tiny.row()}, vocabulary=DEVICES)
    selection = evaluate(LAYER, on("small"), data)
    assert selection.candidates[0].reasons[0].text == "device is small; needs big"
    found = remedy(selection, selection.candidates[0])
    assert found is not None
    assert found.text == "on big"


def test_a_device_word_needs_its_architecture() -> None:
    words = {**DEVICES["words"], "devices": {"big": {"arch": "g9", "legend": "l"}, "none": {"legend": "l"}}}
    with pytest.raises(RegistryError) as caught:
        tiny.load(ROWS, vocabulary={**DEVICES, "words": words})
    assert [p.message for p in caught.value.problems] == [
        "words.devices: a device has an architecture, got `g9`",
        "words.devices: a device has an architecture, got `null`",
    ]


def test_commands_take_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overlay = tmp_path / "h20.yaml"
    overlay.write_text(OVERLAY)
    asked = ["explain", "--head-size", "128", "--overlay", str(overlay), "--json"]
    assert main([*asked, "--device-name", "NVIDIA H20"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "--device-name" in data["command"]
    (selection,) = data["answers"][0]["selections"]
    assert (selection["backend"]["name"], selection["platform"]["device"]) == ("TRITON_ATTN", "H20")
    assert "sm90 (H20)" in data["title"]
    assert main([*asked, "--arch", "sm90"]) == 0
    assert json.loads(capsys.readouterr().out)["answers"][0]["selections"][0]["backend"]["name"] == "HOPPER_ATTN"
    assert main(["diff", "default", str(overlay), "--device-name", "H100", "--head-size", "128"]) == 0
    assert main(["diff", "default", str(overlay), "--device-name", "H20", "--head-size", "128"]) == 1
    lock = tmp_path / "lock"
    arguments = ["lock", "--overlay", str(overlay), "--head-size", "128", "-o", str(lock), "--device-name", "H20"]
    assert main(arguments) == 0
    assert main(["check", "--lock", str(lock)]) == 0
    assert main(["check", "--lock", str(lock), "--registry", "default"]) == 1
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device-name", "H201"], "unknown device 'H201'"),
        (["--device-name", "H20", "--arch", "sm80"], "--device-name H20 is sm90, and --arch names sm80"),
    ],
)
def test_a_device_name_that_cannot_be_meant(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--head-size", "128", *options]) == 2
    assert message in capsys.readouterr().err


def test_every_device_has_the_architecture_that_its_name_has(default: attnreg.Registry) -> None:
    vocabulary = default.vocabulary
    for name in vocabulary.words_of("device"):
        arch = vocabulary.architecture(name)
        assert arch is not None, name
        assert arch.name == vocabulary.arch_of(name)


def test_products_of_one_architecture_share_an_answer_and_keep_their_names(default: Registry) -> None:
    request = AttentionRequest(head_size=128)
    names = ("A10G", "RTX 3090", "sm86", "A10G")
    found = [select(request, Platform(name), registry=default) for name in names]
    assert [selection.platform.product for selection in found] == ["A10G", "RTX 3090", None, "A10G"]
    assert "RTX 3090" in str(found[1])
