"""Other names for words: products of architectures, spellings of dtypes, engines' own names for flags."""

from __future__ import annotations

import pickle

import pytest

import attnreg
from attnreg import AttentionRequest, Platform, Registry, RegistryError, RequestError, bundled_registries
from attnreg.compile.inputs.bundled import help_for_registry
from attnreg.errors import did_you_mean

PRODUCTS = [
    (
        "sm90",
        [
            "h100",
            "H200",
            "GH200",
            "NVIDIA H100",
            "sm_90",
            "SM90",
            "9.0",
            "sm_90a",
            "compute_90",
            "9.0a",
            "grace hopper",
        ],
    ),
    ("sm80", ["a100", "A30", "8.0"]),
    ("sm86", ["A10G", "rtx 3090", "RTX3090", "a6000"]),
    ("sm89", ["l40s", "rtx 4090", "NVIDIA GeForce RTX 4090", "RTX 5000 Ada"]),
    ("sm100", ["b200", "GB200", "B100", "10.0", "sm_100f", "compute_100a"]),
    ("sm120", ["RTX 5090", "rtx-5090", "12.0", "rtx pro 6000"]),
    ("sm121", ["dgx spark", "GB10"]),
    ("gfx90a", ["mi250", "MI250X", "AMD Instinct MI210", "gfx90a:sramecc+:xnack-"]),
    ("gfx942", ["mi300x", "MI325X", "mi300a", "MI308"]),
    ("gfx950", ["mi355x"]),
    ("gfx1100", ["7900 xtx", "7900XTX", "Radeon RX 7900 XTX"]),
    ("gfx1201", ["rx 9070 xt"]),
]


# as nvidia-smi, rocm-smi, PyTorch and Intel's tools print them
PRINTED = {
    "sm70": ["Tesla V100-SXM2-32GB", "Tesla V100S-PCIE-32GB", "Tesla V100-DGXS-32GB", "NVIDIA TITAN V"],
    "sm75": ["Tesla T4", "NVIDIA GeForce RTX 2080 with Max-Q Design", "NVIDIA GeForce GTX 1660 Ti", "Quadro RTX 5000"],
    "sm80": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA A30"],
    "sm86": ["NVIDIA A10G", "NVIDIA A40", "NVIDIA RTX A2000 12GB", "NVIDIA GeForce RTX 3050 6GB Laptop GPU"],
    "sm87": ["Orin", "NVIDIA Jetson AGX Orin Developer Kit"],
    "sm89": [
        "NVIDIA L4", "NVIDIA L40S", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4070 Ti SUPER",
        "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 4000 SFF Ada Generation",
    ],
    "sm90": [
        "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", "NVIDIA GH200 480GB",
        "NVIDIA GH200 144G HBM3e", "NVIDIA H20-3e", "NVIDIA H800 PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me",
        "H100-SXM5",
    ],
    "sm100": ["NVIDIA B200", "NVIDIA GB200"],
    "sm103": ["NVIDIA B300 SXM6 AC", "NVIDIA GB300"],
    "sm110": ["NVIDIA Jetson AGX Thor", "NVIDIA Thor"],
    "sm120": [
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "NVIDIA RTX PRO 4000 Blackwell SFF Edition",
        "NVIDIA RTX PRO 5000 72GB Blackwell", "NVIDIA GeForce RTX 5090 D v2", "NVIDIA GeForce RTX 5090 Laptop GPU",
    ],
    "sm121": ["NVIDIA GB10"],
    "gfx90a": ["AMD Instinct MI210", "AMD Instinct MI250X/MI250", "AMD Instinct MI250X / MI250"],
    "gfx942": ["AMD Instinct MI300X OAM", "AMD Instinct MI300X VF", "AMD Instinct MI300A", "AMD Instinct MI325 OAM"],
    "gfx950": ["AMD Instinct MI350X", "AMD Instinct MI355X"],
    "gfx1100": ["AMD Radeon RX 7900 XTX", "AMD Radeon PRO W7900 Dual Slot", "AMD Radeon PRO W7800 48GB"],
    "gfx1201": ["AMD Radeon RX 9070 XT", "AMD Radeon AI PRO R9700"],
    "xe_hpc": ["Intel(R) Data Center GPU Max 1550"],
    "xe2": ["Intel(R) Arc(TM) B580 Graphics", "Intel(R) Arc(TM) Pro B60 Graphics"],
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_names_that_drivers_print_name_their_architecture(default: Registry, name: str) -> None:
    found = [default.vocabulary.architecture(other) for other in PRINTED[name]]
    assert [architecture and architecture.name for architecture in found] == [name] * len(PRINTED[name])


@pytest.mark.parametrize(("name", "others"), PRODUCTS, ids=[name for name, _ in PRODUCTS])
def test_products_and_compute_capabilities_name_their_architecture(
    default: Registry, name: str, others: list[str]
) -> None:
    found = [default.vocabulary.architecture(other) for other in others]
    assert [architecture and architecture.name for architecture in found] == [name] * len(others)


@pytest.mark.parametrize(
    "name",
    [
        *[
            "p100",
            "hopper",
            "rtx",
            "",
            "nvidia",
            "1.0",
            "cuda 12.0",
            "5090",
            "sm_9",
            "a",
            ":",
            "/",
            "80GB",
            "PCIe",
            "Ti",
        ],
        # other architectures, and products of another generation that are called alike
        *["sm_61", "gfx1030", "Tesla P100-PCIE-16GB", "NVIDIA GeForce GTX 1080 Ti", "AMD Radeon RX 6800 XT"],
        *["H100 Ada", "B200 Hopper", "A100 B200", "MI300X/MI355X", "RTX 6000", "RTX 6000 Blackwell", "H100 " * 9999],
    ],
    ids=lambda name: name[:40],
)
def test_what_is_no_name_of_one_architecture_names_none(default: Registry, name: str) -> None:
    assert default.vocabulary.architecture(name) is None


HELP = [
    ("arch", "h100", "h100 is `sm90` here"),
    ("arch", "H100-SXM5-80GB", "H100-SXM5-80GB is `sm90` here"),
    ("arch", "Hopper", "Hopper is `sm90` here"),
    ("arch", "grace-hopper-480GB", "grace-hopper-480GB is `sm90` here"),
    ("arch", "grace blackwell", "grace is `aarch64` here, blackwell is `sm100` or "),
    ("arch", "H100 80 GB", "H100 is `sm90` here"),
    ("arch", "5090", "5090 is `sm120` here"),
    ("arch", "6000", "6000 is `sm75` or `sm89` or `sm120` here"),
    ("arch", "sm_91a", "did you mean `sm90`"),
    # there are such, so that no other is meant
    ("arch", "sm_61", "no data here is about sm61; `attnreg list --archs` lists all 25"),
    ("arch", "7.2", "no data here is about sm72; `attnreg list --archs` lists all 25"),
    ("arch", "gfx1030", "no data here is about gfx1030; `attnreg list --archs` lists all 25"),
    ("arch", "gfx906:sramecc+:xnack-", "no data here is about gfx906; `attnreg list --archs` lists all 25"),
    ("arch", "gfx94", "did you mean `gfx942`"),
    ("arch", "ada", "ada is `sm89` here"),
    ("arch", "CDNA 3", "CDNA 3 is `gfx942` here"),
    ("arch", "blackwell", "blackwell is `sm100` or `sm103` or `sm110` or `sm120` or `sm121` here"),
    ("arch", "sm91", "did you mean `sm90`"),
    # not like sm100: a Pascal is no Blackwell
    ("arch", "p100", "`attnreg list --archs` lists all 25"),
    ("platform", "nvidia", "nvidia is `cuda` here"),
    ("platform", "AMD", "AMD is `rocm` here"),
    ("platform", "Cuda", "Cuda is `cuda` here"),
    ("dtype", "bf16", "bf16 is `bfloat16` here"),
    ("dtype", "FP16", "FP16 is `float16` here"),
    ("kv_dtype", "e4m3", "e4m3 is `fp8_e4m3` here"),
    ("kv_dtype", "fp8-e5m2", "fp8-e5m2 is `fp8_e5m2` here"),
    ("kv_dtype", "fp9", "did you mean `fp8`? (also: "),
    ("flags", "VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER is `aiter` here"),
    ("flags", "VLLM_ROCM_USE_AITER_MLA", "VLLM_ROCM_USE_AITER_MLA is `aiter_mla` here"),
    ("packages", "flashinfer", "flashinfer is `flashinfer-python` here"),
    ("packages", "amd-aiter", "amd-aiter is `aiter` here"),
    ("features", "Sliding-Window", "Sliding-Window is `sliding_window` here"),
    ("attention", "gqa", "gqa is `mha` here"),
]


@pytest.mark.parametrize(("facet", "word", "message"), HELP, ids=[word for _, word, _ in HELP])
def test_help_for_an_unknown_word(default: Registry, facet: str, word: str, message: str) -> None:
    assert default.vocabulary.help_for(facet, word).startswith(message)


def test_python_takes_the_words_of_a_request_alone_and_says_what_another_name_means(default: Registry) -> None:
    hopper = Platform(platform="cuda", arch="sm90")
    with pytest.raises(RequestError, match="does not know; bf16 is `bfloat16` here") as caught:
        attnreg.select(AttentionRequest(head_size=128, dtype="bf16"), hopper, default)
    assert caught.value.help == "bf16 is `bfloat16` here"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.message, copy.help) == (str(caught.value), caught.value.message, caught.value.help)


# of every engine all releases
OLDER = ", ".join(name for name in bundled_registries() if name.startswith("vllm-") and name != "vllm-0.33.0")
SGLANG = ", ".join(name for name in bundled_registries() if name.startswith("sglang-"))
VLLM = f"{OLDER} and vllm-0.33.0"
REGISTRIES = [
    ("vllm-0.34.0", f"there are {VLLM}; the nearest is `vllm-0.33.0`"),
    ("vllm-0.19", f"there are {VLLM}; the nearest is `vllm-0.20.0`"),
    ("vllm-9", f"there are {VLLM}; the nearest is `vllm-0.33.0`"),
    ("vllm-0.9.2", f"there are {VLLM}; the nearest is `vllm-0.20.0`"),
    ("vLLM==0.33.0", f"there are {VLLM}; the nearest is `vllm-0.33.0`"),
    ("vllm", f"there are {VLLM}"),
    ("vllm-0.33.0+atreg", "did you mean `vllm-0.33.0+attnreg`? (also: vllm-0.33.0)"),
    ("vllm-0.20.0+attnreg", f"there are {VLLM}; the nearest is `vllm-0.20.0`"),
    (
        "vlm-0.33.0",
        did_you_mean("vllm-0.33.0", bundled_registries()),
    ),
    (
        "sglang-0.5.13.post1",
        f"there are {' and '.join(SGLANG.rsplit(', ', 1))}; the nearest is `sglang-0.5.14`",
    ),
    (
        "sglang-0.5.24",
        f"there are {' and '.join(SGLANG.rsplit(', ', 1))}; the nearest is `sglang-0.5.23`",
    ),
    ("sglang-0.5", f"there are {' and '.join(SGLANG.rsplit(', ', 1))}; the nearest is `sglang-0.5.23`"),
    ("tensorrt", did_you_mean("tensorrt", bundled_registries())),
    (
        "defualt",
        did_you_mean("default", bundled_registries()),
    ),
]


@pytest.mark.parametrize(("name", "message"), REGISTRIES, ids=[name for name, _ in REGISTRIES])
def test_an_engine_is_told_its_versions(name: str, message: str) -> None:
    assert help_for_registry(name) == message


def test_an_architecture_without_data_is_no_word_of_a_condition(default: Registry) -> None:
    vocabulary = default.vocabulary
    found = vocabulary.architecture("Strix Halo")
    assert found is not None
    assert (found.name, found.platform, found.source is not None) == ("gfx1151", "rocm", True)
    assert vocabulary.product("AMD Radeon 8060S") == "8060S"
    assert "gfx1151" not in vocabulary.facets["arch"].known
    assert not {*vocabulary.unread} & {*vocabulary.architectures}
    overlay = {"choices": [{"deny": ["TRITON_ATTN"], "when": {"arch": "gfx1151"}}]}
    with pytest.raises(RegistryError, match="gfx1151 is under `unread`: no table has data for it"):
        attnreg.load_registry("default", overlay)
    given = {"vocabulary": {"architectures": {"rocm": {"gfx1151": {"family": "RDNA 3.5", "series": "rdna"}}}}}
    read = attnreg.load_registry("default", [given, overlay])
    assert "gfx1151" not in read.vocabulary.unread
    assert not read.silence("rocm", "gfx1151")
