"""`logstore serve` as a process: readiness, signals, systemd, settings, and what shows it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

import logstore
from logstore.cli.served import NAME, find_listener
from logstore.cli.server_properties import ServerProperties, read_properties
from logstore.kafka.config import KafkaConfig
from logstore.kafka.protocol.errors import ErrorCode
from tests.cli.conftest import LONG, Command, on_a_terminal
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kit import wait_until

PRODUCE, FETCH, METADATA, API_VERSIONS, CREATE_TOPICS = 0, 1, 3, 18, 19

# The server.properties of a Kafka 4 distribution, without its comments.
OF_A_BROKER = r"""
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:9093
listeners=PLAINTEXT://127.0.0.1:0,CONTROLLER://127.0.0.1:0
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://broker.example:9092,CONTROLLER://broker.example:9093
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,\
    SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs=/tmp/kraft-combined-logs
num.partitions=3
num.recovery.threads.per.data.dir=1
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""


class Served:
    """A running `logstore serve` on a free port, and its line of readiness."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            raise AssertionError(process.stderr.read().decode())
        self.ready: dict[str, Any] = json.loads(line)

    def address(self, name: str = "PLAINTEXT") -> tuple[str, int]:
        host, _, port = self.ready["listeners"][name].rpartition(":")
        return host, int(port)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code, and what was written to stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=LONG)
        return self.process.returncode, err.decode()


Serve = Callable[..., Served]


@pytest.fixture
def serve(command: Command) -> Serve:
    def start(*arguments: object, listen: str | None = "127.0.0.1:0", **options: Any) -> Served:
        listening = [] if listen is None else ["--listen", listen]
        return Served(
            command.start("serve", "--durability", "os", *listening, *arguments, **options)
        )

    return start


def get(address: str, path: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LONG)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


# ---- everything at once: a process costs a second ----


def test_a_server_with_everything(command: Command, serve: Serve) -> None:
    requests = command.store.parent / "requests.jsonl"
    reading, writing = os.pipe()
    served = serve(
        *("--create-topic", "orders:3", "--create-topic", "bills", "--metrics", "0", "--ui", "0"),
        *("--control-listen", "127.0.0.1:0", "--request-log", requests, "--ready-fd", writing),
        *("--fault", "fail:Produce,error=NOT_LEADER_OR_FOLLOWER,topic=bills"),
        pass_fds=[writing],
    )
    os.close(writing)
    with os.fdopen(reading) as ready:
        assert json.load(ready) == served.ready, "the descriptor is closed after the line"
    assert served.ready["ready"] is True
    assert served.ready["pid"] == served.process.pid
    with Peer(served.address()) as peer:
        topics = peer.ask(METADATA, 1, {"topics": None})["topics"]
        assert {each["name"]: len(each["partitions"]) for each in topics} == {
            "orders": 3,
            "bills": 1,
        }
        codes = []
        for topic in ("bills", "bills", "orders"):
            answer = peer.ask(PRODUCE, 9, produce_body(topic, batch(b"secret")))
            codes.append(answer["responses"][0]["partition_responses"][0]["error_code"])
        assert codes == [ErrorCode.NOT_LEADER_OR_FOLLOWER, 0, 0]

        # a verb that needs the lock
        busy = command("topic", "rm", "bills", "--yes", code=3).err
        assert f"locked by process {served.process.pid}" in busy
        (listener,) = served.ready["listeners"].values()
        assert "it is served: Kafka's tools and clients change its topics, groups" in busy
        assert f"at {listener}" in busy

        # metrics, health
        status, text = get(served.ready["metrics"], "/metrics")
        assert status == 200
        assert 'logstore_kafka_requests_total{api="Produce"} 3\n' in text
        assert get(served.ready["metrics"], "/health") == (200, "ok\n")

        # the control listener
        host, _, port = served.ready["control"].rpartition(":")
        with Peer((host, int(port))) as operator:
            body = {"topics": [{"name": "orders"}]}
            assert operator.ask(METADATA, 1, body)["brokers"][0]["port"] == int(port)
            row = operator.ask(FETCH, 11, fetch_body("orders", 0))["responses"][0]["partitions"]
            assert row[0]["error_code"] == ErrorCode.INVALID_REQUEST
            answer = operator.ask(PRODUCE, 9, produce_body("orders", batch(b"x")))
            row = answer["responses"][0]["partition_responses"]
            assert row[0]["error_code"] == ErrorCode.INVALID_REQUEST
            assert row[0]["error_message"] == "the control listener serves no records"

        # other processes
        rows = {row["check"]: row for row in command("doctor", "--no-fsync").rows}
        found = rows["listener"]["found"]
        assert served.ready["listeners"]["PLAINTEXT"] in found
        assert f"pid {served.process.pid}, 1 connections, 4 requests" in found
        page = served.ready["ui"].removeprefix("http://").partition("/")
        shown = json.loads(get(page[0], f"/{page[2]}api/store")[1])
        assert shown["listener"]["pid"] == served.process.pid
        assert shown["listener"]["connections"] == 1

        # signals
        requests.rename(requests.with_suffix(".1"))
        served.process.send_signal(signal.SIGHUP)
        wait_until(requests.exists, "the request log is opened again", patience=LONG)
        peer.ask(API_VERSIONS, 0, {})
        served.process.send_signal(signal.SIGUSR1)
    code, err = served.end()
    assert code == 0
    assert 'logstore_kafka_requests_total{api="Produce"} 3' in err, "SIGUSR1"
    before = requests.with_suffix(".1").read_text()
    assert [json.loads(line)["api"] for line in before.splitlines()][:2] == ["Metadata", "Produce"]
    assert "secret" not in before
    assert [json.loads(line)["api"] for line in requests.read_text().splitlines()] == [
        "ApiVersions"
    ]
    assert not (command.store / NAME).exists()
    assert find_listener(command.store) is None
    assert len(command("read", "orders").rows) == 1


def test_systemd(command: Command, serve: Serve, tmp_path: Path) -> None:
    """A socket of systemd is served; READY, RELOADING, WATCHDOG by the loop, STOPPING."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified,
        socket.create_server(("127.0.0.1", 0)) as given,
    ):
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(LONG)
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "100000",
            "LISTEN_FDS": "1",
        }
        # LISTEN_PID is the pid of the process that listens: set between fork and exec.
        starter = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            "os.environ['LISTEN_PID'] = str(os.getpid()); os.execv(sys.argv[2], sys.argv[2:])"
        )
        line = command.line("serve", "--durability", "os")
        process = subprocess.Popen(
            [sys.executable, "-c", starter, str(given.fileno()), *line], env=environment,
            pass_fds=[given.fileno()], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        command._started.append(process)
        served = Served(process)
        assert served.address() == given.getsockname()
        states: list[str] = []

        def until(state: str) -> str:
            while True:
                states.append(notified.recv(4096).decode())
                if states[-1].startswith(state):
                    return states[-1]

        assert until("READY=1") == f"READY=1\nSTATUS=ready on 127.0.0.1:{served.address()[1]}"
        until("WATCHDOG=1")
        until("WATCHDOG=1")
        process.send_signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in until("RELOADING=1")
        until("READY=1")
        with Peer(served.address()) as peer:
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
        assert served.end() == (0, "")
        until("STOPPING=1")


def test_a_second_signal_closes_the_connections_at_once(command: Command, serve: Serve) -> None:
    served = serve("--fault", "delay:Metadata,seconds=300", "--metrics", "0")
    with Peer(served.address()) as peer:
        peer.send(METADATA, 1, {"topics": []})
        series = 'requests_total{api="Metadata"} 1'
        wait_until(
            lambda: series in get(served.ready["metrics"], "/metrics")[1], series, patience=LONG
        )
        served.process.send_signal(signal.SIGINT)
        # Until the drain has begun: a peer that waits to be accepted at that moment is reset.
        with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
            while True:
                socket.create_connection(served.address(), timeout=LONG).close()
        code, err = served.end(signal.SIGINT)
        assert code == 130
        assert "closed at once" in err
        assert peer.is_closed()
    with logstore.open(command.store) as store:
        assert store.recovery.clean, "the store was closed nevertheless"


def test_a_server_whose_stdout_nobody_reads(command: Command) -> None:
    """It is ready all the same."""
    gone, broken = os.pipe()
    reading, writing = os.pipe()
    os.close(gone)
    process = command.start(
        *("serve", "--listen", "127.0.0.1:0", "--ready-fd", writing),
        stdout=broken,
        pass_fds=[writing],
    )
    os.close(broken)
    os.close(writing)
    with os.fdopen(reading) as ready:
        host, _, port = json.load(ready)["listeners"]["PLAINTEXT"].rpartition(":")
    with Peer((host, int(port))) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert b"cannot tell that it is ready: Broken pipe" in err


def test_a_request_log_on_a_full_disk_is_told_once(command: Command, serve: Serve) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    served = serve("--request-log", "/dev/full")
    with Peer(served.address()) as peer:
        for _ in range(3):
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
    code, err = served.end()
    assert code == 0
    assert err.count("No space left on device") == 1, err
    assert "Traceback" not in err


def test_a_killed_server_is_not_shown_as_one(command: Command, serve: Serve) -> None:
    served = serve()
    assert find_listener(command.store) is not None
    rows = {row["check"]: row for row in command("doctor", "--no-fsync").rows}
    assert "--metrics" in rows["listener"]["advice"]
    assert f"{served.process.pid}" in command("serve", code=3).err, "the store has one writer"
    served.process.kill()
    served.process.wait(LONG)
    assert (command.store / NAME).exists()
    assert find_listener(command.store) is None
    assert "listener" not in {row["check"] for row in command("doctor", "--no-fsync").rows}
    assert command("verify").code == 0


def test_a_server_properties_of_a_broker(command: Command, serve: Serve) -> None:
    path = command.store.parent / "server.properties"
    path.write_text(OF_A_BROKER)
    served = serve("--config-file", path, "-c", "num.partitions=4", listen=None)
    assert list(served.ready["listeners"]) == ["PLAINTEXT"]
    with Peer(served.address()) as peer:
        asked = {"topics": [{"name": "new"}], "allow_auto_topic_creation": True}
        answer = peer.ask(METADATA, 8, asked)
        assert answer["brokers"][0]["host"] == "broker.example"
        assert len(answer["topics"][0]["partitions"]) == 4, "-c is before the file"
        wanted = {"resource_type": 2, "resource_name": "new", "configuration_keys": None}
        configs = peer.ask(32, 1, {"resources": [wanted]})["results"][0]["configs"]
        values = {each["name"]: each["value"] for each in configs}
        assert values["retention.ms"] == str(168 * 3_600_000)
    code, err = served.end()
    assert code == 0
    assert err.startswith("not used by one node: controller.listener.names, controller.quorum")
    assert "log.retention.check.interval.ms" in err


# ---- in this process ----


def test_exit_codes(command: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in command("serve", "--listen", address, code=3).err
        ending = ["--listen", "127.0.0.1:0", "--metrics", address]
        assert (
            f"cannot listen on {address} for the metrics" in command("serve", *ending, code=3).err
        )
    wrong = command("serve", "-c", "num.partition=3", code=1)
    assert "did you mean 'num.partitions'?" in wrong.err
    assert "log.retention.hours" not in wrong.err
    for name, near in (
        ("log.retention.hour", "log.retention.hours"),
        ("retention.ms", "log.retention.ms"),
        ("max.message.bytes", "message.max.bytes"),
        ("zookeper.connect", "zookeeper.connect"),
    ):
        err = command("serve", "-c", f"{name}=1", code=1).err
        assert f"unknown setting {name!r}; did you mean {near!r}?" in err
    assert "retention.ms" in command("serve", "-c", "log.retention.hours=x", code=1).err
    assert "NAME=VALUE" in command("serve", "-c", "x", code=1).err
    assert "fail:API" in command("serve", "--listen", "127.0.0.1:0", "--fault", "x", code=1).err
    assert "no such descriptor" in command("serve", "--ready-fd", 987, code=1).err
    assert "NAME[:PARTITIONS]" in command("serve", "--create-topic", "a:b", code=1).err
    with open(os.devnull) as unwritable:
        err = command("serve", "--ready-fd", unwritable.fileno(), code=1).err
    assert "cannot be written to" in err
    command("serve", "--config-file", command.store / "missing", code=2)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    assert str(binary) in command("serve", "--config-file", binary, code=1).err


def test_a_start_that_fails_makes_no_directory(command: Command, tmp_path: Path) -> None:
    free = ("--listen", "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        assert address in command("serve", "--listen", address, code=3).err
        for option, value in (("--control-listen", address), ("--metrics", port), ("--ui", port)):
            assert str(port) in command("serve", *free, option, value, code=3).err
    for address in ("x", "a:1,b:2", "A://127.0.0.1:0,B://127.0.0.1:0"):
        assert "host:port" in command("serve", "--listen", address, code=1).err
    for option, value in (
        ("--create-topic", "a:b"), ("--create-topic", "a b"), ("--create-topic", "a:0"),
        ("--fault", "x"), ("--metrics", "x"), ("--control-listen", "x"), ("--advertise", "x"),
    ):  # fmt: skip
        command("serve", *free, option, value, code=1)
    for address in (":9092", "host:0", "0.0.0.0:9092", "[::]:9092"):
        err = command("serve", *free, "--advertise", address, code=1).err
        assert "clients cannot connect to" in err
    assert not command.store.exists()


def test_no_listener_is_served_in_plain_text_that_asks_for_more(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "server.properties"
    for lines in (
        "listeners=SSL://127.0.0.1:0",
        "listeners=PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        "listeners=OUT://127.0.0.1:0\nlistener.security.protocol.map=IN:PLAINTEXT, OUT:SASL_SSL",
    ):
        file.write_text(lines)
        assert "neither TLS nor SASL" in command("serve", "--config-file", file, code=1).err
    assert "neither TLS nor SASL" in command("serve", "--listen", "SSL://127.0.0.1:0", code=1).err
    assert not command.store.exists()


def test_a_server_whose_loop_ends_by_an_error_ends_with_6(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb runs in this process, and its loop is stopped from outside."""
    from logstore.cli.verbs import serve as module
    from logstore.kafka.server import KafkaServer

    def stop_early(server: KafkaServer, *_: object) -> None:
        assert server._loop is not None
        server._loop.call_soon_threadsafe(server._loop.stop)

    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "watchdog_seconds", lambda: 1.0)
    monkeypatch.setattr(KafkaServer, "call_every", stop_early)
    assert "error of its own" in command("serve", "--listen", "127.0.0.1:0", code=6).err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_late_signal_does_not_interrupt_the_close_of_the_store(
    command: Command, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The verb runs in this process; the second signal arrives after the listener is closed."""
    from logstore.kafka.server import KafkaServer

    closed = []
    close = logstore.Store.close

    def close_late(store: logstore.Store) -> None:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        close(store)
        closed.append(store)

    def end(server: KafkaServer, *_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("logstore.cli.verbs.serve.watchdog_seconds", lambda: 1.0)
    monkeypatch.setattr(KafkaServer, "call_every", end)
    monkeypatch.setattr(logstore.Store, "close", close_late)
    before = signal.getsignal(number)
    command("serve", "--listen", "127.0.0.1:0")
    assert closed and signal.getsignal(number) is before


def test_words_on_a_terminal(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        notified.settimeout(LONG)

        def end() -> None:
            assert notified.recv(4096).startswith(b"READY=1")
            about = find_listener(command.store)
            assert about is not None
            os.kill(about["pid"], signal.SIGTERM)

        ending = threading.Thread(target=end)
        ending.start()
        line = command.line("serve", "--listen", "127.0.0.1:0", "--metrics", "0")
        code, text = on_a_terminal(line)
        ending.join(LONG)
    assert code == 0
    assert f"serves {command.store}: 0 topics, durability fsync" in text
    assert "metrics on 127.0.0.1:" in text
    assert "ready on 127.0.0.1:" in text


# ---- server.properties ----


def test_properties_are_read_as_kafka_reads_them() -> None:
    text = "# a comment\n! another\n\na=1\n  b : 2\nlong=x,\\\n   y,\\\n  z\nempty=\nurl=a=b:c\n"
    assert read_properties(text) == {
        "a": "1", "b": "2", "long": "x,y,z", "empty": "", "url": "a=b:c",
    }  # fmt: skip
    with pytest.raises(click.UsageError, match="name=value"):
        read_properties("alone")
    assert read_properties("a=1\nb=2\\") == {"a": "1", "b": "2"}, "the last line goes on nowhere"


def test_names_of_a_broker_are_sorted_by_what_they_are_for() -> None:
    found = ServerProperties.of(read_properties(OF_A_BROKER))
    assert found.addresses == ("PLAINTEXT://127.0.0.1:0",)
    assert found.topics == {"retention.ms": "604800000", "segment.bytes": "1073741824"}
    assert KafkaConfig.of(found.listener).num_io_threads == 8
    assert found.listener["advertised.listeners"] == "PLAINTEXT://broker.example:9092"


@pytest.mark.parametrize(
    ("given", "topics"),
    [
        ({"log.retention.ms": "5", "log.retention.hours": "1"}, {"retention.ms": "5"}),
        ({"log.retention.minutes": "2", "log.retention.hours": "1"}, {"retention.ms": "120000"}),
        ({"log.retention.hours": "-1"}, {"retention.ms": "-1"}),
        ({"log.roll.hours": "2"}, {"segment.ms": "7200000"}),
        ({"message.max.bytes": "9"}, {"max.message.bytes": "9"}),
        ({"log.cleanup.policy": "compact"}, {"cleanup.policy": "compact"}),
        ({"log.cleaner.min.cleanable.ratio": "0.1"}, {"min.cleanable.dirty.ratio": "0.1"}),
    ],
)
def test_defaults_of_topics(given: dict[str, str], topics: dict[str, str]) -> None:
    found = ServerProperties.of(given)
    assert (found.topics, found.unused, found.listener) == (topics, (), {})
