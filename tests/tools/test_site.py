"""The built site: links lead somewhere, nothing comes from elsewhere, everybody can read it, its facts are true."""

from __future__ import annotations

import hashlib
import itertools
import posixpath
import random
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml
from support import ROOT
from support.pages.site import Element, read_index, read_page, shown, without_collector
from support.registries.forged import record

from attnreg import Registry
from attnreg.compile.inputs.bundled import bundled_configs
from attnreg.errors import Location, RequestError
from attnreg.loader import bundled_registries, load_registry
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.models.reader import bundled_families
from attnreg.packages.records import Record
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection

Pages = Mapping[str, tuple[list[Element], list[str]]]
_MINISEARCH = "4e02b9fa52f244c377d737c7d06cda6bce967d137254e8532d6c79f68469bef3"


@pytest.fixture(scope="session")
def pages(built_site: Path) -> Pages:
    """Path of every page -> its elements, and what is wrong with their nesting."""
    files = sorted(built_site.rglob("*.html"))
    with without_collector():
        return {str(file.relative_to(built_site)): read_page(file.read_text(encoding="utf-8")) for file in files}


# whole ---------------------------------------------------------------------------------------------------------------


def test_everything_has_a_page(built_site: Path) -> None:
    wanted = {"index.html", "registries.html", "measured.html", "models/index.html", "guides/index.html"}
    for name in shown():
        registry = load_registry(name)
        wanted |= {f"files/{file}.html" for file in registry.files}
        vocabulary = registry.vocabulary
        wanted.add(f"{name}/index.html")
        wanted |= {f"{name}/backends/{row}.html" for row in registry.backends}
        wanted |= {f"{name}/architectures/{arch}.html" for arch in vocabulary.architectures}
        wanted |= {f"{name}/steps.html"} if registry.steps else set()
        if not registry.orders:
            # steps name a backend, and nothing says what it serves
            continue
        wanted.add(f"{name}/orders.html")
        wanted |= {f"{name}/features/{word}.html" for word in vocabulary.features}
        wanted |= {f"{name}/kv_dtypes/{word}.html" for word in vocabulary.words["kv_dtypes"]}
    wanted |= {f"families/{name}.html" for name in bundled_families()}
    wanted |= {f"models/{name}.html" for name in bundled_configs()}
    # each release to the next, and the first to the last, of which README tells
    releases = sorted(name for name in shown() if name.startswith("vllm-"))
    wanted |= {f"changes/{a}-to-{b}.html" for a, b in [*itertools.pairwise(releases), (releases[0], releases[-1])]}
    assert [path for path in sorted(wanted) if not (built_site / path).is_file()] == []


def test_elements_are_nested(pages: Pages) -> None:
    assert {path: problems for path, (_, problems) in pages.items() if problems} == {}


def test_links_lead_somewhere(built_site: Path, pages: Pages) -> None:
    """Every address that is not another host's is a file of the site, and its anchor is on that page."""
    anchors = {
        path: {e.attributes["id"] for e in elements if "id" in e.attributes} for path, (elements, _) in pages.items()
    }
    for path, (elements, _) in pages.items():
        # anchors of old pages in Markdown may be names
        anchors[path] |= {e.attributes["name"] for e in elements if e.tag == "a" and "name" in e.attributes}
    files = {file.relative_to(built_site).as_posix() for file in built_site.rglob("*") if file.is_file()}
    dead = []
    asked, grids = set(), set()
    for path, (elements, _) in pages.items():
        folder = posixpath.dirname(path)
        for target in {e.attributes[name] for e in elements for name in ("href", "src") if e.attributes.get(name)}:
            if re.match(r"https?://", target):
                continue
            file, _, anchor = target.partition("#")
            place = posixpath.normpath(posixpath.join(folder, file.partition("?")[0])) if file else path
            if place not in files:
                dead.append(f"{path}: {target}")
            elif place == "pick.html" and path != place:
                asked.add(anchor)
            elif place == "grid.html" and path != place:
                grids.add(anchor)
            elif anchor and place in anchors and anchor not in anchors[place]:
                dead.append(f"{path}: {target} has no such anchor")
    assert dead == []
    for state in filter(None, grids):
        cells = dict(parse_qsl(state, strict_parsing=True))
        assert cells["registry"] in shown()
        assert cells.get("model", "Qwen3-8B") in bundled_configs()
        assert cells.get("arch", "sm90") in load_registry(cells["registry"]).vocabulary.architectures
    # what is asked of the picker: one question for each model, and one for each architecture of each registry
    questions = [dict(parse_qsl(question, strict_parsing=True)) for question in asked if question]
    assert {q["model"] for q in questions if "model" in q} == set(bundled_configs())
    for name in shown():
        archs = {q["arch"] for q in questions if q["registry"] == name and "model" not in q}
        assert archs == set(load_registry(name).vocabulary.architectures)


def test_nothing_comes_from_elsewhere(built_site: Path, pages: Pages) -> None:
    """No page makes a browser ask another host for anything; only links that are followed may lead there."""
    asked = [
        f"{path}: {e.tag} {target}"
        for path, (elements, _) in pages.items()
        for e in elements
        for name, target in e.attributes.items()
        if e.tag != "a"
        and name != "xmlns"
        and not name.startswith(("content", "data-"))
        and re.match(r"(?:https?:)?//", target)
    ]
    assert asked == []
    for file in (*built_site.rglob("*.css"), *built_site.rglob("*.svg")):
        assert re.findall(r"(?:@import|url\()[^;)]*(?:https?:)?//", file.read_text(encoding="utf-8")) == [], file
    for file in (built_site / "assets").glob("s*.js"):
        assert re.findall(r"\bfetch\(|https?://|\beval\(", file.read_text(encoding="utf-8")[:200_000]) == [], file


def test_each_page_runs_the_sites_own_scripts_alone(pages: Pages) -> None:
    """Every page has the policy, and nothing inline that the policy would keep from working."""
    for path, (elements, _) in pages.items():
        policies = [e.attributes["content"] for e in elements if "http-equiv" in e.attributes]
        assert len(policies) == 1, path
        directives = dict(part.split(" ", 1) for part in policies[0].split("; "))
        assert directives["default-src"] == "'none'"
        assert "'unsafe-inline'" not in policies[0]
        inline = [e for e in elements if e.tag == "script" and "src" not in e.attributes]
        assert all(e.attributes.get("type") == "application/json" for e in inline), path
        assert not [e.tag for e in elements if e.tag == "style" or "style" in e.attributes], path
        assert not [name for e in elements for name in e.attributes if name.startswith("on")], path


def test_library_is_the_one_that_was_vendored(built_site: Path) -> None:
    assert hashlib.sha256((built_site / "assets/minisearch.js").read_bytes()).hexdigest() == _MINISEARCH
    assert "MIT" in (ROOT / "tools/docs_site/assets/minisearch.LICENSE.txt").read_text() or "Permission is hereby" in (
        ROOT / "tools/docs_site/assets/minisearch.LICENSE.txt"
    ).read_text(encoding="utf-8")


# for everybody -------------------------------------------------------------------------------------------------------


def test_pages_have_a_language_a_title_and_landmarks(pages: Pages) -> None:
    for path, (elements, _) in pages.items():
        tags = [e.tag for e in elements]
        assert next(e for e in elements if e.tag == "html").attributes.get("lang") == "en", path
        assert next(e for e in elements if e.tag == "title").text, path
        assert any(e.attributes.get("name") == "viewport" for e in elements if e.tag == "meta"), path
        assert (tags.count("main"), tags.count("h1")) == (1, 1), path
        ids = [e.attributes["id"] for e in elements if "id" in e.attributes]
        assert sorted(ids) == sorted(set(ids)), path
        regions = [e.attributes["aria-label"] for e in elements if e.attributes.get("role") == "region"]
        assert sorted(regions) == sorted(set(regions)), path


def test_headings_are_in_order(pages: Pages) -> None:
    wrong = []
    for path, (elements, _) in pages.items():
        levels = [int(e.tag[1]) for e in elements if re.fullmatch("h[1-6]", e.tag)]
        wrong += [path for before, after in zip([0, *levels], levels, strict=False) if after > before + 1]
    assert wrong == []


# what needs a name, whatever attributes it has
_USED = {"a", "button", "figcaption", "img", "input", "select", "summary", "svg", "textarea", "th"}


def test_everything_that_is_used_has_a_name(pages: Pages) -> None:
    """Controls have labels, pictures texts, links and buttons words; what scrolls is reached by keys."""
    wrong = []
    for path, (elements, _) in pages.items():
        labelled = {e.attributes.get("for") for e in elements if e.tag == "label"}
        ids = {e.attributes["id"] for e in elements if "id" in e.attributes}
        said = [x for x in elements if x.tag in ("title", "desc") and x.inside("svg") and x.text]
        for e in elements:
            given = e.attributes
            if not given and e.tag not in _USED:
                continue
            named = given.get("aria-label") or given.get("aria-labelledby") or e.text or given.get("title")
            if e.tag in ("input", "select", "textarea") and given.get("type") != "hidden":
                wrong += [f"{path}: {e.tag}"] * (given.get("id") not in labelled and "aria-label" not in given)
            elif e.tag == "th":
                # a written table may have an empty corner
                wrong += [f"{path}: th"] * ("scope" not in given or not (named or path.startswith("guides/")))
            elif e.tag in ("button", "summary", "figcaption") or (e.tag == "a" and "href" in given):
                wrong += [f"{path}: {e.tag} {given}"] * (not named)
            elif e.tag == "img":
                wrong += [f"{path}: img {given}"] * (not given.get("alt"))
            elif e.tag == "svg" and given.get("aria-hidden") != "true" and not any(map(_is_told, e.above)):
                inside = [x for x in said if e in x.above]
                wrong += [f"{path}: svg"] * (given.get("role") != "img" or len(inside) < 2)
            elif "scroll" in given.get("class", "").split() or given.get("class") in ("yaml", "picture"):
                wrong += [f"{path}: {given}"] * (given.get("tabindex") != "0")
            refers = " ".join(given.get(name, "") for name in ("aria-labelledby", "aria-controls", "aria-describedby"))
            wrong += [f"{path}: no #{name}" for name in refers.split() if name not in ids]
    assert wrong == []


def _is_told(element: Element) -> bool:
    """Whether readers of the page aloud skip an element, or hear a text in its place: what is inside needs no name."""
    return element.attributes.get("aria-hidden") == "true" or element.attributes.get("role") == "img"


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(a: str, b: str) -> float:
    """The ratio of two colours. Source: WCAG 2.2, relative luminance and contrast ratio."""
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_colours_can_be_read(built_site: Path, mode: int) -> None:
    sheet = (built_site / "assets/tokens.css").read_text(encoding="utf-8")
    found = re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", sheet)
    colours = {name: values[mode] for name, *values in found}
    texts = ("fg", "muted", "accent", "good", "bad", "warn", "proven")
    pairs = [(text, ground, 4.5) for text in texts for ground in ("bg", "soft")]
    pairs += [(text, f"{text}-soft", 4.5) for text in ("good", "bad", "warn", "accent", "proven")]
    pairs += [(text, f"{ground}-soft", 4.5) for text in ("fg", "muted") for ground in ("good", "accent")]
    # the text of the main button
    pairs += [("bg", "accent", 4.5)]
    pairs += [(text, "warn-soft", 4.5) for text in ("fg", "accent", "muted")]
    # edges of what is typed into or pressed
    pairs += [("edge", "bg", 3.0), ("accent", "bg", 3.0)]
    low = {
        (a, b): round(_contrast(colours[a], colours[b]), 2)
        for a, b, least in pairs
        if _contrast(colours[a], colours[b]) < least
    }
    assert low == {}
    # no colour beside those of the table
    for file in built_site.rglob("assets/**/*.css"):
        used = set(re.findall(r"#[0-9a-f]{3,8}\b", file.read_text(encoding="utf-8")))
        assert used <= {value for _, *values in found for value in values}, file


# facts ---------------------------------------------------------------------------------------------------------------


def _cells(elements: list[Element], label: str) -> dict[str, list[str]]:
    """First cell -> the other cells of each row of a table."""
    inside = [e for e in elements if any(x.attributes.get("aria-label") == label for x in e.above)]
    rows = [e for e in inside if e.tag == "tr" and e.inside("tbody")]
    out = {}
    for row in rows:
        first, *rest = [e.text for e in inside if e.above and e.above[-1] is row and e.tag in ("th", "td")]
        out[first] = rest
    return out


def _said(selection: Selection) -> str:
    refused = selection.start is not None and selection.start.refusal is not None
    if selection.chosen:
        return selection.chosen.title
    if selection.silence:
        return "not stated"
    return "not known" if selection.unknown else "refused" if refused else "none"


def _of_release(elements: list[Element], registry: str) -> str:
    """The title of the table of a release, which those with the same answers share: ``vLLM 0.33.0, 0.32.0``."""
    engine, _, version = registry.rpartition("-")
    titles = [e.attributes["aria-label"] for e in elements if e.attributes.get("role") == "region"]
    [found] = [t for t in titles if t.lower().startswith(f"{engine} ") and version in re.split(r",? ", t)]
    return found


def test_backend_of_an_engine_without_orders_says_what_is_known(pages: Pages) -> None:
    elements, _ = pages["sglang-0.5.23/backends/fa3.html"]
    text = " ".join(e.text for e in elements if e.tag in ("p", "li", "dd"))
    assert "the registry states no claims of what this one serves" in text
    naming = _cells(elements, "Steps that name it")
    assert "_llama4_overrides" in naming
    # a kernel inside the backend of sparse attention has the same name
    assert not any("dsa_decode_backend" in cell for cells in naming.values() for cell in cells)
    assert "gpt-oss-120b" in _cells(elements, "Models")["sm90"][0]
    steps = pages["sglang-0.5.23/steps.html"][0]
    effects = [effect for step in load_registry("sglang-0.5.23").steps for effect in step.effects]
    assert sum(e.tag == "tr" and e.inside("tbody") for e in steps) == len(effects)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "DeepSeek-V3", "gemma-3-27b-it"])
@pytest.mark.parametrize("registry", shown())
def test_backends_of_a_model_are_those_that_are_selected(pages: Pages, name: str, registry: str) -> None:
    data = load_registry(registry)
    # as explain asks: with what the registry reads of the config, and by phase where the engine decides so
    questions = model_questions(str(bundled_configs()[name]), ModelOptions(), data).questions
    elements = pages[f"models/{name}.html"][0]
    rows = _cells(elements, "attnreg's own registry" if data.imports else _of_release(elements, registry))
    seen = set()
    for archs, answers in rows.items():
        for arch in (a for a in data.vocabulary.architectures.values() if re.search(rf"\b{a.name}\b", archs)):
            seen.add(arch.name)
            platform = Platform(platform=arch.platform, arch=arch.name)
            selections = [evaluate(q.request, platform, data) for q in questions if q.request]
            wanted = [_said(selection) for selection in selections]
            # what is no attention has no backend
            assert [answer.partition(" (")[0] for answer in answers if answer != "–"] == wanted
    assert seen == set(data.vocabulary.architectures)


@pytest.mark.parametrize("name", [name for name in bundled_registries(releases=False) if load_registry(name).orders])
def test_who_serves_what_is_what_selection_accepts(gen_docs: ModuleType, name: str) -> None:
    """Whatever request a named backend accepts on an architecture, its words are among those that the pages give it."""
    site = gen_docs.docs_site.Site(ROOT)
    # what an engine's start makes of a request is no claim of a backend
    registry = site.registries[name].selector
    places = site.serving(name).on
    chance = random.Random(17)
    kv_dtypes, features = list(registry.vocabulary.words["kv_dtypes"]), list(registry.vocabulary.features)
    accepted = 0
    for _ in range(3000):
        arch = chance.choice(list(registry.vocabulary.architectures.values()))
        flags = frozenset(f.name for f in registry.vocabulary.flags.values() if arch.platform in f.facts["platforms"])
        words = frozenset(chance.sample(features, chance.choice((0, 1, 1, 2))))
        row = chance.choice([r for r in registry.backends.values() if arch.platform in r.platforms])
        attention = chance.choice(sorted(row.attention))
        sizes = (
            {"head_size": chance.choice((64, 128, 256))}
            if attention == "mha"
            else {"head_size": 576, "head_size_v": 512}
        )
        kv_dtype = chance.choice(kv_dtypes)
        try:
            request = AttentionRequest(attention=attention, kv_dtype=kv_dtype, features=words, **sizes)
        except RequestError:
            continue
        chosen = evaluate(
            request, Platform(platform=arch.platform, arch=arch.name, flags=flags), registry, row.name
        ).chosen
        if chosen is not None:
            accepted += 1
            place = next(p for p in places[arch.name] if p.title == chosen.title)
            assert place.takes("kv_dtype", kv_dtype)
            assert all(place.takes("features", word) for word in words)
    assert accepted > 50


def test_words_that_pages_give_a_backend_are_accepted(gen_docs: ModuleType) -> None:
    """For each word that a page says a variant serves on an architecture, some request with it is accepted there."""
    site = gen_docs.docs_site.Site(ROOT)
    serving = site.serving("default")
    for arch, row, facet, word in (
        ("gfx942", "ROCM_ATTN", "features", "sinks"),
        ("sm90", "FLASH_ATTN", "kv_dtype", "fp8"),
        ("sm120", "TRITON_ATTN", "kv_dtype", "fp8_e5m2"),
        ("sm90", "FLEX_ATTENTION", "features", "alibi"),
    ):
        assert any(place.takes(facet, word) for place in serving.on[arch] if place.row.name == row)
    # and what the data refuse is not among them
    assert not any(p.takes("kv_dtype", "fp8_e4m3") for p in serving.on["sm80"] if p.row.name == "FLASH_ATTN")


def test_index_has_the_words_of_each_page(built_site: Path) -> None:
    index = read_index(built_site)
    texts: dict[str, str] = {}
    for page, _, heading, words in index["sections"]:
        path, title, _ = index["pages"][page]
        texts[path] = f"{texts.get(path, '')} {title} {heading} {words}".lower()
    for path, wanted in {
        "default/architectures/gfx942.html": ("gfx942", "sinks", "mi300x"),
        "default/features/sinks.html": ("gfx942", "sinks"),
        "models/gpt-oss-120b.html": ("h100", "gpt-oss-120b"),
        "default/kv_dtypes/fp8_e5m2.html": ("fp8_e5m2",),
    }.items():
        assert [word for word in wanted if word not in texts[path].split()] == []
    assert not any(path.startswith("files/") for path, _, _ in index["pages"])
    # of an older release the words of the title alone
    assert texts["vllm-0.20.0/backends/FLASH_ATTN.html"].split() == ["flash_attn", "vllm-0.20.0", "0.20.0"]


# building ------------------------------------------------------------------------------------------------------------


def test_folder_of_something_else_is_left_alone(
    gen_docs: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letter = tmp_path / "letter.txt"
    letter.write_text("dear", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        gen_docs.main(["--site", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"{tmp_path} holds files, and no earlier site; name an empty folder or a new one" in capsys.readouterr().err
    assert letter.read_text(encoding="utf-8") == "dear"
    with pytest.raises(SystemExit):
        gen_docs.main(["--site", str(letter)])
    assert f"{letter} is no folder" in capsys.readouterr().err


def test_two_pages_of_one_path_are_refused(gen_docs: ModuleType, tmp_path: Path) -> None:
    frame = gen_docs.docs_site.frame
    twice = [frame.Asset("a.txt", b""), frame.Asset("a.txt", b"")]
    with pytest.raises(ValueError, match=r"two pages of the site are a\.txt"):
        frame.Site(ROOT).write(tmp_path, twice)


def test_an_earlier_site_is_replaced(gen_docs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = gen_docs.docs_site
    folder = tmp_path / "site"
    for content in (b"one", b"two"):
        monkeypatch.setattr(package, "items", lambda site, c=content: [package.Asset(f"{c.decode()}.txt", c)])
        package.build(ROOT, folder)
    assert sorted(path.name for path in folder.glob("*.txt")) == ["two.txt"]


def test_example_workflow_builds_and_publishes_the_site() -> None:
    workflow = yaml.safe_load((ROOT / "examples/github-pages.yml").read_text(encoding="utf-8"))
    # YAML 1.1 reads the key `on` as true
    assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}
    build, deploy = workflow["jobs"]["build"]["steps"], workflow["jobs"]["deploy"]
    assert {"run": "make site"} in build
    [upload] = [step for step in build if "upload-pages-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == "build/site"
    assert f"--site {upload['with']['path']}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert deploy["needs"] == "build"
    assert workflow["permissions"]["pages"] == workflow["permissions"]["id-token"] == "write"


@pytest.mark.parametrize("name", ["path", "evidence", "speed"])
def test_pictures_of_readme_describe_themselves_and_bring_their_colours(name: str) -> None:
    text = (ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8")
    elements, problems = read_page(text)
    assert problems == []
    assert elements[0].attributes["role"] == "img"
    assert all(next(e for e in elements if e.tag == tag).text for tag in ("title", "desc"))
    used = set(re.findall(r"var\((--[a-z-]+)\)", text))
    light, dark = (set(re.findall(r"(--[a-z-]+):#", part)) for part in text.split("@media", 1))
    assert used <= light
    assert used <= dark


def test_heat_map_says_where_another_device_stood_in_and_counts_no_earlier_kernel(
    gen_docs: ModuleType, default: Registry
) -> None:
    site = gen_docs.docs_site

    def proof(title: str, where: str, *, earlier: bool = False) -> Any:
        result = record(title, None, 7, **{"for": where})["result"]
        return site.measured.Proof(Record(title, "NVIDIA H200", "cuda", result, Location("", 1, 1)), earlier)

    proofs = {
        "ROCM_ATTN": [proof("ROCM_ATTN", "rocm gfx942")],
        "TRITON_ATTN": [proof("TRITON_ATTN", "cuda sm90"), proof("TRITON_ATTN", "cuda sm90", earlier=True)],
        "TRITON_MLA": [proof("TRITON_MLA", "cuda sm90", earlier=True)],
    }
    picture = site.pictures.heat_map(default, proofs, SimpleNamespace(on=defaultdict(list)))
    description = next(e.text for e in read_page(str(picture))[0] if e.tag == "desc")
    assert "ROCM_ATTN for gfx942: 7 cases on NVIDIA H200 in its place" in description
    assert "TRITON_ATTN for sm90: 7 cases;" in f"{description.rstrip('.')};"
    assert "TRITON_MLA" not in description
    assert "TRITON_ATTN for gfx942" not in description
