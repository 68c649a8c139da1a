"""What a page costs its reader in a browser: paints, blocked time, layout shift, bytes, and axe-core's findings."""

from __future__ import annotations

import contextlib
import hashlib
import math
import tarfile
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from support import ROOT
from support.pages.browser import Browser

_AXE = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
# what a page loads after it has answered: Python, for questions about a file
LATER = "/data/python/"


class Profile(NamedTuple):
    """A window, and how much slower than here its processor and its network are; ``kbit`` 0: no limit."""

    name: str
    size: tuple[int, int]
    slowdown: int
    latency_ms: int
    kbit: int
    # of each figure: the values with a score of 0.9 and of 0.5
    curves: Mapping[str, tuple[float, float]]


class Look(NamedTuple):
    """A page to measure: its name, its path, and a script's body that is true once it shows its answer."""

    name: str
    path: str
    anchor: str = ""
    ready: str = "return true"


# the limits and the curves of Lighthouse 12.8, without its speed index
_PHONE = {"first paint ms": (1800, 3000), "largest paint ms": (2500, 4000), "blocked ms": (200, 600)}
_DESK = {"first paint ms": (934, 1600), "largest paint ms": (1200, 2400), "blocked ms": (150, 350)}
_SHIFT = {"layout shift": (0.1, 0.25)}
_WEIGHTS = {"first paint ms": 10, "largest paint ms": 25, "blocked ms": 30, "layout shift": 25}
PROFILES = (
    Profile("desktop, 10 Mbit/s", (1280, 900), 1, 40, 10_240, _DESK | _SHIFT),
    Profile("phone, 1.6 Mbit/s", (390, 844), 4, 150, 1_638, _PHONE | _SHIFT),
    Profile("phone, no limit", (390, 844), 4, 0, 0, _PHONE | _SHIFT),
)
_QUESTION = "registry=vllm-0.33.0&arch=sm90"
LOOKS = (
    Look("landing", "index.html"),
    Look("picker", "pick.html", f"#{_QUESTION}&model=gpt-oss-120b", "return document.body.dataset.answered"),
    Look("grid", "grid.html", f"#{_QUESTION}", "return document.body.dataset.drawn"),
    Look("model", "models/gpt-oss-120b.html"),
    Look("backend", "vllm-0.33.0/backends/FLASH_ATTN.html"),
    Look("architecture", "vllm-0.33.0/architectures/sm90.html"),
    Look("speed guide", "guides/speed.html"),
)
_OBSERVE = """
const seen = (window.seen = { first: 0, largest: 0, long: [], shift: 0 });
const watch = (type, take) => new PerformanceObserver((list) => list.getEntries().forEach(take)).observe({ type, buffered: true });
watch("paint", (e) => { if (e.name === "first-contentful-paint") seen.first = e.startTime; });
watch("largest-contentful-paint", (e) => { seen.largest = e.startTime; });
watch("longtask", (e) => { seen.long.push([e.startTime, e.duration]); });
watch("layout-shift", (e) => { if (!e.hadRecentInput) seen.shift += e.value; });
"""  # noqa: E501
# a part of a second without a task after the answer, so that what the page still does is seen
_SETTLED = "return document.fonts.ready.then(() => new Promise((done) => setTimeout(() => done(window.seen), 800)));"


def axe_file() -> Path | None:
    """The archive of axe-core that `make test-site` fetched; None if there is none."""
    return next(iter(sorted((ROOT / ".cache").glob("axe-core-*.tgz"), reverse=True)), None)


def axe_script(archive: Path) -> str:
    """The script of axe-core in its archive. Raises ValueError for another version than the one that tests know."""
    with tarfile.open(archive) as files:
        member = files.extractfile("package/axe.min.js")
        script = member.read() if member else b""
    if hashlib.sha256(script).hexdigest() != _AXE:
        raise ValueError(f"{archive} is not the axe-core of the tests")
    return script.decode("utf-8")


def violations(browser: Browser, axe: str) -> list[tuple[str, Any]]:
    """What axe-core finds on the open page: for each element the rule that it breaks, and axe's words."""
    browser.page.evaluate(axe)
    found = browser.run("return axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    return [(rule["id"], node) for rule in found for node in rule["nodes"]]


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder on this machine, which does not compress."""

    class Quiet(SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A window that is closed ends its connections."""

    with Server(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def figures(browser: Browser, address: str, look: Look, profile: Profile) -> dict[str, float]:
    """What a page costs in a new window with an empty cache.

    Times are in ms from the start of the navigation. ``blocked ms`` is the part of each task over 50 ms after the first
    paint. ``layout shift`` is the sum of all. ``bytes`` are those on the wire until the page shows its answer, without
    what it loads later.
    """
    browser.scripts(True)
    browser.size(*profile.size)
    session = browser.context.new_cdp_session(browser.page)
    urls: dict[str, str] = {}
    sizes: dict[str, float] = {}
    session.on("Network.requestWillBeSent", lambda e: urls.update({e["requestId"]: e["request"]["url"]}))
    session.on("Network.loadingFinished", lambda e: sizes.update({e["requestId"]: e["encodedDataLength"]}))
    session.send("Network.enable")
    limit = profile.kbit * 1000 / 8 if profile.kbit else -1
    conditions = {"offline": False, "latency": profile.latency_ms}
    conditions |= {"downloadThroughput": limit, "uploadThroughput": limit}
    session.send("Network.emulateNetworkConditions", conditions)
    session.send("Emulation.setCPUThrottlingRate", {"rate": profile.slowdown})
    browser.page.add_init_script(_OBSERVE)
    browser.open(f"{address}/{look.path}", look.anchor)
    browser.wait(look.ready, seconds=60)
    browser.run("return document.fonts.ready.then(() => 1)")
    loaded = [size for request, size in sizes.items() if LATER not in urls.get(request, "")]
    seen = browser.run(_SETTLED)
    blocked = sum(max(0.0, took - 50) for begun, took in seen["long"] if begun + took > seen["first"])
    times = {"first paint ms": seen["first"], "largest paint ms": seen["largest"], "blocked ms": blocked}
    found = {name: float(round(value)) for name, value in times.items()}
    return found | {"layout shift": round(seen["shift"], 4), "bytes": sum(loaded), "requests": len(loaded)}


def score(found: Mapping[str, float], profile: Profile) -> int:
    """A number from 0 to 100 by the curves and weights of Lighthouse, without its speed index."""
    parts = {name: _on_curve(found[name], *profile.curves[name]) * weight for name, weight in _WEIGHTS.items()}
    return round(100 * sum(parts.values()) / sum(_WEIGHTS.values()))


def _on_curve(value: float, good: float, middle: float) -> float:
    """0.9 at ``good`` and 0.5 at ``middle``, between 0 and 1. Source: Lighthouse, shared/statistics.js."""
    if value <= 0:
        return 1.0
    # the place on a log-normal distribution; 0.906… is the inverse of erfc at one fifth
    return math.erfc(math.log(value / middle) * 0.9061938024368232 / math.log(middle / good)) / 2
