"""The short way of Fetch: what it takes, it answers and counts as the long way does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
import logstore.format.batch
from logstore import KafkaServer, Store, _native
from logstore.kafka.apis import APIS
from logstore.kafka.protocol.codec import decoder
from logstore.kafka.protocol.frames import is_flexible, read_header, skip_tags
from tests.campaign import sized
from tests.kafka.peer import Peer, fetch_body, request
from tests.kafka.test_hostile import mutated

FETCH = 1
VERSIONS = range(4, APIS[FETCH].last + 1)


def body_of(topic: str, offset: int, topic_id: bytes = bytes(16), **more: Any) -> dict[str, Any]:
    """A request without a session."""
    body = fetch_body(topic, offset, **more)
    body["session_epoch"] = -1
    body["topics"][0]["topic_id"] = topic_id
    return body


def read(frame: bytes) -> tuple[Any, ...] | None:
    """Read a frame in the middle of a buffer, as a connection has it."""
    return _native.read_fetch(b"abc" + frame + b"abc", 3, len(frame))


def read_slowly(frame: bytes) -> tuple[Any, ...]:
    """The same values, by the schemas.  Raise one of MALFORMED if the frame is no request."""
    header, at = read_header(memoryview(frame))
    assert header.key == FETCH
    if is_flexible(FETCH, header.version):
        at = skip_tags(memoryview(frame), at)
    body, _ = decoder(FETCH, "request", header.version)(memoryview(frame), at, len(frame))
    assert max(body["replica_id"], body["replica_state"]["replica_id"]) == -1
    assert (body["session_id"], body["session_epoch"]) == (0, -1)
    assert body["forgotten_topics_data"] == []
    (topic,) = body["topics"]
    (row,) = topic["partitions"]
    name = topic["topic_id"] if header.version >= 13 else topic["topic"]
    most = min(body["max_bytes"], row["partition_max_bytes"])
    return (
        header.client_id, name, row["partition"], row["fetch_offset"], row["current_leader_epoch"],
        row["last_fetched_epoch"], body["max_wait_ms"], body["min_bytes"], most,
        {0: False, 1: True}[body["isolation_level"]],
    )  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("isolation", [0, 1])
def test_the_parser_reads_what_the_schemas_read(version: int, isolation: int) -> None:
    body = body_of("t", 1 << 40, bytes(range(16)), partition=3, isolation=isolation, min_bytes=5)
    body["rack_id"] = "a rack"
    frame = request(FETCH, version, body)[4:]
    assert read(frame) is not None
    assert read(frame) == read_slowly(frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_mutated_requests_are_read_as_by_the_schemas_or_not_at_all(version: int) -> None:
    dice = random.Random(version)
    whole = request(FETCH, version, body_of("a topic", 77))
    taken = 0
    for _ in range(sized(500, 5000, 200_000)):
        wrong = mutated(whole, dice)[4:]
        found = read(wrong)
        if found is not None:
            taken += 1
            assert found == read_slowly(wrong), wrong.hex()
    assert taken


def test_other_requests_are_left_to_the_long_way() -> None:
    session = fetch_body("t", 0)
    session["session_epoch"] = 0
    follower = body_of("t", 0) | {"replica_id": 2}
    two = body_of("t", 0)
    two["topics"] *= 2
    forgets = body_of("t", 0)
    forgets["forgotten_topics_data"] = [{"topic": "t", "partitions": [0]}]
    other = body_of("t", 0) | {"isolation_level": 2}
    for body in (session, follower, two, forgets, other):
        assert read(request(FETCH, 12, body)[4:]) is None
    frame = request(FETCH, 12, body_of("t", 0))[4:]
    assert read(frame) is not None
    assert read(frame + b"\0") is None
    assert read(frame[:-1]) is None
    for at, size in ((0, 4), (-1, 2), (2, 2), (0, -1), (1 << 62, 1)):
        with pytest.raises(ValueError, match="not in the buffer"):
            _native.read_fetch(b"abc", at, size)
    with pytest.raises(ValueError, match="common shape"):
        _native.fetch_answer(b"abc", 0, 3, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="too many records"):
        _native.fetch_answer(frame, 0, len(frame), 0, 0, 0, 1 << 31)


# ---- through a listener ----


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[KafkaServer]]:
    """A listener as it is, and one whose requests all take the long way: it has a fault."""
    with (
        logstore.open(tmp_path / "short", durability="os") as short,
        logstore.open(tmp_path / "long", durability="os") as long,
        KafkaServer(short) as first,
        KafkaServer(long) as second,
    ):
        for each in (first, second):
            log = each.store.create_topic("t", config={"segment.bytes": 1 << 16})[0]
            for number in range(40):
                log.append(b"%03d" % number * 1000, timestamp=1_700_000_000_000 + number)
        second.faults.delay("Heartbeat", 0)
        yield [first, second]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The answers that were made by the short way."""
    answers: list[tuple[bytes, bytes]] = []
    made = _native.fetch_answer

    def note(*args: Any) -> tuple[bytes, bytes]:
        answers.append(made(*args))
        return answers[-1]

    monkeypatch.setattr(_native, "fetch_answer", note)
    return answers


def topic_id(store: Store) -> bytes:
    found = store["t"].id
    assert found is not None
    return found.bytes


def both(servers: list[KafkaServer], version: int, **how: Any) -> list[bytes]:
    """Ask both listeners the same; return their answers."""
    answers = []
    for server in servers:
        number = topic_id(server.store)
        with Peer(server.address) as peer:
            peer.send(FETCH, version, body_of("t", topic_id=number, **how), client="me")
            answers.append(peer.frame().replace(number, b"-id-"))
    return answers


@pytest.mark.parametrize("version", VERSIONS)
def test_both_ways_send_the_same_bytes(
    servers: list[KafkaServer], taken: list[tuple[bytes, bytes]], version: int
) -> None:
    for isolation in (0, 1):
        for offset in (0, 7, 39):
            for most in (1, 5000, 40_000, 1 << 20):  # a batch, some, some segments
                one, other = both(
                    servers, version, offset=offset, max_bytes=most, isolation=isolation
                )
                assert one == other
    assert len(taken) == 2 * 3 * 4


@pytest.mark.parametrize(
    "how",
    [
        {"offset": 40},  # the end: nothing to send
        {"offset": 41},
        {"offset": -1},
        {"offset": 0, "partition": 1},
        {"offset": 39, "min_bytes": 1 << 20, "max_wait_ms": 50},  # too little: it waits
    ],
)
def test_what_is_refused_or_waits_is_left_to_the_long_way(
    servers: list[KafkaServer], taken: list[tuple[bytes, bytes]], how: dict[str, Any]
) -> None:
    one, other = both(servers, 12, **how)
    assert one == other
    assert not taken


def test_a_leader_epoch_of_another_time_is_refused(servers: list[KafkaServer]) -> None:
    for server in servers:
        server.store["t"][0].become_leader(5)
    for epoch in (4, 5, 6):
        answers = []
        for server in servers:
            body = body_of("t", 0)
            body["topics"][0]["partitions"][0]["current_leader_epoch"] = epoch
            with Peer(server.address) as peer:
                answers.append(peer.ask(FETCH, 12, body))
        assert answers[0] == answers[1]
        row = answers[0]["responses"][0]["partitions"][0]
        assert row["error_code"] == {4: 74, 5: 0, 6: 75}[epoch]


def test_aborted_transactions_are_left_to_the_long_way(
    servers: list[KafkaServer], taken: list[tuple[bytes, bytes]]
) -> None:
    for server in servers:
        log = server.store["t"][0]
        for sequence, commit in enumerate((True, False)):
            raw = logstore.BatchEncoder()
            raw.append(b"x", timestamp=1_700_000_000_100)
            log.append_batch(
                logstore.format.batch.with_producer(
                    raw.take(), producer_id=1, producer_epoch=0, base_sequence=sequence,
                    transactional=True,
                ),
                verify_transaction=False,
            )  # fmt: skip
            log.end_transaction(1, 0, commit=commit)
    answers = []
    for server in servers:
        with Peer(server.address) as peer:
            answers.append(peer.ask(FETCH, 12, body_of("t", 42, isolation=1)))
    for answer in answers:
        row = answer["responses"][0]["partitions"][0]
        assert row["aborted_transactions"] == [{"producer_id": 1, "first_offset": 42}]
    assert not taken


def test_an_open_transaction_bounds_both_ways(
    servers: list[KafkaServer], taken: list[tuple[bytes, bytes]]
) -> None:
    for server in servers:
        raw = logstore.BatchEncoder()
        raw.append(b"x", timestamp=1_700_000_000_100)
        server.store["t"][0].append_batch(
            logstore.format.batch.with_producer(
                raw.take(), producer_id=1, producer_epoch=0, base_sequence=0, transactional=True
            ),
            verify_transaction=False,
        )
    for isolation in (0, 1):
        one, other = both(servers, 12, offset=30, isolation=isolation)
        assert one == other
    assert len(taken) == 2


def test_both_ways_count_the_same(
    servers: list[KafkaServer], taken: list[tuple[bytes, bytes]]
) -> None:
    counted = []
    for server in servers:
        with Peer(server.address) as peer:
            for offset in (0, 7, 40):
                peer.ask(FETCH, 12, body_of("t", offset, max_bytes=9000))
            found = server.metrics()
        counted.append(
            {
                name: each
                for name, each in found.items()
                if "seconds" not in name or "_count" in name
            }
        )
    assert len(taken) == 2
    assert counted[0] == counted[1]
