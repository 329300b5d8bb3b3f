"""A real Apache Kafka for the interop tests: its jars, its log dumper, a one-node broker.

The jars come from the registry that `mvn` is set up for, once, into a cache directory
($LOGSTORE_KAFKA_CACHE, else .cache/kafka in the checkout).  A part that is missing on this machine
makes `require_kafka()` skip the test with the reason; nothing here ever fails for lack of Java.

A JVM costs seconds to start: dump many files in one call, share one broker among many topics.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

VERSION = os.environ.get("LOGSTORE_KAFKA_VERSION", "4.3.1")

DUMPED_SUFFIXES = (".log", ".index", ".timeindex", ".txnindex", ".snapshot")

_POM = Path(__file__).with_name("pom.xml")
_CLIENTS_POM = Path(__file__).with_name("clients.pom.xml")
_SPARK_POM = Path(__file__).with_name("spark.pom.xml")
_STREAMS_POM = Path(__file__).with_name("streams.pom.xml")
_REPOSITORY = Path(__file__).resolve().parents[2]
_MAKE_TIMEOUT = 600.0
_TOOL_TIMEOUT = 120.0
_JVM = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

# Each is a complaint of DumpLogSegments; on any of them it still exits with status 0.
_COMPLAINT = re.compile(
    r"isvalid: false|Mismatches in|mismatch in|out of order timestamp|not found in the log"
    r"|invalid bytes at the end|Exception|Ignoring unknown file|[Cc]orrupt"
)
# It also prints "-1 is followed by 42" for every segment whose base offset is 42: not a gap.
_GAP = re.compile(r"^  \d+ is followed by \d+$")


class KafkaUnavailableError(Exception):
    """Java, mvn or the registry cannot be had here; the message names it."""


class DumpError(AssertionError):
    """Kafka's dumper found fault with a file; the message holds its complaint."""


def cache_directory() -> Path:
    return Path(os.environ.get("LOGSTORE_KAFKA_CACHE") or _REPOSITORY / ".cache" / "kafka")


@functools.cache
def jar_directory() -> Path:
    """The directory holding the jars of `VERSION`, filled on first use.

    Raises KafkaUnavailableError.  The directory appears by one rename, so test processes may race.
    """
    return _fetched(cache_directory() / VERSION, _POM, VERSION)


@functools.cache
def client_jar_directory(version: str) -> Path:
    """The directory holding the jars of the Java client of a version; as `jar_directory`."""
    if version == VERSION:
        return jar_directory()
    return _fetched(cache_directory() / f"clients-{version}", _CLIENTS_POM, version)


@functools.cache
def spark_jar_directory() -> Path:
    """The directory holding the jars of Spark's Kafka source and sink; as `jar_directory`."""
    return _fetched(cache_directory() / "spark-kafka-4.2.0", _SPARK_POM, "3.9.1")


@functools.cache
def streams_jar_directory() -> Path:
    """The directory holding the jars of Kafka Streams; as `jar_directory`."""
    return _fetched(cache_directory() / f"streams-{VERSION}", _STREAMS_POM, VERSION)


def _fetched(jars: Path, pom: Path, version: str) -> Path:
    if shutil.which("java") is None:
        raise KafkaUnavailableError("java is not installed")
    command = ["mvn", "--batch-mode", "--quiet", f"-Dkafka.version={version}", "-f", pom.name]
    command += ["dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=made"]
    return made_once(jars, [pom], command)


def made_once(target: Path, sources: Sequence[Path], fetch: list[str], *build: list[str]) -> Path:
    """Make a directory of the cache, unless it is there, and return it.

    The commands run in a directory with copies of the sources, and leave their result in `made`.
    `fetch` uses the network: if it fails, KafkaUnavailableError has the reason.  If a command of
    `build` fails, the sources are wrong, and AssertionError has its output.
    """
    if target.is_dir():
        return target
    if shutil.which(fetch[0]) is None:
        raise KafkaUnavailableError(f"{fetch[0]} is not installed, and its result is not cached")
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="incomplete-") as scratch:
        for source in sources:
            shutil.copy(source, scratch)
        for command in (fetch, *build):
            try:
                done = subprocess.run(
                    command, cwd=scratch, capture_output=True, text=True, timeout=_MAKE_TIMEOUT
                )
            except subprocess.TimeoutExpired:
                reason = f"{command[0]} took over {_MAKE_TIMEOUT:.0f} s"
                raise KafkaUnavailableError(reason) from None
            if done.returncode != 0:
                output = (done.stdout + done.stderr).strip()
                assert command is fetch, output
                first = (output.splitlines() or ["no output"])[0]
                raise KafkaUnavailableError(f"{command[0]} cannot fetch {target.name}: {first}")
        try:
            Path(scratch, "made").rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first
                raise
    return target


def require_kafka() -> None:
    """Skip the calling test, with the reason, where Kafka cannot be run."""
    try:
        jar_directory()
    except KafkaUnavailableError as error:
        pytest.skip(f"no Apache Kafka: {error}")


def _java(
    main: str, *arguments: str, jvm: Sequence[str] = (), base: Sequence[str] = _JVM
) -> list[str]:
    return ["java", *base, *jvm, "-cp", f"{jar_directory()}/*", main, *arguments]


def _run_tool(main: str, *arguments: str) -> str:
    done = subprocess.run(
        _java(main, *arguments, jvm=("-Dorg.slf4j.simpleLogger.defaultLogLevel=error",)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=_TOOL_TIMEOUT,
    )
    if done.returncode != 0:
        raise DumpError(f"{main} exited with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def partition_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of `paths` that the dumper knows, with directories replaced by their content."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(file for file in path.iterdir() if file.suffix in DUMPED_SUFFIXES)
        else:
            files.append(path)
    return files


def dump_log(
    paths: Iterable[str | os.PathLike[str]],
    *,
    deep: bool = True,
    index_sanity: bool = False,
    verify_index: bool = False,
    print_data: bool = True,
    allow_gaps: bool = False,
    decode_offsets: bool = False,
    decode_transactions: bool = False,
    decode_share_groups: bool = False,
) -> str:
    """What kafka-dump-log prints about files (or about all files of directories).

    Raises DumpError when the dumper complains: an invalid CRC, an index that disagrees with its
    log, trailing bytes, a failed check.  `allow_gaps` accepts non-consecutive offsets, which are
    right after compaction and nowhere else.
    """
    options = {
        "--deep-iteration": deep,
        "--index-sanity-check": index_sanity,
        "--verify-index-only": verify_index,
        "--print-data-log": print_data,
        "--offsets-decoder": decode_offsets,
        "--transaction-log-decoder": decode_transactions,
        "--share-group-state-decoder": decode_share_groups,
    }
    arguments = [option for option, wanted in options.items() if wanted]
    files = ",".join(str(file) for file in partition_files(paths))
    assert files, "nothing to dump"
    text = _run_tool("org.apache.kafka.tools.DumpLogSegments", *arguments, "--files", files)
    complaints = [line for line in text.splitlines() if _is_complaint(line, allow_gaps)]
    if complaints:
        raise DumpError("\n".join(complaints) + "\n\nin the output:\n" + text)
    return text


def _is_complaint(line: str, allow_gaps: bool) -> bool:
    if line.startswith("| offset:"):
        return False  # a record, whose data may be any text
    return bool(_COMPLAINT.search(line)) or bool(_GAP.match(line) and not allow_gaps)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Broker:
    """A one-node KRaft broker on loopback, running inside `with`, its log directory kept.

    `config` is added to server.properties (`{"log.cleaner.backoff.ms": 100}`); settings of a topic
    go to `create_topic`.  Leaving `with` stops it cleanly; `kill()` before that leaves the
    directory as a crash would.  Not thread-safe.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: Mapping[str, object] | None = None,
        *,
        timeout: float = 60.0,
        jvm: Sequence[str] = _JVM,
    ) -> None:
        self._jvm = tuple(jvm)
        self.directory = Path(directory)
        self.log_dir = self.directory / "logs"
        self.timeout = timeout
        port, controller_port = _free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        self._port = port
        self._output = self.directory / "broker.txt"
        self._process: subprocess.Popen[bytes] | None = None
        self._properties: dict[str, object] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.log_dir,
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "log.cleaner.dedupe.buffer.size": 16 << 20,
            **(config or {}),
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    @property
    def running(self) -> bool:
        return self._process is not None

    def partition_dir(self, topic: str, partition: int = 0) -> Path:
        return self.log_dir / f"{topic}-{partition}"

    def start(self) -> None:
        """Start, formatting the log directory if it is new; return once the port answers."""
        assert self._process is None, "already running"
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = self.directory / "server.properties"
        lines = (f"{name}={value}\n" for name, value in self._properties.items())
        properties.write_text("".join(lines))
        if not self.log_dir.exists():
            cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
            tool = ("kafka.tools.StorageTool", "format", "-c", str(properties))
            _run_tool(*tool, f"--cluster-id={cluster}")
        log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        command = _java("kafka.Kafka", str(properties), jvm=(*self._jvm, log_level), base=())
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            self._await_port()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process of the running broker."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Shut down cleanly: indexes trimmed, snapshots and the clean marker written."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the broker did not stop\n{self._tail()}") from None
        self._process = None
        marker = self.log_dir / ".kafka_cleanshutdown"
        assert marker.exists(), f"the broker stopped, but not cleanly\n{self._tail()}"

    def kill(self) -> None:
        """SIGKILL: the directory stays as a crash of the process leaves it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def create_topic(self, topic: str, config: Mapping[str, object] | None = None) -> None:
        """Create a one-partition topic with topic-level settings and wait until it has a leader."""
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        settings = {name: str(value) for name, value in (config or {}).items()}
        new = NewTopic(topic, num_partitions=1, replication_factor=1, config=settings)
        admin.create_topics([new])[topic].result(self.timeout)
        deadline = time.monotonic() + self.timeout
        while not self.partition_dir(topic).is_dir():
            if time.monotonic() > deadline:
                raise TimeoutError(f"topic {topic!r} got no directory\n{self._tail()}")
            time.sleep(0.05)

    def _await_port(self) -> None:
        deadline = time.monotonic() + self.timeout
        while True:
            assert self._process is not None
            if self._process.poll() is not None:
                raise RuntimeError(f"the broker exited at once\n{self._tail()}")
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the broker did not start\n{self._tail()}") from None
            time.sleep(0.1)

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-4000:] if self._output.exists() else ""
