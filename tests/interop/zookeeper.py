"""A real ZooKeeper ensemble on loopback, from the jars that a broker of Kafka 3.9 needs.

A part that is missing on this machine makes `require_zookeeper()` skip the test with the reason.
"""

from __future__ import annotations

import functools
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from .kafka import KafkaUnavailableError, _fetched, _free_ports, cache_directory

KAFKA = "3.9.1"  # the last brokers with ZooKeeper

_POM = Path(__file__).with_name("zookeeper.pom.xml")
_JVM = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_START_TIMEOUT = 180.0


@functools.cache
def zookeeper_jar_directory() -> Path:
    """The directory holding the jars of ZooKeeper and of Kafka 3.9; as `jar_directory`."""
    return _fetched(cache_directory() / f"zookeeper-kafka-{KAFKA}", _POM, KAFKA)


def require_zookeeper() -> None:
    """Skip the calling test, with the reason, where ZooKeeper cannot be run."""
    try:
        zookeeper_jar_directory()
    except KafkaUnavailableError as error:
        pytest.skip(f"no ZooKeeper: {error}")


class Ensemble:
    """One or three ZooKeeper servers, running inside `with`.

    Servers have the numbers 1 to n.  `kill` and `start` act on one of them; its directory is kept.
    """

    def __init__(self, directory: Path, servers: int = 1, *, tick_ms: int = 200) -> None:
        self.directory = directory
        self.numbers = range(1, servers + 1)
        ports = iter(_free_ports(3 * servers))
        self.ports = {number: next(ports) for number in self.numbers}
        self.connect = ",".join(f"127.0.0.1:{port}" for port in self.ports.values())
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        peers = [f"server.{n}=127.0.0.1:{next(ports)}:{next(ports)}" for n in self.numbers]
        for number in self.numbers:
            home = directory / str(number)
            home.mkdir(parents=True)
            lines = [
                f"dataDir={home}",
                f"clientPort={self.ports[number]}",
                "clientPortAddress=127.0.0.1",
                f"tickTime={tick_ms}",
                f"minSessionTimeout={2 * tick_ms}",
                "maxSessionTimeout=60000",
                "initLimit=50",
                "syncLimit=20",
                "maxClientCnxns=0",
                "admin.enableServer=false",
                "4lw.commands.whitelist=srvr,ruok",
                *(peers if servers > 1 else ()),
            ]
            (home / "zoo.cfg").write_text("\n".join(lines) + "\n")
            (home / "myid").write_text(f"{number}\n")

    def __enter__(self) -> Self:
        for number in self.numbers:
            self.launch(number)
        try:
            for number in self.numbers:
                self.await_serving(number)
        except BaseException:
            self.kill_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()

    def launch(self, number: int) -> None:
        """Start the process of a server, without waiting for it."""
        home = self.directory / str(number)
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        command = ["java", *_JVM, log_level, "-cp", f"{zookeeper_jar_directory()}/*", main]
        with (home / "output.txt").open("ab") as output:
            self._processes[number] = subprocess.Popen(
                [*command, str(home / "zoo.cfg")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def start(self, number: int) -> None:
        """Start a server that was killed, and wait until it serves."""
        self.launch(number)
        self.await_serving(number)

    def kill(self, number: int) -> None:
        """SIGKILL one server."""
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for number in list(self._processes):
            self.kill(number)

    @property
    def leader(self) -> int:
        """The server that leads, or that stands alone."""
        for number in self._processes:
            if self._mode(number) in ("leader", "standalone"):
                return number
        raise AssertionError("no server leads")

    def await_serving(self, number: int) -> None:
        """Wait until a server is part of a quorum, or alone."""
        deadline = time.monotonic() + _START_TIMEOUT
        while self._mode(number) not in ("leader", "follower", "standalone"):
            ended = self._processes[number].poll() is not None
            if ended or time.monotonic() > deadline:
                text = (self.directory / str(number) / "output.txt").read_text(errors="replace")
                raise RuntimeError(f"ZooKeeper server {number} does not serve\n{text[-4000:]}")
            time.sleep(0.05)

    def _mode(self, number: int) -> str:
        """The answer to `srvr`: leader, follower or standalone; empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.ports[number]), timeout=2) as link:
                link.sendall(b"srvr")
                answer = b"".join(iter(functools.partial(link.recv, 65536), b"")).decode()
        except OSError:
            return ""
        modes = [line[6:] for line in answer.splitlines() if line.startswith("Mode: ")]
        return modes[0] if modes else ""


class ZooKeeperBroker:
    """A broker of Kafka 3.9 in ZooKeeper mode, running inside `with`; its id is 1."""

    def __init__(self, directory: Path, connect: str) -> None:
        (self.port,) = _free_ports(1)
        self.connect = connect
        self.bootstrap = f"127.0.0.1:{self.port}"
        self.log_dir = directory / "logs"
        self._output = directory / "broker.txt"
        self._properties = directory / "server.properties"
        settings = {
            "broker.id": 1,
            "broker.rack": "rack-1",
            "zookeeper.connect": connect,
            "listeners": f"PLAINTEXT://{self.bootstrap}",
            "log.dirs": self.log_dir,
            "offsets.topic.replication.factor": 1,
        }
        self._properties.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        jvm = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        log_level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        command = ["java", *jvm, log_level, "-cp", f"{zookeeper_jar_directory()}/*", "kafka.Kafka"]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(self._properties)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                if self._knows_itself():
                    return self
                raise ConnectionError("it is not registered yet")
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    text = self._output.read_text(errors="replace")
                    raise RuntimeError(f"the broker does not serve\n{text[-4000:]}") from None
            time.sleep(0.1)

    def _knows_itself(self) -> bool:
        """Whether its metadata names it as broker and controller: clients ask once, and wait."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        try:
            found = admin.list_topics(timeout=5)
        except KafkaException:
            return False
        return found.controller_id == 1 and 1 in found.brokers

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
