"""A headless Chromium for tests: the system's, driven by playwright (`pip install 'attnreg[site-test]'`)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from support import ROOT

# Python for the pages, where `make .cache/python-in-browsers/ready` has put it
PYTHON = ROOT / ".cache/python-in-browsers/runtime.js"
# a question for the picker
MODEL = "#registry=default&arch=sm90&model=gpt-oss-120b"
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # pages of a disk may read the scripts beside them, as they may where nobody drives the browser
    "--allow-file-access-from-files",
]


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install 'attnreg[site-test]', or make test-site)"
    return "" if _chromium() else "chromium is not installed (Debian: apt-get install chromium)"


class Browser:
    """A window of Chromium with a profile of its own; `with` closes it. What pages report as errors is kept."""

    def __init__(self) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        try:
            self._browser = self._playwright.chromium.launch(executable_path=_chromium(), args=_FLAGS)
        except BaseException:
            self._playwright.stop()
            raise
        self._settings: dict[str, Any] = {"reduced_motion": "reduce"}
        self._errors: list[str] = []
        self._requests: list[str] = []
        self._open_context()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._browser.close()
        self._playwright.stop()

    @property
    def version(self) -> str:
        """The browser's version."""
        return self._browser.version

    def _open_context(self) -> None:
        self.context = self._browser.new_context(**self._settings)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self._errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self._errors.append(message.text))
        self.page.on("request", lambda request: self._requests.append(request.url))

    def open(self, page: str | Path, anchor: str = "") -> None:
        """Go to an address, or to a file."""
        url = page.as_uri() if isinstance(page, Path) else page
        # an address that differs in its fragment alone is no new page
        if self.page.url.partition("#")[0] == (url + anchor).partition("#")[0]:
            self.page.goto("about:blank")
        self.page.goto(url + anchor)

    def run(self, script: str, *arguments: Any, seconds: float = 120.0) -> Any:
        """The value that a script's body returns, which reads ``arguments``; a promise is awaited.

        Raises playwright's Error where the script does, and where its promise is not settled in ``seconds``.
        """
        # an error in a script's own callback leaves its promise open for ever
        body = """([given, seconds]) => {
          const value = (function () { %s }).apply(null, given);
          if (typeof value?.then !== "function") return value;
          const late = new Error(`the script's promise is not settled in ${seconds} s`);
          return Promise.race([value, new Promise((_, reject) => setTimeout(() => reject(late), seconds * 1000))]);
        }"""
        return self.page.evaluate(body.replace("%s", script), [list(arguments), seconds])

    def wait(self, script: str, *arguments: Any, seconds: float = 30.0) -> Any:
        """The value that a script's body returns, as soon as it is true. Raises playwright's TimeoutError."""
        body = f"given => (function () {{ {script} }}).apply(null, given)"
        return self.page.wait_for_function(body, arg=list(arguments), timeout=seconds * 1000).json_value()

    def size(self, width: int, height: int = 900) -> None:
        """Let pages be so wide and high, in CSS pixels."""
        self.page.set_viewport_size({"width": width, "height": height})

    def dark(self, on: bool) -> None:
        """Let the system prefer dark pages, or light ones."""
        self.page.emulate_media(color_scheme="dark" if on else "light")

    def printed(self, on: bool) -> None:
        """Lay pages out as for a printer, or for a screen."""
        self.page.emulate_media(media="print" if on else "screen")

    def scripts(self, on: bool) -> None:
        """Let pages run scripts, or none, in a new window; what a page kept is gone."""
        self.context.close()
        self._settings["java_script_enabled"] = on
        self._open_context()

    def errors(self) -> list[str]:
        """The errors that pages reported since the last call."""
        errors, self._errors[:] = self._errors[:], []
        return errors

    def requests(self) -> list[str]:
        """The addresses that pages loaded since the last call."""
        requests, self._requests[:] = self._requests[:], []
        return requests

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        self.page.screenshot(path=file, full_page=whole)


def opened(browser: Browser, folder: Path, anchor: str = "", page: str = "pick.html") -> None:
    """Open a page of the site anew, and wait for its first answer."""
    browser.open("about:blank")
    browser.open(folder / page, anchor)
    browser.wait("return document.body.dataset.answered", seconds=240)
