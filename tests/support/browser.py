"""A headless Chromium, driven through ChromeDriver by the WebDriver protocol; no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-prefers-reduced-motion",
]
_START = 30.0


def missing() -> str:
    """Why there is no browser here; empty where there is one."""
    absent = [names[0] for names in (("chromium", "chrome"), ("chromedriver",)) if not any(map(shutil.which, names))]
    return f"{' and '.join(absent)} not installed (Debian: apt-get install chromium chromium-driver)" if absent else ""


class Browser:
    """A window of Chromium, with a profile of its own, that is closed at the end of a `with` statement."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        driver = shutil.which("chromedriver")
        assert driver
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._url = f"http://127.0.0.1:{port}"
        try:
            self._wait()
            flags = [*_FLAGS, f"--user-data-dir={self._profile.name}"]
            options = {"args": flags, "binary": shutil.which("chromium") or shutil.which("chrome")}
            # messages of the console, errors among them
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._url += f"/session/{session['sessionId']}"
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver."""
        with contextlib.suppress(OSError, RuntimeError):
            self._call("DELETE", "", None)
        self._driver.terminate()
        self._driver.wait(10)
        self._profile.cleanup()

    def open(self, page: str | Path, anchor: str = "") -> None:
        """Go to an address, or to a file."""
        url = page.as_uri() if isinstance(page, Path) else page
        self._call("POST", "/url", {"url": url + anchor})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script's body returns; a promise is awaited."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = 10.0) -> Any:
        """The value that a script's body returns, as soon as it is true. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not (value := self.run(script, *arguments)):
            if time.monotonic() > end:
                raise TimeoutError(f"not within {seconds} s: {script}")
            time.sleep(0.02)
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int = 900) -> None:
        """Let pages be so wide and high, in CSS pixels."""
        mobile = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def dark(self, on: bool) -> None:
        """Let the system prefer dark pages, or light ones."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def scripts(self, on: bool) -> None:
        """Let pages that are opened from now on run scripts, or none."""
        self.devtools("Emulation.setScriptExecutionDisabled", value=not on)

    def errors(self) -> list[str]:
        """The errors that pages reported since the last call."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self, file: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _wait(self) -> None:
        end = time.monotonic() + _START
        while True:
            try:
                if self._call("GET", "/status", None)["ready"]:
                    return
            except OSError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _call(self, method: str, path: str, data: Any) -> Any:
        body = None if data is None else json.dumps(data).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        # a proxy of the environment is not for this machine's own ports
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=600) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as e:
            value = json.load(e)["value"]
            raise RuntimeError(f"{value['error']}: {value['message'].splitlines()[0]}") from None
