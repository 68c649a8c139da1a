"""Reads Kubernetes manifests: the containers of each pod template, with the ConfigMaps of the same file.

A pod template may stand anywhere, so that Deployments, Jobs, LeaderWorkerSets, Dynamo's graphs and the objects of other
operators are all read alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attnreg.compile.source.yaml_source import Path_
from attnreg.engines.deploy.containers import Container, launches_in
from attnreg.engines.deploy.launch import EngineLaunch, GivenVariable, LaunchError
from attnreg.engines.deploy.places import PlacedWord, Text, Yaml
from attnreg.engines.deploy.shell.syntax import Budget
from attnreg.engines.deploy.words import mentions, read_words
from attnreg.errors import Problem

# labels of nodes that name the GPU
GPU_LABELS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")


# KServe's server of Hugging Face models: it runs vLLM with its options, unless `--backend` says otherwise
_SERVED = ("huggingface", "vllm")


def is_manifest(data: Mapping[str, Any]) -> bool:
    """Whether a document is an object of Kubernetes."""
    return "apiVersion" in data and "kind" in data


def of_manifests(documents: Sequence[Yaml], budget: Budget) -> list[EngineLaunch]:
    """The launches of all containers of some manifests. Raises `LaunchError`."""
    maps = dict(_config_maps(documents))
    files = {
        str(name): yaml.text("data", name)
        for yaml in maps.values()
        for name, value in yaml.value("data").items()
        if isinstance(value, str)
    }
    found: list[EngineLaunch] = []
    for yaml in documents:
        for pod, containers, around in _pods(yaml.data, ()):
            for path in containers:
                container = _container(yaml, pod, path, around, maps, files)
                # reading a value takes as long as several steps of a script
                budget.spend(8 * (len(container.variables) + len(container.words)))
                found += launches_in(container, budget)
        predictor = yaml.value("spec", "predictor")
        for key in ("model", "huggingface") if isinstance(predictor, Mapping) else ():
            if isinstance(predictor.get(key), Mapping):
                found += _served(yaml, ("spec", "predictor"), key, maps)
    return found


def _served(yaml: Yaml, predictor: Path_, key: str, maps: Mapping[str, Yaml]) -> Iterator[EngineLaunch]:
    """The launch of vLLM by a predictor of KServe's InferenceService (v1beta1 PredictorSpec), if it is one."""
    path = (*predictor, key)
    container = _container(yaml, predictor, path, (), maps, {})
    named = yaml.value(*path, "modelFormat", "name"), yaml.value(*path, "runtime") or ""
    if key == "model" and named[0] not in _SERVED and not any(name in str(named[1]) for name in _SERVED):
        return
    launch = EngineLaunch(yaml.key_at(*path), "vllm", arch=container.arch, notes=container.notes)
    launch.variables += [GivenVariable(name, word.text, word.where) for name, word in container.variables.items()]
    read_words(container.words, launch)
    of_server = {option.name: option for option in launch.options if option.name in ("--model-id", "--backend")}
    launch.options = [option for option in launch.options if option.name not in of_server]
    uri = yaml.value(*path, "storageUri")
    if "--model-id" in of_server:
        launch.named_model, launch.places["named_model"] = of_server["--model-id"].value, of_server["--model-id"].where
    elif isinstance(uri, str) and uri.startswith("hf://"):
        launch.named_model, launch.places["named_model"] = uri.removeprefix("hf://"), yaml.at(*path, "storageUri")
    if "--backend" not in of_server or of_server["--backend"].value in ("auto", "vllm"):
        yield launch


def _config_maps(documents: Sequence[Yaml]) -> Iterator[tuple[str, Yaml]]:
    """The name of each ConfigMap with its document; those without a name or without data are left out."""
    for yaml in documents:
        name = yaml.value("metadata", "name")
        if yaml.value("kind") == "ConfigMap" and isinstance(name, str) and isinstance(yaml.value("data"), Mapping):
            yield name, yaml


def _pods(value: Any, path: Path_) -> Iterator[tuple[Path_, list[Path_], Path_]]:
    """The path of each pod's specification, those of its containers, and that of the mapping around it."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from _pods(item, (*path, i))
    if not isinstance(value, Mapping):
        return
    containers: list[Path_] = []
    # an engine may be a sidecar, which is an init container that restarts
    for key in ("containers", "initContainers"):
        listed = value.get(key)
        containers += [(*path, key, i) for i in range(len(listed) if isinstance(listed, list) else 0)]
    # of Dynamo's graphs
    if isinstance(value.get("mainContainer"), Mapping):
        containers.append((*path, "mainContainer"))
    if containers:
        yield path, containers, path[:-1]
    for key, item in value.items():
        if (*path, key) not in containers and key not in ("containers", "initContainers"):
            yield from _pods(item, (*path, key))


def _container(
    yaml: Yaml, pod: Path_, path: Path_, around: Path_, maps: Mapping[str, Yaml], files: Mapping[str, Text]
) -> Container:
    command = _words(yaml, (*path, "command"))
    container = Container(yaml.at(*path), str(yaml.value(*path, "image") or ""), files=files)
    container.has_command = bool(command)
    container.words = [*command, *_words(yaml, (*path, "args"))]
    for place in ((*around, "envs"), (*path, "envFrom"), (*path, "env")):
        container.variables |= _variables(yaml, place, maps)
    products = _products(yaml, pod)
    if len(products) == 1:
        container.arch = products[0]
    elif products:
        container.notes.append(f"the pod may run on several GPUs: {', '.join(products)}")
    return container


def _words(yaml: Yaml, path: Path_) -> list[PlacedWord]:
    value = yaml.value(*path)
    if isinstance(value, str) and (mentions(value) or mentions(str(yaml.value(*path[:-1], "image")))):
        message = f"{path[-1]} is a text, and Kubernetes takes a list of words alone"
        raise LaunchError([Problem(yaml.at(*path), message, "write each word as an item of a list")])
    return [yaml.word(*path, i) for i in range(len(value))] if isinstance(value, list) else []


def _variables(yaml: Yaml, path: Path_, maps: Mapping[str, Yaml]) -> dict[str, PlacedWord]:
    """The variables of a list of `env` or `envFrom` whose values the file has."""
    found: dict[str, PlacedWord] = {}
    value = yaml.value(*path)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(item, Mapping):
            continue
        name = item.get("name")
        if isinstance(name, str) and "value" in item:
            found[name] = yaml.word(*path, i, "value")._replace(where=yaml.at(*path, i))
            continue
        if (source := maps.get(str(_of(item, "configMapRef", "name")))) is not None:
            prefix = str(item.get("prefix") or "")
            found |= {f"{prefix}{key}": source.word("data", key) for key in source.value("data")}
        reference = _of(item, "valueFrom", "configMapKeyRef")
        source, key = maps.get(str(_of(reference, "name"))), _of(reference, "key")
        if isinstance(name, str) and isinstance(key, str) and source is not None and key in source.value("data"):
            found[name] = source.word("data", key)
    return found


def _of(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _products(yaml: Yaml, pod: Path_) -> list[str]:
    """The GPUs that a pod's selector and its affinity allow."""
    selected = [yaml.value(*pod, "nodeSelector", label) for label in GPU_LABELS]
    found = [product for product in selected if isinstance(product, str)]
    affinity = yaml.value(*pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    terms = _of(affinity, "nodeSelectorTerms")
    for term in terms if isinstance(terms, list) else ():
        rules = _of(term, "matchExpressions")
        for rule in rules if isinstance(rules, list) else ():
            if _of(rule, "key") in GPU_LABELS and _of(rule, "operator") == "In":
                found += [str(value) for value in _of(rule, "values") or ()]
    # the device plugin marks a GPU that pods share
    return list(dict.fromkeys(product.removesuffix("-SHARED") for product in found))
