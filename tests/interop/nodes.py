"""A cluster of real processes: a ZooKeeper and nodes of `logstore serve`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from .zookeeper import Ensemble

SESSION_MS = 2000
SETTINGS = (f"zookeeper.session.timeout.ms={SESSION_MS}", "default.replication.factor=3")
LONG = 120


class Nodes:
    """Nodes by number, running inside `with`."""

    def __init__(self, directory: Path, count: int = 3) -> None:
        self.directory = directory
        self.ensemble = Ensemble(directory / "zookeeper", 1)
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.addresses: dict[int, str] = {}
        self._count = count

    @property
    def zookeeper(self) -> str:
        return f"127.0.0.1:{self.ensemble.ports[1]}/cluster"

    @property
    def bootstrap(self) -> str:
        return ",".join(self.addresses[number] for number in self.processes)

    def __enter__(self) -> Self:
        self.ensemble.__enter__()
        try:
            for number in range(1, self._count + 1):
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for number in list(self.processes):
            self.kill(number)
        self.ensemble.__exit__()

    def start(self, number: int) -> None:
        """Start a node; one that was killed listens where it did."""
        settings = [word for each in SETTINGS for word in ("-c", each)]
        with (self.directory / f"{number}.txt").open("ab") as errors:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "logstore", "-s", str(self.directory / str(number))),
                    *("serve", "--node", str(number), "--zookeeper", self.zookeeper),
                    *("--listen", self.addresses.get(number, "127.0.0.1:0"), *settings),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.processes[number] = process
        assert process.stdout is not None
        late = threading.Timer(LONG, process.kill)
        late.start()
        line = process.stdout.readline()
        late.cancel()
        assert line, (self.directory / f"{number}.txt").read_text()
        self.addresses[number] = json.loads(line)["listeners"]["PLAINTEXT"]

    def kill(self, number: int) -> None:
        """SIGKILL a node."""
        process = self.processes.pop(number)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def command(self, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
        """Run `logstore cluster`, and return the rows that it prints."""
        line = (*map(str, arguments), "--zookeeper", self.zookeeper, "-o", "jsonl")
        ended = subprocess.run(
            [sys.executable, "-m", "logstore", "cluster", *line],
            capture_output=True, text=True, timeout=LONG, check=False,
        )  # fmt: skip
        assert ended.returncode == code, (arguments, ended)
        return [json.loads(row) for row in ended.stdout.splitlines()]
