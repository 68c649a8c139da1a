"""Python takes the names that the shell takes: products, models, registries and PyTorch's dtypes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest, ConfigError, Platform, RequestError

REQUEST = AttentionRequest(head_size=128)


@pytest.mark.parametrize(
    "platform",
    [
        Platform("H100"),
        Platform("nvidia h100 80gb hbm3"),
        Platform("cuda", "H100"),
        Platform(platform="cuda", arch="h100"),
        Platform(arch="sm90", device="H100"),
        "h100",
    ],
    ids=repr,
)
def test_a_product_names_its_platform(platform: Any) -> None:
    found = attnreg.select(REQUEST, platform).platform
    assert found == Platform(platform="cuda", arch="sm90", device="H100")


def test_an_architecture_names_its_platform() -> None:
    for platform in (Platform("sm90"), Platform("cuda", "sm90"), Platform(arch="9.0"), "sm90"):
        assert attnreg.select(REQUEST, platform).platform == Platform(platform="cuda", arch="sm90")


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("cuda", "cuda is a platform, and none of its architectures is named; name one of sm70, "),
        ("H1000", "arch names 'H1000', which default@"),
        (Platform("rocm", "h100"), "arch is sm90, which belongs to platform cuda, not rocm"),
        (Platform("cdua", "h100"), "platform names 'cdua', which default@"),
    ],
)
def test_what_names_no_platform_is_refused(platform: Any, message: str) -> None:
    with pytest.raises(RequestError) as e:
        attnreg.select(REQUEST, platform)
    assert str(e.value).startswith(message)
    with pytest.raises(RequestError, match="a platform has an architecture"):
        Platform()


def test_a_registry_is_named_as_in_the_shell() -> None:
    for name, whole in (("vllm-0.33", "vllm-0.33.0"), ("vllm", "vllm-0.33.0"), ("sglang", "sglang-0.5.23")):
        one, other = (attnreg.select(REQUEST, "H100", name) for _ in range(2))
        assert one.registry.name == whole
        assert one.registry is other.registry
    with pytest.raises(RequestError, match="registry is 'vlm'; no bundled registry has that name"):
        attnreg.select(REQUEST, "H100", "vlm")


def test_a_model_is_named_as_in_the_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    config = (ROOT / "examples/configs/gpt-oss-20b/config.json").read_text(encoding="utf-8")
    snapshot = tmp_path / "models--acme--small" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(config, encoding="utf-8")
    named = [attnreg.requests_from_model(name) for name in ("acme/small", "gpt-oss-20b")]
    assert named[0].layers == named[1].layers
    assert attnreg.plan("gpt-oss-20b", "H100", "vllm").starts
    with pytest.raises(ConfigError, match=r"gpt-oss-2b: no such file, .*did you mean `gpt-oss-20b`"):
        attnreg.requests_from_model("gpt-oss-2b")


def test_dtypes_of_torch_are_words() -> None:
    torch = ModuleType("torch")

    class dtype:  # noqa: N801 - torch's own name
        def __init__(self, name: str) -> None:
            self.name = name

        def __repr__(self) -> str:
            return f"torch.{self.name}"

    dtype.__module__, dtype.__qualname__ = torch.__name__, "dtype"
    asked: Any = dtype("float32")
    cache: Any = dtype("float8_e4m3fn")
    request = AttentionRequest(head_size=128, dtype=asked, kv_dtype=cache)
    assert (request.dtype, request.kv_dtype) == ("float32", "fp8_e4m3")
    assert attnreg.requests_from_model("gpt-oss-20b", dtype=asked).dtype == "float32"


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Atention'; did you mean `Attention`"):
        attnreg.Atention  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(attnreg, "__wrapped__")
    assert "attnreg" in sys.modules
