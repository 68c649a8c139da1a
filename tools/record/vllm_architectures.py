"""Records which architectures a release of vLLM or SGLang serves, and how: the file architectures.yaml of its registry.

    python tools/record/vllm_architectures.py --tree .cache/vllm-0.33.0 --out registry/engines/vllm-0.33.0
    python tools/record/vllm_architectures.py --tree .cache/vllm-0.32.0 --out registry/engines/vllm-0.32.0 \
        --extends registry/engines/vllm-0.33.0

The directory after `--tree` holds `vllm/` or `sglang/`. vLLM's own registry is imported on a simulated machine. Its own
function says whether its Transformers backend takes a class of transformers. SGLang's models name their classes in
`EntryClass`. These lines are read without an import, because its models need its kernels.

The classes of transformers are those of the installed version, in its mappings of `MAPPINGS`. What the Transformers
backend does once it builds a class is another question: `--built` names files that vllm_config.py recorded. A class of
theirs whose build ends in an error is `fails`; one that is built is `transformers`; any other is `unbuilt`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import importlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

# the mappings of transformers' auto classes whose classes are asked about
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)
UNCALLED = "a layer of it does not call transformers' attention"
# the text of an error of vLLM's Transformers backend, or its place where it has none -> the sentence about the class;
# the first that fits
FAILURES = (
    (r"Cannot resolve attention scaling expression", "it cannot read the scale of its attention"),
    (r"position_ids not found in the forward", "its decoder takes no position_ids"),
    (r"does not dispatch through the Transformers attention interface", UNCALLED),
    (
        r"^model_executor/models/transformers/moe\.py#recursive_replace$",
        "it reads the numbers of experts under other names",
    ),
)
# the words for how a class is served, and those that say something beside it
WORDS = ("native", "transformers", "unbuilt", "fails", "until", "plugin", "refused")
ABOUT = ("fails", "until", "plugin")


def candidates() -> list[str]:
    """The names of transformers' classes that are asked about, sorted."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: set[str] = set()
    for mapping in MAPPINGS:
        for value in getattr(auto, mapping, {}).values():
            found.update([value] if isinstance(value, str) else value)
    return sorted(found)


def of_vllm(tree: Path) -> tuple[dict[str, Any], list[str]]:
    """Architecture -> how vLLM serves it, and the suffixes between which it converts classes of one model."""
    import vllm_machine

    # extensions of earlier releases, and a package that they import
    vllm_machine.install(("vllm._C", "vllm._moe_C", "gguf"))
    vllm_machine.boot(tree, "sm90")
    logging.disable(logging.CRITICAL)
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    config: Any = importlib.import_module("vllm.config")
    models = registry.ModelRegistry
    own = {**registry._TRANSFORMERS_SUPPORTED_MODELS, **registry._TRANSFORMERS_BACKEND_MODELS}
    names: dict[str, Any] = {name: "transformers" if name in own else "native" for name in models.models}
    names |= {name: {"until": version} for name, version in registry._PREVIOUSLY_SUPPORTED_MODELS.items()}
    names |= {name: {"plugin": url} for name, url in registry._OOT_SUPPORTED_MODELS.items()}
    for name in candidates():
        asked = SimpleNamespace(
            hf_config=SimpleNamespace(auto_map=None), model_impl="auto", _get_transformers_backend_cls=lambda: "taken"
        )
        if name not in names or "until" in names[name]:
            taken = _quietly(models._try_resolve_transformers, name, asked) == "taken"
            names[name] = "unbuilt" if taken else names.get(name, "refused")
    return names, [suffix for suffix, _ in config.iter_architecture_defaults()]


def of_sglang(tree: Path) -> tuple[dict[str, Any], list[str]]:
    """Architecture -> how SGLang serves it; it converts no classes."""
    names: dict[str, Any] = {}
    for file in sorted((tree / "sglang" / "srt" / "models").glob("*.py")):
        names |= dict.fromkeys(_entry_classes(file.read_text(encoding="utf-8-sig")), "native")
    transformers: Any = importlib.import_module("transformers")
    for name in candidates():
        if name not in names:
            taken = _quietly(lambda name=name: getattr(transformers, name).is_backend_compatible())
            names[name] = "unbuilt" if taken is True else "refused"
    return names, []


def _quietly(function: Any, *arguments: Any) -> Any:
    """The result of a call; None if it raises, as it does for a class whose packages are missing."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _entry_classes(text: str) -> Iterator[str]:
    """The classes that a module of SGLang's models registers."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "EntryClass" for t in node.targets):
            items = node.value.elts if isinstance(node.value, ast.List | ast.Tuple) else [node.value]
            yield from (item.id for item in items if isinstance(item, ast.Name))


def built(files: Iterable[Path]) -> dict[str, Any]:
    """Architecture -> `transformers` where a recorded start built it, else what its error says of the class."""
    out: dict[str, Any] = {}
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            data = [json.loads(line) for line in lines]
        configs = {line["model"]: line["config"] for line in data if "config" in line}
        for line in data:
            if "out" not in line:
                continue
            name = (configs[line["in"]["model"]].get("architectures") or [""])[0]
            error = line["out"].get("error")
            text = (error["text"] or error["by"]) if error else ""
            why = next((words for pattern, words in FAILURES if re.search(pattern, text)), None)
            if why is not None:
                out[name] = {"fails": why}
            elif "layers" in line["out"]:
                out[name] = "transformers"
    return out


def read(folder: Path) -> dict[str, Any]:
    """The names in the architectures.yaml of a release, with those of the release that it extends."""
    data = yaml.safe_load((folder / "architectures.yaml").read_text())
    names = read(folder.parent / data["extends"]) if "extends" in data else {}
    for how, block in data["served"].items():
        for about, text in block.items() if isinstance(block, dict) else [("", block)]:
            names |= dict.fromkeys(text.split(), {how: about} if about else how)
    return {name: how for name, how in names.items() if how != "gone"}


def blocks(names: dict[str, Any], below: dict[str, Any]) -> Iterator[str]:
    """The lines of `served`: the names that differ from those of another release, by how they are served."""
    gone = dict.fromkeys(below.keys() - names.keys(), "gone")
    changed = {name: how for name, how in (names | gone).items() if below.get(name) != how}
    groups: dict[str, dict[str, list[str]]] = {}
    for name, how in sorted(changed.items(), key=lambda item: (item[0].casefold(), item[0])):
        [(word, about)] = how.items() if isinstance(how, dict) else [(how, "")]
        groups.setdefault(word, {}).setdefault(about, []).append(name)
    for word in (word for word in (*WORDS, "gone") if word in groups):
        by_about = groups[word]
        if word in ABOUT:
            yield f"  {word}:"
        for about, found in sorted(by_about.items()):
            indent = "    " if about else "  "
            yield f"{indent}{json.dumps(about)}: |" if about else f"{indent}{word}: |"
            yield from (f"{indent}  {name}" for name in found)


def main() -> None:
    """Write the file of one release."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="a directory that holds vllm/ or sglang/")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the release's registry")
    parser.add_argument("--extends", type=Path, help="the directory of a release: write the difference to it")
    parser.add_argument("--built", type=Path, action="append", default=[], help="starts recorded by vllm_config.py")
    given = parser.parse_args()
    engine = next((name for name in ("vllm", "sglang") if (given.tree / name).is_dir()), None)
    if engine is None:
        parser.error(f"{given.tree} holds neither vllm/ nor sglang/; unpack a wheel there, or name a working tree")
    warnings.simplefilter("ignore")
    names, suffixes = of_vllm(given.tree) if engine == "vllm" else of_sglang(given.tree)
    below = read(given.extends) if given.extends else {}
    known = built(given.built)
    # an older vLLM builds attention for such a class all the same, and what its layers run is not known
    uncalled = {name for name, how in known.items() if how == "transformers" and below.get(name) == {"fails": UNCALLED}}
    known |= dict.fromkeys(uncalled, "unbuilt")
    names = {name: known.get(name, how) if how in ("transformers", "unbuilt") else how for name, how in names.items()}
    version = importlib.import_module("transformers").__version__
    path = "vllm/model_executor/models/registry.py#_ModelRegistry.resolve_model_cls"
    source = f"vllm:{path}" if engine == "vllm" else "sglang:python/sglang/srt/models/registry.py#_ModelRegistry"
    head = [f"# Which architectures this release serves, and how. Made by tools/record/{Path(__file__).name}.", ""]
    head += [f"extends: {given.extends.name}"] if given.extends else []
    head += [f'source: "{source}"', f"asked: transformers {version}"]
    if suffixes and not given.extends:
        head += ["suffixes:", f"  [{', '.join(suffixes[:8])},", f"   {', '.join(suffixes[8:])}]"]
    lines = list(blocks(names, below))
    lines = [*head, "served:" if lines else "served: {}", *lines, ""]
    (given.out / "architectures.yaml").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
