"""Load: many connections, polls, members, groups and slow readers at once, all served."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logstore import KafkaServer, Store
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.kafka.network import connection
from logstore.kafka.protocol.errors import ErrorCode
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kafka.test_server import error_of_produce, join_body, until

PRODUCE, FETCH, METADATA, FIND_COORDINATOR, JOIN_GROUP = 0, 1, 3, 10, 11
HEARTBEAT, LEAVE_GROUP, SYNC_GROUP, DESCRIBE_GROUPS, LIST_GROUPS = 12, 13, 14, 15, 16
API_VERSIONS = 18
MIB = 1 << 20
pytestmark = pytest.mark.campaign


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    found = [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]
    assert [each for each in found if each.name in ("asyncio", "logstore.kafka")] == []


def together(act: Callable[[int], object], count: int) -> None:
    """Call `act` in many threads; raise the first error."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            act(number)
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


# ---- connections ----


def test_short_connections(server: KafkaServer) -> None:
    def connect(number: int) -> None:
        for turn in range(sized(100, 2_500, 2_500)):
            with Peer(server.address) as peer:
                if turn % 3:
                    assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
                elif turn % 2:  # a reset
                    linger = struct.pack("ii", 1, 0)
                    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    before = len(os.listdir("/proc/self/fd"))
    together(connect, 4)
    until(lambda: server.connections == 0)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_half_open_sockets_are_closed_when_they_are_idle(store: Store) -> None:
    """A peer that vanished sends nothing: its connection ends after the idle time."""
    with KafkaServer(store, config={"connections.max.idle.ms": 200}) as server:
        peers = [Peer(server.address) for _ in range(20)]
        until(lambda: server.connections == 20)
        until(lambda: server.connections == 0)
        for peer in peers:
            assert peer.is_closed()
            peer.socket.close()
        assert server.metrics()['connections_closed_total{reason="idle"}'] == 20


SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
import logstore
with logstore.open(sys.argv[1], durability="os") as store, logstore.KafkaServer(store) as server:
    store.create_topic("t")
    print(server.address[1], flush=True)
    sys.stdin.read()
"""


def test_a_process_with_200_descriptors(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "s")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        address = "127.0.0.1", int(process.stdout.readline())
        served = Peer(address)
        assert error_of_produce(served.ask(PRODUCE, 9, produce_body("t", batch(b"a")))) == 0
        crowd = [Peer(address) for _ in range(260)]
        assert error_of_produce(served.ask(PRODUCE, 9, produce_body("t", batch(b"b")))) == 0
        for peer in crowd:
            peer.socket.close()
        with Peer(address) as late:
            answer = late.ask(FETCH, 11, fetch_body("t", 0))
            assert answer["responses"][0]["partitions"][0]["high_watermark"] == 2
        served.socket.close()
        _, errors = process.communicate("", timeout=20)
        assert process.returncode == 0
        assert "Traceback" not in errors
        assert "Too many open files" in errors


# ---- fetches ----


def test_many_long_polls_end_with_one_append(store: Store, server: KafkaServer) -> None:
    store.create_topic("t")
    count = sized(50, 200, 800)
    peers = [Peer(server.address) for _ in range(count)]
    for peer in peers:
        peer.send(FETCH, 11, fetch_body("t", 0, max_wait_ms=600_000))
    until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == count)
    assert server.metrics()["worker_busy"] == 0, "a poll holds no thread"
    store["t"].append(b"x")
    for peer in peers:
        assert peer.receive(FETCH, 11)["responses"][0]["partitions"][0]["records"]
        peer.socket.close()
    assert server.metrics()['purgatory_size{kind="fetch"}'] == 0


def test_slow_readers_do_not_slow_down_a_fast_one(
    store: Store, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_topic("t")
    for _ in range(16):
        store["t"].append(os.urandom(500_000))
    asked = fetch_body("t", 0, max_bytes=50 * MIB)

    def fast() -> float:
        began = time.monotonic()
        with Peer(server.address) as peer:
            for _ in range(10):
                rows = peer.ask(FETCH, 11, asked)["responses"][0]["partitions"]
                assert len(rows[0]["records"]) > 7 * MIB
        return time.monotonic() - began

    alone = fast()
    slow = [Peer(server.address) for _ in range(sized(20, 100, 300))]
    for peer in slow:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.send(FETCH, 11, asked)
    until(lambda: server.metrics()['requests_total{api="Fetch"}'] == 10 + len(slow))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            for peer in slow[:5]:
                with contextlib.suppress(OSError):
                    peer.socket.recv(50_000)  # 1 MB a second

    thread = threading.Thread(target=trickle)
    thread.start()
    print(f"alone {alone:.2f} s, beside {len(slow)} slow readers {fast():.2f} s")
    stop.set()
    thread.join(10)
    assert server.metrics()["memory_unsent_bytes"] <= 64 * MIB + len(slow) * 256 * 1024
    monkeypatch.setattr(connection, "SEND_SECONDS", 0.0)
    until(lambda: server.connections == 0)
    for peer in slow:
        peer.socket.close()


# ---- memory ----


def test_many_large_produce_requests_share_the_memory(store: Store, server: KafkaServer) -> None:
    count, rows = sized(6, 50, 50), 10
    store.create_topic("t", partitions=rows)
    raw = batch(os.urandom(1_000_000))
    body = produce_body("t", None)
    body["topic_data"][0]["partition_data"] = [
        {"index": number, "records": raw} for number in range(rows)
    ]

    def produce(_: int) -> None:
        with Peer(server.address, timeout=60) as peer:
            [topic] = peer.ask(PRODUCE, 9, body)["responses"]
            assert [row["error_code"] for row in topic["partition_responses"]] == [0] * rows

    together(produce, count)
    assert server.metrics()["memory_peak_bytes"] <= 64 * MIB + 20 * MIB
    until(lambda: server.metrics()["memory_in_use_bytes"] == 0)
    assert store["t"][rows - 1].end_offset == count


# ---- groups ----


def sync_body(group: str, member: str, generation: int, members: list[str]) -> dict[str, Any]:
    return {
        "group_id": group,
        "generation_id": generation,
        "member_id": member,
        "assignments": [{"member_id": each, "assignment": each.encode()} for each in members],
    }


class Member(threading.Thread):
    """A member of a group: it beats, and joins again when the group rebalances."""

    def __init__(self, address: tuple[str, int], group: str) -> None:
        super().__init__()
        self.peer = Peer(address)
        self.group, self.id, self.generation = group, "", -1
        self.ends = threading.Event()
        self.vanishes = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self.peer:
                while not self.ends.wait(0.01):
                    if self.generation < 0 or self._beat():
                        self._join()
                if not self.vanishes:
                    self.peer.ask(LEAVE_GROUP, 0, {"group_id": self.group, "member_id": self.id})
        except BaseException as error:  # noqa: BLE001  looked at by the test
            self.error = error

    def _join(self) -> None:
        body = join_body(self.group, self.id, timeout_ms=sized(1500, 6000, 6000))
        joined = self.peer.ask(JOIN_GROUP, 5, body)
        self.id = joined["member_id"]
        if joined["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID:  # its session has ended
            self.id = ""
        if joined["error_code"]:
            return
        members = [each["member_id"] for each in joined["members"]]
        body = sync_body(self.group, self.id, joined["generation_id"], members)
        synced = self.peer.ask(SYNC_GROUP, 3, body)
        if synced["error_code"] == 0:
            assert bytes(synced["assignment"]) == self.id.encode()
            self.generation = joined["generation_id"]

    def _beat(self) -> int:
        body = {"group_id": self.group, "generation_id": self.generation, "member_id": self.id}
        code: int = self.peer.ask(HEARTBEAT, 3, body)["error_code"]
        return code


def test_a_group_of_many_members(store: Store) -> None:
    """All join, some leave, some vanish; the others are assigned again each time."""
    with KafkaServer(store, config={"group.min.session.timeout.ms": 1000}) as server:
        live_and_leave(server)


def live_and_leave(server: KafkaServer) -> None:
    members = [Member(server.address, "g") for _ in range(sized(8, 50, 50))]

    def settled(expected: list[Member]) -> bool:
        assert [each.error for each in members if each.error] == []
        with Peer(server.address) as peer:
            [group] = peer.ask(DESCRIBE_GROUPS, 0, {"groups": ["g"]})["groups"]
        found = {each["member_id"] for each in group["members"]}
        return group["group_state"] == "Stable" and found == {each.id for each in expected}

    for each in members:
        each.start()
    until(lambda: settled(members), 60)
    half = len(members) // 2
    leaving, vanishing, rest = members[: half // 2], members[half // 2 : half], members[half:]
    for each in vanishing:
        each.vanishes = True
    for gone in (leaving, vanishing):
        for each in gone:
            each.ends.set()
        expected = vanishing + rest if gone is leaving else rest
        until(lambda expected=expected: settled(expected), 60)  # type: ignore[misc]
    for each in rest:
        each.ends.set()
    for each in members:
        each.join(20)
        assert not each.is_alive()
        assert each.error is None
    with Peer(server.address) as peer:
        [group] = peer.ask(DESCRIBE_GROUPS, 0, {"groups": ["g"]})["groups"]
        assert group["members"] == []


def test_many_groups(server: KafkaServer) -> None:
    count = sized(40, 1_000, 1_000)
    with Peer(server.address) as peer:
        for number in range(count):
            assert peer.ask(JOIN_GROUP, 3, join_body(f"g{number}"))["error_code"] == 0
        listed = peer.ask(LIST_GROUPS, 0, {})["groups"]
        assert {each["group_id"] for each in listed} == {f"g{number}" for number in range(count)}


def test_requests_of_strangers_leave_no_state(store: Store, server: KafkaServer) -> None:
    """Groups and members that nobody made: refused, and nothing is kept."""
    with Peer(server.address) as peer:
        for number in range(sized(50, 5_000, 5_000)):
            group = f"unknown-7f-{number}"
            body = {"group_id": group, "generation_id": 1, "member_id": "m"}
            code = peer.ask(HEARTBEAT, 3, body)["error_code"]
            assert code == ErrorCode.UNKNOWN_MEMBER_ID
            body = {"group_id": group, "member_id": "m"}
            assert peer.ask(LEAVE_GROUP, 0, body)["error_code"] == ErrorCode.UNKNOWN_MEMBER_ID
            code = peer.ask(SYNC_GROUP, 3, sync_body(group, "m", 1, []))["error_code"]
            assert code == ErrorCode.UNKNOWN_MEMBER_ID
            code = peer.ask(JOIN_GROUP, 3, join_body(group, "m"))["error_code"]
            assert code == ErrorCode.UNKNOWN_MEMBER_ID
            peer.ask(DESCRIBE_GROUPS, 0, {"groups": [group]})
        assert peer.ask(LIST_GROUPS, 0, {})["groups"] == []
    groups = GroupCoordinator.of(store)
    assert list(groups.group_ids()) == []
    kept = [name for name, value in vars(groups).items() if "unknown-7f" in repr(value)]
    assert kept == []


# ---- metadata ----


def test_metadata_of_very_many_unknown_topics(store: Store) -> None:
    limit = sized(10, 100, 100)
    with KafkaServer(store, config={"logstore.auto.create.max.per.request": limit}) as server:
        codes = codes_of_unknown_topics(server)
    assert codes == [0] * limit + [ErrorCode.POLICY_VIOLATION] * (len(codes) - limit)
    assert len(store) == limit


def codes_of_unknown_topics(server: KafkaServer) -> list[int]:
    names = [{"name": f"n{number}"} for number in range(sized(10_000, 100_000, 100_000))]
    with Peer(server.address, timeout=60) as peer, Peer(server.address) as other:
        peer.send(METADATA, 8, {"topics": names, "allow_auto_topic_creation": True})
        assert other.ask(API_VERSIONS, 0, {})["error_code"] == 0
        return [row["error_code"] for row in peer.receive(METADATA, 8)["topics"]]
