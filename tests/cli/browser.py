"""A real Chromium without a window, driven through a pipe: no package needed, no port opened."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.kit import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 240.0  # seconds: a busy machine starts it slowly


def find() -> str | None:
    """The browser's command, if there is one here."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page.  Use it in a ``with``."""

    def __init__(
        self, command: str, profile: Path, *, width: int = 1280, height: int = 1000
    ) -> None:
        self._number = 0
        self._rest = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking"),
            *("--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
        ]
        # The browser uses descriptors 3 and 4; ours must not be among these before they are copied.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        copies = [
            (os.POSIX_SPAWN_DUP2, fd, target) for fd, target in zip(high, (3, 4), strict=True)
        ]
        line = [command, *options, "about:blank"]
        self._pid = os.posix_spawn(command, line, os.environ, file_actions=[*nothing, *copies],
                                   setsid=True)  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self.errors: list[str] = []
        self._session = ""
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise

    def _attach(self) -> None:
        targets = self._call("Target.getTargets")["targetInfos"]
        (page,) = [target for target in targets if target["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        """Return the errors that the page logged."""
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def go(self, url: str) -> None:
        """Load a page, and wait until its readyState is complete."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:500])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        wait_until(lambda: self.run(f"!!({condition})"), condition, patience=PATIENCE)

    def screenshot(self, path: Path, *, dark: bool = False) -> None:
        """A picture of the page as it is."""
        scheme = "dark" if dark else "light"
        self._call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
