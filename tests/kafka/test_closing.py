"""KafkaServer.close: from signal handlers, from many threads, during the start, and under load."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import ClosedError, KafkaServer, Store
from logstore.kafka.protocol.errors import ErrorCode
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kafka.test_server import join_body, until

PRODUCE, FETCH, METADATA, JOIN_GROUP, API_VERSIONS = 0, 1, 3, 11, 18


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
    assert [each for each in found if each.name in ("asyncio", "logstore.kafka")] == []


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Return a function that has something called by a handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle(act: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: act())

    yield handle
    signal.signal(signal.SIGUSR1, before)


OnSignal = Callable[[Callable[[], object]], None]


# ---- signals ----


def test_a_signal_handler_closes_a_server_that_serves_forever(
    store: Store, on_signal: OnSignal
) -> None:
    server = KafkaServer(store)
    on_signal(server.close)

    def stop() -> None:
        until(lambda: server.addresses)
        with Peer(server.address) as peer:
            peer.ask(API_VERSIONS, 0, {})
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=stop)
    thread.start()
    server.serve_forever()
    thread.join(10)
    assert server.closed


@pytest.mark.parametrize("where", ["bind", "Broker", "asyncio.new_event_loop"])
@pytest.mark.parametrize("forever", [False, True])
def test_a_signal_handler_closes_a_server_that_starts(
    store: Store, on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch, where: str, forever: bool
) -> None:
    """The handler runs in the thread that holds the lock of the server."""
    module = sys.modules[KafkaServer.__module__]
    place = module if "." not in where else module.asyncio
    real = getattr(place, where.rpartition(".")[2])
    server = KafkaServer(store)
    on_signal(server.close)

    def then(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return real(*given)

    monkeypatch.setattr(place, where.rpartition(".")[2], then)
    if forever:
        server.serve_forever()
    else:
        with pytest.raises(ClosedError, match="while it started"):
            server.start()
    assert server.closed
    with pytest.raises(ClosedError):
        server.serve_forever()
    assert not [each for each in threading.enumerate() if "logstore kafka" in each.name]
    monkeypatch.undo()
    with KafkaServer(store) as another, Peer(another.address) as peer:
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0


def test_a_signal_handler_ends_a_close_that_drains(store: Store, on_signal: OnSignal) -> None:
    server = KafkaServer(store).start()
    server.faults.delay("Metadata", 60.0)
    on_signal(server.close)
    with Peer(server.address) as peer:
        peer.send(METADATA, 1, {"topics": []})
        until(lambda: server.metrics().get('requests_total{api="Metadata"}') == 1)

        def again() -> None:
            until(lambda: server.closed)
            os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=again)
        thread.start()
        server.close(timeout=60)
        thread.join(10)
        assert peer.is_closed()


# ---- threads ----


def test_start_and_close_from_many_threads(store: Store) -> None:
    for _ in range(sized(10, 100, 500)):
        server = KafkaServer(store)

        def start(server: KafkaServer = server) -> None:
            with contextlib.suppress(ClosedError):
                server.start()

        threads = [threading.Thread(target=start)]
        threads += [threading.Thread(target=server.close) for _ in range(3)]
        random.Random(7).shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        server.close()
        assert server.closed
        assert store.companions.attach(server) is server, "the store has no server any more"
        store.companions.detach(server)


def test_peers_that_connect_during_the_close_are_closed(store: Store) -> None:
    for _ in range(sized(3, 30, 100)):
        server = KafkaServer(store).start()
        held: list[socket.socket] = []

        def storm(server: KafkaServer = server, held: list[socket.socket] = held) -> None:
            try:
                while True:
                    held.append(socket.create_connection(server.address, timeout=10))
            except OSError:
                pass

        threads = [threading.Thread(target=storm) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda held=held: len(held) > 20)  # type: ignore[misc]
        server.close()
        for thread in threads:
            thread.join(20)
        for each in held:
            with each, contextlib.suppress(ConnectionResetError, BrokenPipeError):
                # A peer of the backlog that the kernel dropped without a word learns it by a byte.
                each.sendall(b"\0")
                assert each.recv(1) == b""


# ---- load ----


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_a_drain_under_mixed_load(tmp_path: Path, durability: str) -> None:
    """Every acknowledged record is there; each request gets an answer or a closed socket."""
    acknowledged: list[bytes] = []
    ended: list[str] = []
    lock = threading.Lock()
    with logstore.open(tmp_path / "s", durability=durability) as store:
        store.create_topic("t", partitions=3)
        server = KafkaServer(store).start()

        def produce(number: int) -> None:
            with Peer(server.address) as peer:
                for turn in range(1_000_000):
                    value = b"%d-%d" % (number, turn)
                    compression = "gzip" if number % 2 else None  # a worker appends it
                    raw = batch(value, compression=compression)
                    answer = peer.ask(PRODUCE, 9, produce_body("t", raw, partition=number % 3))
                    [row] = answer["responses"][0]["partition_responses"]
                    assert row["error_code"] == 0
                    with lock:
                        acknowledged.append(value)

        def fetch(number: int) -> None:
            with Peer(server.address) as peer:
                while True:
                    body = fetch_body("t", 0, partition=number % 3, max_wait_ms=500)
                    answer = peer.ask(FETCH, 11, body)
                    assert answer["responses"][0]["partitions"][0]["error_code"] == 0

        def poll(number: int) -> None:
            with Peer(server.address) as peer:
                while True:
                    peer.ask(METADATA, 1, {"topics": [{"name": "t"}]})
                    code = peer.ask(JOIN_GROUP, 3, join_body(f"g{number}"))["error_code"]
                    assert code in (0, ErrorCode.COORDINATOR_NOT_AVAILABLE)

        def until_closed(act: Callable[[int], None], number: int) -> None:
            try:
                act(number)
            except (EOFError, ConnectionError):  # a TimeoutError is a request without an answer
                with lock:
                    ended.append(act.__name__)

        acts = [produce] * 6 + [fetch] * 3 + [poll] * 2
        threads = [
            threading.Thread(target=until_closed, args=(act, number))
            for number, act in enumerate(acts)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(acknowledged) > 100)
        server.close()
        for thread in threads:
            thread.join(30)
        assert sorted(ended) == sorted(act.__name__ for act in acts)
    with logstore.open(tmp_path / "s", readonly=True) as store:
        stored = [record.value for number in range(3) for record in store["t"][number]]
        for number in range(3):
            assert store["t"][number].check() == []
    assert len(stored) == len(set(stored))
    assert set(acknowledged) <= set(stored)
    assert len(stored) <= len(acknowledged) + 6, "one request of each producer was under way"


def test_a_fork_under_load_harms_no_connection(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    stop = threading.Event()
    produced: list[int] = []

    def produce() -> None:
        with Peer(server.address) as peer:
            while not stop.is_set():
                answer = peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
                [row] = answer["responses"][0]["partition_responses"]
                assert row["error_code"] == 0
                produced.append(row["base_offset"])

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(5):
        seen = len(produced)
        done = subprocess.run([sys.executable, "-c", ""], check=False)
        child = os.fork()
        if child == 0:
            os._exit(0 if server.closed else 1)
        _, status = os.waitpid(child, 0)
        assert done.returncode == os.waitstatus_to_exitcode(status) == 0
        until(lambda seen=seen: len(produced) > seen + 5)  # type: ignore[misc]
    stop.set()
    thread.join(10)
    assert produced == list(range(len(produced)))


@pytest.mark.parametrize("min_bytes", [1, 1000])
def test_a_topic_that_is_deleted_and_made_again_under_a_waiting_fetch(
    store: Store, server: KafkaServer, min_bytes: int
) -> None:
    """The loop sees the new topic only, whose partition is not open yet."""
    for name in ("t", "u"):
        store.create_topic(name).append(b"x")
    asked = [fetch_body(name, 1, max_wait_ms=20_000, min_bytes=min_bytes) for name in ("t", "u")]
    go = threading.Event()
    with Peer(server.address) as peer, Peer(server.address) as other:
        peer.send(FETCH, 11, asked[0])
        other.send(FETCH, 11, asked[1])
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 2)
        assert server._loop is not None
        server._loop.call_soon_threadsafe(go.wait, 20)
        store["u"].append(bytes(3000))
        store.delete_topic("t")
        store.create_topic("t")
        go.set()
        row = other.receive(FETCH, 11)["responses"][0]["partitions"][0]
        assert len(row["records"]) > 3000, "another fetch is not harmed"
        row = peer.receive(FETCH, 11)["responses"][0]["partitions"][0]
        assert row["error_code"] == ErrorCode.NOT_LEADER_OR_FOLLOWER, "the client asks again"


def test_a_store_that_is_closed_by_another_thread_during_requests(tmp_path: Path) -> None:
    """A request finds the store closed at any point: it gets an error or a closed socket."""
    for turn in range(sized(3, 20, 100)):
        with logstore.open(tmp_path / f"s{turn}", durability="os") as store:
            server = KafkaServer(store).start()
            peer = Peer(server.address)

            def ask(peer: Peer = peer) -> None:
                try:
                    with peer:
                        for number in range(1_000_000):
                            names = [{"name": f"n{number % 50}"}]
                            body = {"topics": names, "allow_auto_topic_creation": True}
                            peer.ask(METADATA, 8, body)
                            peer.ask(PRODUCE, 9, produce_body(f"n{number % 50}", batch(b"x")))
                except (EOFError, ConnectionError):
                    pass

            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda store=store, turn=turn: len(store) > turn % 7)  # type: ignore[misc]
            store.close()
            thread.join(20)
            assert not thread.is_alive()
            assert server.closed
