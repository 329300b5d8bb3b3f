"""Kafka clients of other languages, with the methods of `tests.kafka.clients`.

Each language has a small program (go/, node/, java/Program.java).  The program makes producers and
consumers and calls their methods for the tests.  A request is a line: the number of the call, the
name of the method, the number of the object, and arguments.  An argument is "=" and base64, or "-"
for null.  The answer has the number of the call, "ok" or "error", and words of the same form.
Calls of different objects run at the same time, so one process serves all tests of a module.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
import subprocess
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import kafka

from logstore.kafka.server import KafkaServer
from tests.kafka.clients import TIMEOUT, Consuming, Got, Place, Producing, Sent

from .kafka import KafkaUnavailableError, cache_directory, client_jar_directory, made_once

HERE = Path(__file__).parent
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
       "-Dorg.slf4j.simpleLogger.defaultLogLevel=off")  # fmt: skip

Word = bytes | str | int | None


class RefusedError(kafka.errors.KafkaError):
    """The client of a program raised an error; the message is the text of that error."""


# ---- how a program is built ----


def _cached(name: str, sources: list[Path]) -> Path:
    """Return the directory of a program in the cache: another one for other sources."""
    digest = hashlib.sha256(b"".join(each.read_bytes() for each in sources)).hexdigest()
    return cache_directory() / f"{name}-{digest[:12]}"


def go() -> list[str]:
    """Return the command of the program for franz-go."""
    sources = [HERE / "go" / name for name in ("go.mod", "go.sum", "main.go")]
    build = ["go", "build", "-o", "made/program", "."]
    made = made_once(_cached("go", sources), sources, ["go", "mod", "download"], build)
    return [str(made / "program")]


def node() -> list[str]:
    """Return the command of the program for kafkajs."""
    sources = [HERE / "node" / name for name in ("package.json", "package-lock.json", "program.js")]
    fetch = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    copy = ["sh", "-c", "mkdir made && mv node_modules program.js made"]
    made = made_once(_cached("node", sources), sources, fetch, copy)
    return ["node", "--no-warnings", str(made / "program.js")]


def java(version: str) -> list[str]:
    """Return the command of the program for a version of the Java client."""
    if shutil.which("javac") is None:
        raise KafkaUnavailableError("javac is not installed")
    jars = f"{client_jar_directory(version)}/*"
    source = HERE / "java" / "Program.java"
    compiler = ["javac", "-nowarn", "-J-XX:TieredStopAtLevel=1", "-d", "made"]
    classes = made_once(
        _cached(f"java-{version}", [source]), [source], ["javac", "-version"],
        [*compiler, "-cp", jars, source.name],
    )  # fmt: skip
    return ["java", *JVM, "-cp", f"{classes}:{jars}", "Program"]


# The name of a client, and the command of its program.
PROGRAMS: dict[str, Callable[[], list[str]]] = {
    "franz-go": go,
    "kafkajs": node,
    **{
        f"java {version}": functools.partial(java, version)
        for version in ("3.9.1", "4.1.1", "4.3.1")
    },
}


# ---- a running program ----


class Program:
    """A process that holds clients, closed at the end of a `with` block.  Any thread may call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            PROGRAMS[name](), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # one line at a time; and the calls under way
        self._waiting: dict[int, Future[list[bytes | None]]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, target: int, *words: Word) -> list[bytes | None]:
        """Call a method of an object, or of the program itself if the target is 0."""
        future: Future[list[bytes | None]] = Future()
        texts = [each if each is None or isinstance(each, bytes) else str(each).encode()
                 for each in words]  # fmt: skip
        line = " ".join("-" if each is None else "=" + b64encode(each).decode() for each in texts)
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            assert self._process.stdin is not None
            self._process.stdin.write(f"{number} {method} {target} {line}".rstrip().encode())
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return future.result(TIMEOUT + 10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, status, *words = line.decode().split()
            found = [None if each == "-" else b64decode(each[1:]) for each in words]
            with self._lock:
                future = self._waiting.pop(int(number))
            if status == "ok":
                future.set_result(found)
            else:
                future.set_exception(RefusedError((found[0] or b"").decode()))
        with self._lock:
            for future in self._waiting.values():
                future.set_exception(RuntimeError(f"the program for {self.name} ended"))

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the program ends
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


# ---- the clients in it ----

ALL = ("range", "roundrobin", "sticky", "cooperative-sticky")


class Foreign:
    """A client of a program, for one server."""

    def __init__(self, program: Program, server: KafkaServer) -> None:
        self.program = program
        self.name = program.name
        self.assignors = ("roundrobin",) if program.name == "kafkajs" else ALL
        self.address = server.bootstrap_servers

    def producer(self, *, compression: str = "none", acks: int = -1, idempotence: bool = False,
                 transactional_id: str | None = None,
                 request_max_bytes: int = 1 << 20) -> Producing:  # fmt: skip
        [made] = self.program.call(
            "producer", 0, self.address, compression, acks, int(idempotence), transactional_id,
            request_max_bytes,
        )  # fmt: skip
        return _Producer(self.program, int(made or b""))

    def consumer(self, *topics: str, group: str | None = None, assignor: str = "range",
                 instance: str | None = None, isolation: str = "read_uncommitted",
                 start: str = "earliest") -> Consuming:  # fmt: skip
        [made] = self.program.call(
            "consumer", 0, self.address, group, assignor, instance, isolation, start, *topics
        )
        return _Consumer(self.program, int(made or b""))

    def admin(self, method: str, *words: Word) -> list[bytes | None]:
        """Call a method of an admin client."""
        return self.program.call("admin", 0, self.address, method, *words)


class _Producer:
    def __init__(self, program: Program, number: int) -> None:
        self.call: Callable[..., Any] = functools.partial(_call, program, number)
        self.rows: list[Word] = []

    def send(self, topic: str, sent: Sent, partition: int = 0) -> None:
        self.rows += [topic, partition, sent.timestamp, sent.value, sent.key, len(sent.headers)]
        self.rows += itertools.chain.from_iterable(sent.headers)

    def flush(self) -> None:
        rows, self.rows = self.rows, []
        self.call("flush", *rows)

    def begin(self) -> None:
        self.call("begin")

    def commit(self) -> None:
        self.flush()
        self.call("end", "commit")

    def abort(self) -> None:
        self.flush()
        self.call("end", "abort")

    def send_offsets(self, offsets: dict[Place, int], consumer: Any) -> None:
        [((topic, partition), offset)] = offsets.items()
        self.call("offsets", topic, partition, offset, consumer.number)

    def close(self) -> None:
        self.call("close")


def _call(program: Program, number: int, method: str, *words: Word) -> list[bytes | None]:
    return program.call(method, number, *words)


class _Consumer:
    def __init__(self, program: Program, number: int) -> None:
        self.number = number
        self.call: Callable[..., Any] = functools.partial(_call, program, number)

    def assign(self, place: Place, at: int | str) -> None:
        self.call("assign", *place, at)

    def offset_at(self, place: Place, timestamp: int) -> int | None:
        [found] = self.call("offset_at", *place, timestamp)
        return None if found is None else int(found)

    def poll(self, timeout: float) -> list[Got]:
        return list(_rows(iter(self.call("poll", round(timeout * 1000)))))

    def assignment(self) -> set[Place]:
        words = iter(self.call("assignment"))
        return {(topic.decode(), int(next(words))) for topic in words}

    def commit(self) -> None:
        self.call("commit")

    def committed(self, place: Place) -> int | None:
        [found] = self.call("committed", *place)
        return None if found is None else int(found)

    def close(self) -> None:
        self.call("close")


def _rows(words: Iterator[Any]) -> Iterator[Got]:
    for topic in words:
        partition, offset, timestamp = (int(next(words)) for _ in range(3))
        value, key = next(words), next(words)
        headers = tuple((next(words).decode(), next(words)) for _ in range(int(next(words))))
        yield Got(topic.decode(), partition, offset, Sent(value, key, headers, timestamp))
