"""NodeProcess: `logstore serve` in a process of its own, which can be killed, paused and restarted.

Every start uses the same command, so the same directory and the same port.  What the process writes
to stderr is added to one file for all its lives.

Thread rule: one thread controls a process; any thread may read `pid` and `running`.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["NodeProcess", "free_ports"]

HOST = "127.0.0.1"
START_TIMEOUT = 60.0  # s
LOG_SHOWN = 4000  # bytes of the log in an error


class NodeProcess:
    """One node: a command that prints a line of JSON when it is ready."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.number = number
        self.command = tuple(command)
        self.log = log
        self.starts = 0
        self.ready: dict[str, Any] = {}  # what the process wrote when it was ready
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    def __repr__(self) -> str:
        state = "down" if not self.running else "paused" if self._paused else "up"
        return f"<NodeProcess {self.number} {state}, {self.starts} starts>"

    @property
    def running(self) -> bool:
        """Whether there is a process, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def paused(self) -> bool:
        return self.running and self._paused

    @property
    def pid(self) -> int:
        assert self._process is not None, f"node {self.number} was not started"
        return self._process.pid

    def begin(self) -> None:
        """Start the process, and do not wait until it is ready."""
        assert not self.running, f"node {self.number} runs"
        self._release()
        self._paused = False
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )

    def await_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the process is ready; RuntimeError with its log if it ends or is late."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        # Read the descriptor itself: a buffered reader would hide bytes from select.
        descriptor = process.stdout.fileno()
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable = left > 0 and select.select([descriptor], [], [], left)[0]
            piece = os.read(descriptor, 65536) if readable else b""
            if not piece:
                why = "ended" if readable else f"is not ready after {timeout:g} s"
                raise RuntimeError(f"node {self.number} {why}\n{self.tail()}")
            line += piece
        self.ready = json.loads(line.splitlines()[0])

    def start(self, timeout: float = START_TIMEOUT) -> None:
        """Start the process, and wait until it is ready."""
        self.begin()
        self.await_ready(timeout)

    def kill(self) -> None:
        """SIGKILL the process; RuntimeError if it had ended by itself."""
        process = self._process
        assert process is not None, f"node {self.number} was not started"
        if process.poll() is not None:
            raise RuntimeError(
                f"node {self.number} ended by itself with {process.returncode}\n{self.tail()}"
            )
        process.kill()
        process.wait()
        self._release()

    def terminate(self, timeout: float = START_TIMEOUT) -> None:
        """SIGTERM the process, and wait for it; RuntimeError unless its exit status is 0."""
        self.signal(signal.SIGTERM)
        self.await_end(timeout)

    def await_end(self, timeout: float = START_TIMEOUT) -> None:
        """Wait for a process that was asked to end; RuntimeError unless its exit status is 0."""
        process = self._process
        assert process is not None
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"node {self.number} has not ended after {timeout:g} s\n{self.tail()}"
            ) from None
        self._release()
        if status != 0:
            raise RuntimeError(f"node {self.number} ended with {status}\n{self.tail()}")

    def pause(self) -> None:
        """SIGSTOP the process."""
        self.signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT the process."""
        self._paused = False
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to a process that runs."""
        process = self._process
        if process is None or process.poll() is not None:
            raise RuntimeError(f"node {self.number} does not run\n{self.tail()}")
        process.send_signal(number)

    def close(self) -> None:
        """End the process with SIGKILL if it runs, also a paused one."""
        if self.running:
            self.kill()
        self._release()

    def tail(self) -> str:
        """Return the end of the log."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-LOG_SHOWN:].decode(errors="replace")

    def _release(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


def free_ports(count: int) -> list[int]:
    """Return free ports that the kernel does not give to outgoing connections.

    A node listens on its port again after a restart.  If the port were one of those, a client that
    connects while the node is down could get it, and would connect to itself.
    """
    first = 1024
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        ephemeral = 32768
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            listener = socket.socket()
            try:
                listener.bind((HOST, random.randrange(max(first, ephemeral - 20_000), ephemeral)))
            except OSError:
                listener.close()
                continue
            held.append(listener)
        return [listener.getsockname()[1] for listener in held]
    finally:
        for listener in held:
            listener.close()
