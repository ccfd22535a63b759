"""A headless Chromium that a test drives over a pipe."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_S = 60.0
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


class Page:
    """A page of the browser.

    Attributes:
        requests: the URLs that it asked for, each as often as it did.
        refused: what its security policy refused, as the browser says it.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self.requests: list[str] = []
        self.refused: list[str] = []
        self._process, self._to, self._back = process, to, back
        self._number, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, object]:
        """Calls a method of the DevTools protocol."""
        self._number += 1
        sent = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            sent["sessionId"] = self._session
        os.write(self._to, json.dumps(sent).encode() + b"\0")
        while True:
            told = self._message()
            if told.get("id") == self._number:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            self._note(told)

    def run(self, script: str) -> object:
        """Returns the value of a JavaScript expression, awaited if it is a promise."""
        told = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    def wait(self, script: str, deadline_s: float = DEADLINE_S) -> object:
        """Waits until a JavaScript expression is true; returns its value."""
        end = time.monotonic() + deadline_s
        while not (value := self.run(f"!!({script})")):
            assert time.monotonic() < end, f"never true: {script}\n{self.text()}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        """Opens `url`, and waits until the page has shown what the server told."""
        self.call("Page.navigate", url=url)
        self.wait("location.href.startsWith('http') && document.body?.dataset.refreshed")

    def fill(self, field: str, value: str) -> None:
        """Types into a field."""
        self.run(
            f"byId({field!r}).value = {json.dumps(value)};"
            f"byId({field!r}).dispatchEvent(new Event('change'))"
        )

    def text(self) -> str:
        """All that the page shows."""
        return str(self.run("document.body.innerText"))

    def table(self, body: str) -> list[list[str]]:
        """The texts of the cells of a table's body."""
        return self.run(
            f"[...byId({body!r}).rows].map((row) => [...row.cells].map((one) => one.innerText))"
        )

    def screenshot(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Writes a picture of the page."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        told = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))

    def _note(self, told: dict[str, object]) -> None:
        params = told.get("params", {})
        if told["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif told["method"] == "Log.entryAdded":
            self.refused.append(params["entry"]["text"])

    def _message(self) -> dict[str, object]:
        end = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._back, 1 << 16)
            assert got, f"the browser ended: {self._process.poll()}"
            self._buffer += got
        one, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(one)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Starts the browser with a profile in `folder`; yields a page of it."""
    down_read, down_write = os.pipe()
    up_read, up_write = os.pipe()
    # It reads from descriptor 3 and writes to 4.
    ours = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (down_read, up_write)]
    command = f'exec "$@" 3<&{ours[0]} 4>&{ours[1]}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", BROWSER, *_FLAGS, f"--user-data-dir={folder}/profile"],
        pass_fds=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for one in (down_read, up_write, *ours):
        os.close(one)
    try:
        yield Page(process, down_write, up_read)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(down_write)
        os.close(up_read)
