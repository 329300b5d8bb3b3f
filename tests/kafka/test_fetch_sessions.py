"""Fetch sessions: a client names its partitions once, and gets the ones with news."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Partition, Store
from logstore.kafka.handlers import fetch as fetch_module
from logstore.kafka.handlers import fetch_sessions
from logstore.kafka.handlers.fetch_sessions import FetchRow, FetchSessions
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.server import KafkaServer
from logstore.kafka.waiting import Waiting
from tests.kafka.peer import Peer, fetch_body
from tests.kafka.test_waiting import Loop

FETCH = 1
Offsets = dict[int, int]  # by partition


class Fetcher:
    """A client that fetches partitions of topic "t" in a session."""

    def __init__(self, peer: Peer, version: int = 12) -> None:
        self.peer = peer
        self.version = version
        self.id = self.epoch = 0

    def body(self, offsets: Offsets, forget: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
        body = fetch_body("t", 0) | {"session_id": self.id, "session_epoch": self.epoch} | more
        body["topics"][0]["partitions"] = self.rows(offsets)
        if not offsets:
            body["topics"] = []
        return body | {"forgotten_topics_data": [{"topic": "t", "partitions": forget}]}

    @staticmethod
    def rows(offsets: Offsets) -> list[dict[str, Any]]:
        [row] = fetch_body("t", 0)["topics"][0]["partitions"]
        return [row | {"partition": number, "fetch_offset": at} for number, at in offsets.items()]

    def full(self, offsets: Offsets, **more: Any) -> dict[int, dict[str, Any]]:
        self.epoch = 0
        answer = self.peer.ask(FETCH, self.version, self.body(offsets, **more))
        self.id, self.epoch = answer["session_id"], 1
        return rows_of(answer)

    def next(self, offsets: Offsets | None = None, forget: tuple[int, ...] = (),
             **more: Any) -> dict[int, dict[str, Any]]:  # fmt: skip
        answer = self.peer.ask(FETCH, self.version, self.body(offsets or {}, forget, **more))
        assert answer["error_code"] == 0
        self.epoch += 1
        return rows_of(answer)

    def code(self, **more: Any) -> int:
        code: int = self.peer.ask(FETCH, self.version, self.body({}, **more))["error_code"]
        return code


def rows_of(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        row["partition_index"]: row for each in answer["responses"] for row in each["partitions"]
    }


@pytest.fixture
def logs(store: Store) -> list[Partition]:
    topic = store.create_topic("t", partitions=4)
    return [topic[number] for number in range(4)]


@pytest.fixture
def fetcher(peer: Peer) -> Fetcher:
    return Fetcher(peer)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sessions_of(server: KafkaServer) -> FetchSessions:
    assert server._broker is not None
    return server._broker.sessions


def test_an_answer_has_only_partitions_with_news(logs: list[Partition], fetcher: Fetcher) -> None:
    logs[1].append(b"x")
    assert sorted(fetcher.full(dict.fromkeys(range(3), 0))) == [0, 1, 2]
    assert fetcher.id > 0
    assert sorted(fetcher.next({1: 1})) == []
    logs[2].append(b"y")
    logs[3].append(b"not in the session")
    [(number, row)] = fetcher.next().items()
    assert (number, row["high_watermark"]) == (2, 1)
    assert bytes(row["records"])
    assert sorted(fetcher.next()) == [2], "until the client has it"
    assert sorted(fetcher.next({2: 1, 3: 1})) == [3], "a partition that is new is answered once"
    assert sorted(fetcher.next(forget=(2,))) == []
    logs[2].append(b"z")
    assert sorted(fetcher.next()) == []


def test_every_change_of_a_partition_is_noticed(
    store: Store, logs: list[Partition], fetcher: Fetcher
) -> None:
    for log in logs:
        log.extend([b"x"] * 4)
    fetcher.full(dict.fromkeys(range(4), 4))
    assert fetcher.next(current_leader_epoch=0) == {}
    logs[0].trim(2)
    assert fetcher.next()[0]["log_start_offset"] == 2
    logs[1].truncate(3)
    assert fetcher.next()[1]["error_code"] == ErrorCode.OFFSET_OUT_OF_RANGE
    assert fetcher.next({1: 3})[1]["high_watermark"] == 3
    assert fetcher.next() == {}
    store.delete_topic("t")
    assert {row["error_code"] for row in fetcher.next().values()} == {3}
    store.create_topic("t", partitions=2)
    answered = fetcher.next(dict.fromkeys(range(4), 0))
    assert [answered[n]["error_code"] for n in range(4)] == [0, 0, 3, 3]
    store["t"][1].append(b"again")
    assert bytes(fetcher.next(forget=(2, 3))[1]["records"])


def test_a_newer_leader_epoch_is_noticed(logs: list[Partition], fetcher: Fetcher) -> None:
    body = fetcher.body({0: 0})
    body["topics"][0]["partitions"][0]["current_leader_epoch"] = logs[0].leader_epoch
    fetcher.id = fetcher.peer.ask(FETCH, 12, body)["session_id"]
    fetcher.epoch = 1
    assert fetcher.next() == {}
    logs[0].become_leader(logs[0].leader_epoch + 1)
    assert fetcher.next()[0]["error_code"] == ErrorCode.FENCED_LEADER_EPOCH


def test_only_changed_partitions_are_looked_at(
    logs: list[Partition], fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    reading = fetch_module._Reading
    before = reading._read

    def counted(self: Any, row: Any, partition: Partition, answer: dict[str, Any]) -> bool:
        read.append(partition.name)
        return before(self, row, partition, answer)

    monkeypatch.setattr(reading, "_read", counted)
    fetcher.full(dict.fromkeys(range(4), 0))
    fetcher.next()
    read.clear()
    fetcher.next()
    assert read == []
    logs[2].append(b"x")
    fetcher.next()
    assert read == ["t-2"]


def test_an_append_is_seen_before_the_loop_is_woken(logs: list[Partition]) -> None:
    """An append that has returned is in the next answer, even if its wake-up is still queued."""
    loop = Loop()
    sessions = FetchSessions(1, Waiting(loop, loop), lambda: 0.0)  # type: ignore[arg-type]
    row = FetchRow("t", Fetcher.rows({0: 0})[0])
    row.partition = logs[0]
    made = sessions.create(False, [(row, {"high_watermark": 0, "log_start_offset": 0})], 1)
    session = sessions.begin(made, 1, False, {}, ())
    assert session is not None
    session.dirty.clear()
    logs[0].append(b"x")
    assert len(loop.calls) == 1
    sessions.begin(made, 2, False, {}, ())
    assert session.to_read() == [row]


def test_errors_of_sessions(logs: list[Partition], fetcher: Fetcher, server: KafkaServer) -> None:
    assert fetcher.code(session_id=7, session_epoch=1) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    fetcher.full({0: 0})
    assert fetcher.code(session_epoch=2) == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    fetcher.version = 13
    assert fetcher.code() == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    fetcher.version = 12
    assert fetcher.next() == {}
    assert server.metrics()["fetch_sessions"] == 1
    assert fetcher.code(session_epoch=-1) == 0, "ended"
    assert fetcher.code() == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    fetcher.full({0: 0})
    first = fetcher.id
    fetcher.full({0: 0})
    assert fetcher.code(session_id=first) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert fetcher.next(forget=(0,)) == {}
    assert fetcher.code() == ErrorCode.FETCH_SESSION_ID_NOT_FOUND, "no partition was left"
    assert server.metrics()["fetch_sessions"] == 0


def test_the_epoch_wraps_to_1(logs: list[Partition], fetcher: Fetcher, server: KafkaServer) -> None:
    fetcher.full({0: 0})
    sessions_of(server)._sessions[fetcher.id].epoch = fetcher.epoch = (1 << 31) - 1
    fetcher.next()
    fetcher.epoch = 1
    fetcher.next()


def test_a_session_is_not_bound_to_a_connection(
    logs: list[Partition], fetcher: Fetcher, server: KafkaServer
) -> None:
    fetcher.full({0: 0})
    fetcher.peer.socket.close()
    logs[0].append(b"x")
    with Peer(server.address) as fetcher.peer:
        assert sorted(fetcher.next()) == [0]


# ---- waiting ----


def test_a_session_waits_for_any_of_its_partitions(
    logs: list[Partition], fetcher: Fetcher, server: KafkaServer
) -> None:
    fetcher.full(dict.fromkeys(range(4), 0))
    for number in range(4):
        fetcher.peer.send(FETCH, 12, fetcher.body({}, max_wait_ms=60_000))
        with Peer(server.address) as other:
            other.ask(18, 0, {})
        logs[number].append(b"x")
        answer = fetcher.peer.receive(FETCH, 12)
        fetcher.epoch += 1
        assert sorted(rows_of(answer)) == [number]
        assert fetcher.next({number: 1}) == {}


def test_a_session_waits_for_enough_bytes(logs: list[Partition], fetcher: Fetcher) -> None:
    fetcher.full({0: 0, 1: 0})
    fetcher.peer.send(FETCH, 12, fetcher.body({}, max_wait_ms=60_000, min_bytes=1000))
    for number in range(8):
        logs[number % 2].append(bytes(200))
    rows = rows_of(fetcher.peer.receive(FETCH, 12))
    assert sum(len(row["records"]) for row in rows.values()) >= 1000


def test_an_unknown_topic_does_not_end_the_wait_for_another(
    logs: list[Partition], server: KafkaServer, peer: Peer
) -> None:
    body = fetch_body("t", 0, max_wait_ms=60_000)
    body["topics"] += fetch_body("nope", 0)["topics"]
    peer.send(FETCH, 12, body)
    with Peer(server.address) as other:
        other.ask(18, 0, {})
    logs[0].append(b"x")
    answer = peer.receive(FETCH, 12)
    codes = {each["topic"]: each["partitions"][0]["error_code"] for each in answer["responses"]}
    assert codes == {"t": 0, "nope": 3}


def test_a_request_ends_the_one_that_waits(
    logs: list[Partition], fetcher: Fetcher, server: KafkaServer
) -> None:
    fetcher.full({0: 0})
    with Peer(server.address) as other:
        other.send(FETCH, 12, fetcher.body({}, max_wait_ms=60_000))
        until(lambda: bool(server.metrics()['purgatory_size{kind="fetch"}']))
        fetcher.epoch += 1
        assert fetcher.next() == {}
        answer = other.receive(FETCH, 12)
        assert (answer["error_code"], answer["session_id"]) == (71, fetcher.id)


def test_no_partition_starves(logs: list[Partition], fetcher: Fetcher) -> None:
    for log in logs:
        for _ in range(20):
            log.append(bytes(100))
    offsets = dict.fromkeys(range(4), 0)
    served = []
    answer = fetcher.full(offsets, max_bytes=150)
    for _ in range(12):
        [number] = [number for number, row in answer.items() if bytes(row["records"])]
        served.append(number)
        offsets[number] += 1
        answer = fetcher.next({number: offsets[number]}, max_bytes=150)
    assert sorted(served[1:9]) == [0, 0, 1, 1, 2, 2, 3, 3]


# ---- bounds ----


@pytest.fixture
def clock(server: KafkaServer) -> list[float]:
    now = [0.0]
    sessions_of(server)._time = lambda: now[0]
    return now


def test_the_number_of_sessions_is_bounded(
    logs: list[Partition], server: KafkaServer, peer: Peer, clock: list[float]
) -> None:
    sessions_of(server)._slots = 2
    small, large, third = Fetcher(peer), Fetcher(peer), Fetcher(peer)
    small.full({0: 0})
    large.full({0: 0, 1: 0})
    third.full({0: 0, 1: 0, 2: 0})
    assert third.id == 0, "the others are new"
    clock[0] = 100
    small.next()
    large.next()
    clock[0] = 130
    third.full({0: 0})
    assert third.id == 0, "no other is smaller"
    third.full({0: 0, 1: 0, 2: 0})
    assert third.id, "in the place of the smallest"
    assert small.code() == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    large.next()
    clock[0] = 200
    third.next()
    clock[0] = 260
    small.full({0: 0})
    assert small.id, "in the place of the one that is not used"
    assert large.code() == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(sessions_of(server)) == 2


def test_the_rows_of_all_sessions_are_bounded(
    logs: list[Partition], server: KafkaServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_sessions, "ROWS_MAX", 5)
    first, second = Fetcher(peer), Fetcher(peer)
    first.full(dict.fromkeys(range(4), 0))
    second.full({0: 0, 1: 0})
    assert second.id == 0
    second.full({0: 0})
    assert second.id
    assert second.peer.ask(FETCH, 12, second.body({1: 0}))["error_code"] == 70
    second.full({})
    body = second.body({0: 0}, session_id=second.id, session_epoch=1)
    body["topics"][0]["topic"] = "n" * 1000
    assert peer.ask(FETCH, 12, body)["error_code"] == 70, "a long name counts for more"
    first.next(forget=(0, 1, 2, 3))
    assert sessions_of(server)._weight == 0


def test_an_unused_session_releases_its_partitions(
    logs: list[Partition], server: KafkaServer, fetcher: Fetcher, clock: list[float]
) -> None:
    fetcher.full(dict.fromkeys(range(4), 0))
    fetcher.next()
    [session] = sessions_of(server)._sessions.values()
    assert session._by_partition
    clock[0] = 61
    until(lambda: not session._by_partition)  # the server looks once a second
    assert not session.watch.changed
    logs[3].append(b"x")
    assert sorted(fetcher.next()) == [3]
    assert len(session._by_partition) == 4


# ---- stores ----


def test_partitions_are_opened_by_a_worker(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="os") as store:
        store.create_topic("t", partitions=3)[2].append(b"x")
    with (
        logstore.open(tmp_path / "s") as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        fetcher = Fetcher(peer)
        rows = fetcher.full(dict.fromkeys(range(4), 0))
        assert [rows[n]["error_code"] for n in range(4)] == [0, 0, 0, 3]
        assert bytes(rows[2]["records"])
        assert sorted(fetcher.next({2: 1})) == [3]


def test_a_readonly_store_is_looked_at_each_time(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "s", durability="os") as writer:
        log = writer.create_topic("t", partitions=2)[0]
        with (
            logstore.open(tmp_path / "s", readonly=True) as store,
            KafkaServer(store) as server,
            Peer(server.address) as peer,
        ):
            fetcher = Fetcher(peer)
            fetcher.full({0: 0, 1: 0})
            assert fetcher.next() == {}
            log.append(b"x")
            assert sorted(fetcher.next()) == [0]


@pytest.mark.parametrize("seed", range(4))
def test_a_session_shows_what_full_fetches_show(store: Store, peer: Peer, seed: int) -> None:
    """A client that keeps the last row of each partition knows what a full fetch would answer."""
    chance = random.Random(seed)
    topic = store.create_topic("t", partitions=6)
    fetcher, plain = Fetcher(peer), Fetcher(peer)
    offsets: Offsets = dict.fromkeys(range(3), 0)
    known = fetcher.full(offsets)
    for _ in range(150):
        number = chance.randrange(6)
        changed: Offsets = {}
        gone: tuple[int, ...] = ()
        act = chance.randrange(5)
        log = topic[number]
        if act == 0:
            log.extend([b"v"] * chance.randrange(1, 3))
        elif act == 1:
            log.trim(chance.randint(log.start_offset, log.end_offset))
        elif act == 2:
            changed[number] = chance.randint(0, log.end_offset)
        elif act == 3 and len(offsets) > 1 and number in offsets:
            gone = (number,)
        else:
            changed = {each: topic[each].end_offset for each in offsets}
        answered = fetcher.next(changed, gone)
        offsets |= changed
        for each in gone:
            del offsets[each], known[each]
        known |= answered
        plain.epoch = -1
        shown = rows_of(peer.ask(FETCH, 12, plain.body(offsets)))
        assert known.keys() == shown.keys()
        for each, row in shown.items():
            for field in ("error_code", "high_watermark", "log_start_offset"):
                assert known[each][field] == row[field], (each, field)
            assert bytes(row["records"]) in (b"", bytes(answered.get(each, row)["records"]))
            assert not bytes(row["records"]) or each in answered
