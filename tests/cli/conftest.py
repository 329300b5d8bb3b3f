"""The command, run in this process where a process adds nothing, and as a process where it does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import logstore
from logstore.cli import main

GOLDEN = Path(__file__).parent / "golden"
LONG = 240  # seconds: nothing here takes as long, but a busy machine may
NOON = 1_770_000_000_000  # 2026-02-02T02:40:00Z


class Result(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Command:
    """`command("topic", "ls")` runs it on the test's store; `code` is what it must end with."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self._monkeypatch = monkeypatch
        self._started: list[subprocess.Popen[bytes]] = []

    def __call__(self, *arguments: object, input: bytes = b"", code: int = 0) -> Result:
        out, err = io.BytesIO(), io.BytesIO()
        with self._monkeypatch.context() as patch:
            patch.setenv("LOGSTORE", str(self.store))
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
            patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8"))
            ended = main([str(argument) for argument in arguments])
            sys.stdout.flush()
            sys.stderr.flush()
            result = Result(ended, out.getvalue(), err.getvalue().decode())
        assert result.code == code, (arguments, result)
        return result

    def line(self, *arguments: object) -> list[str]:
        """The same as a command line for a process."""
        return [sys.executable, "-m", "logstore", "-s", str(self.store), *map(str, arguments)]

    def start(self, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
        settings = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        settings.setdefault("stderr", subprocess.PIPE)
        process = subprocess.Popen(self.line(*arguments), **settings)
        self._started.append(process)
        return process

    def end(self) -> None:
        """End every process that a failed test left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()

    def fill(self, topic: str = "orders", count: int = 3, partitions: int = 1) -> None:
        """A topic with records whose times are known."""
        with logstore.open(self.store) as store:
            made = store.create_topic(topic, partitions, config={"flush.ms": 60_000})
            for i in range(count):
                made.append(
                    b'{"n":%d}' % i, key=b"k%d" % i, headers=[("h", b"%d" % i)],
                    timestamp=NOON + i, partition=i % partitions, durability="os",
                )  # fmt: skip


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    made = Command(tmp_path / "data", monkeypatch)
    yield made
    made.end()


def golden(name: str, text: str) -> None:
    """Compare with a committed file; LOGSTORE_GOLDEN=write writes it again."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LOGSTORE_GOLDEN") == "write":
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"differs from {path}"


def on_a_terminal(line: list[str]) -> tuple[int, str]:
    """Run a command whose stdout is a terminal; its exit code and what it printed."""
    master, slave = pty.openpty()
    try:
        environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm", "NO_COLOR": "1"}
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        slave = -1
        read = b""
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                try:
                    piece = os.read(master, 65536)
                except OSError:
                    break  # the other side is closed
                if not piece:
                    break
                read += piece
        return process.wait(LONG), read.decode().replace("\r\n", "\n")
    finally:
        os.close(master)
        if slave >= 0:
            os.close(slave)
