"""The short way of Produce: what it takes, it answers, appends and counts as the long way does."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import KafkaServer, Store, _native
from logstore.errors import IndeterminateAppendError
from logstore.kafka.protocol.codec import MALFORMED, decoder
from logstore.kafka.protocol.frames import is_flexible, read_header, skip_tags
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, produce_body, request
from tests.kafka.test_hostile import mutated

PRODUCE = 0
VERSIONS = range(3, 14)


def frame_of(version: int, topic: str = "t", topic_id: bytes = bytes(16), **more: Any) -> bytes:
    """A request that the short way takes, without its size."""
    body = produce_body(topic, batch(b"x", b"yy"), **more)
    body["topic_data"][0]["topic_id"] = topic_id
    return request(PRODUCE, version, body)[4:]


def read(frame: bytes) -> tuple[str, str | bytes, int, int, int] | None:
    """Read a frame in the middle of a buffer, as a connection has it."""
    return _native.read_produce(b"abc" + frame + b"abc", 3, len(frame))


def read_slowly(frame: bytes) -> tuple[str, str | bytes, int, bytes]:
    """The same values, by the schemas.  Raise one of MALFORMED if the frame is no request."""
    header, at = read_header(memoryview(frame))
    assert header.key == PRODUCE
    if is_flexible(PRODUCE, header.version):
        at = skip_tags(memoryview(frame), at)
    body, _ = decoder(PRODUCE, "request", header.version)(memoryview(frame), at, len(frame))
    assert body["transactional_id"] is None
    assert body["acks"] in (1, -1)
    (topic,) = body["topic_data"]
    (row,) = topic["partition_data"]
    name = topic["topic_id"] if header.version >= 13 else topic["name"]
    return header.client_id, name, row["index"], bytes(row["records"])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_parser_reads_what_the_schemas_read(version: int) -> None:
    frame = frame_of(version, topic_id=bytes(range(16)), partition=3, acks=1)
    found = read(frame)
    assert found is not None
    client, topic, number, position, size = found
    records = (b"abc" + frame)[position : position + size]
    assert (client, topic, number, records) == read_slowly(frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_mutated_requests_are_read_as_by_the_schemas_or_not_at_all(version: int) -> None:
    dice = random.Random(version)
    frame = frame_of(version, topic="a topic")
    taken = 0
    for _ in range(sized(500, 5000, 200_000)):
        wrong = mutated(bytes(4) + frame, dice)[4:]
        found = read(wrong)
        if found is None:
            continue
        taken += 1
        client, topic, number, position, size = found
        records = (b"abc" + wrong)[position : position + size]
        assert (client, topic, number, records) == read_slowly(wrong), wrong.hex()
    assert taken


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(9, acks=0),
        frame_of(9, acks=2),
        frame_of(9, transactional_id="x"),
        frame_of(9) + b"\0",
        frame_of(9)[:-1],
        request(PRODUCE, 9, produce_body("t", batch(b"x", compression="gzip")))[4:],
        request(PRODUCE, 9, produce_body("t", batch(b"x") + batch(b"y")))[4:],
        request(PRODUCE, 9, produce_body("t", None))[4:],
        request(PRODUCE, 9, produce_body("t", b"short"))[4:],
        request(1, 9, {})[4:],
        b"",
    ],
)
def test_other_requests_are_left_to_the_long_way(frame: bytes) -> None:
    assert read(frame) is None


def test_a_frame_outside_the_buffer_is_refused() -> None:
    for at, size in ((0, 4), (-1, 2), (2, 2), (0, -1), (1 << 62, 1)):
        with pytest.raises(ValueError, match="not in the buffer"):
            _native.read_produce(b"abc", at, size)
    with pytest.raises(ValueError, match="common shape"):
        _native.produce_answer(b"abc", 0, 3, 0, 0, 0)


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
            each.store.create_topic("t")
            each.store.create_topic("small", config={"max.message.bytes": 1000})
            each.store["small"][0].append(b"opens it")
            each.store["t"][0].append(b"the first change of a log is a worker's")
        second.faults.delay("Heartbeat", 0)
        yield [first, second]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The answers that were made by the short way."""
    answers: list[bytes] = []
    made = _native.produce_answer

    def note(*args: Any) -> bytes:
        answers.append(made(*args))
        return answers[-1]

    monkeypatch.setattr(_native, "produce_answer", note)
    return answers


def topic_id(store: Store) -> bytes:
    found = store["t"].id
    assert found is not None
    return found.bytes


@pytest.mark.parametrize("version", VERSIONS)
def test_both_ways_send_the_same_bytes(
    servers: list[KafkaServer], taken: list[bytes], version: int
) -> None:
    answers = []
    for server in servers:
        number = topic_id(server.store)
        with Peer(server.address) as peer:
            frames = []
            for _ in range(3):
                body = produce_body("t", batch(b"x", b"y"))
                body["topic_data"][0]["topic_id"] = number
                peer.send(PRODUCE, version, body, client="me")
                frames.append(peer.frame().replace(number, b"-id-"))
            answers.append(frames)
    assert len(taken) == 3
    assert answers[0] == answers[1]
    for server in servers:
        assert [each.value for each in server.store["t"][0]][1:] == [b"x", b"y"] * 3
        server.store["t"][0].check()


def test_both_ways_count_the_same(servers: list[KafkaServer], taken: list[bytes]) -> None:
    counted = []
    for server in servers:
        with Peer(server.address) as peer:
            for records in (batch(b"x"), batch(b"x", b"y"), batch(b"z", compression="gzip")):
                peer.ask(PRODUCE, 9, produce_body("t", records))
            assert "client 'peer'" in repr(next(iter(server._broker.connections)))  # type: ignore[union-attr]
            found = server.metrics()
        counted.append(
            {
                name: value
                for name, value in found.items()
                if "seconds" not in name or "_count" in name
            }
        )
    assert len(taken) == 2
    assert counted[0] == counted[1]


def test_large_requests_are_left_to_a_worker(
    servers: list[KafkaServer], taken: list[bytes]
) -> None:
    server = servers[0]
    with Peer(server.address) as peer:
        for size in (100, 60_000, 200_000):
            peer.ask(PRODUCE, 9, produce_body("t", batch(b"x" * size)))
        assert len(taken) == 3
        assert server.metrics()['worker_requests_total{api="Produce"}'] == 0
        peer.ask(PRODUCE, 9, produce_body("t", batch(b"x" * 300_000)))
        assert len(taken) == 3
        assert server.metrics()['worker_requests_total{api="Produce"}'] == 1
    assert [len(each.value or b"") for each in server.store["t"][0]][1:] == [
        100, 60_000, 200_000, 300_000
    ]  # fmt: skip


def test_both_ways_refuse_the_same(servers: list[KafkaServer], taken: list[bytes]) -> None:
    broken = bytearray(batch(b"x"))
    broken[-1] ^= 1
    refused = (
        ("t", bytes(broken), 0),
        ("t", batch(b"x"), 1),
        ("t", batch(b"x"), -1),
        ("unknown", batch(b"x"), 0),
        ("__consumer_offsets", batch(b"x"), 0),
        ("small", batch(b"x" * 2000), 0),
        ("t", batch(b"x", producer=(5, 1, 0)), 0),
        ("t", batch(b"x", producer=(5, 1, 0)), 0),  # again: a duplicate
        ("t", batch(b"x", producer=(5, 1, 7)), 0),  # out of order
        ("t", batch(b"x", producer=(5, 0, 0)), 0),  # fenced
    )
    answers = []
    for server in servers:
        with Peer(server.address) as peer:
            rows = [
                peer.ask(PRODUCE, 9, produce_body(topic, records, partition=number))
                for topic, records, number in refused
            ]
        answers.append(rows)
        assert server.store["t"][0].end_offset == 2
    for answer in (answers[0][-3], answers[1][-3]):  # a retry is answered with the batch's time
        answer["responses"][0]["partition_responses"][0].pop("log_append_time_ms")
    assert answers[0] == answers[1]


def test_a_request_that_is_logged_takes_the_long_way(
    servers: list[KafkaServer], taken: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "logstore.kafka.request"):
        broker = servers[0]._broker
        assert broker is not None
        broker.check_times()  # asks whether the log is wanted; else once a second
        with Peer(servers[0].address) as peer:
            peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
    assert not taken
    assert any('"api": "Produce"' in each.message for each in caplog.records)


def test_an_append_that_fails_half_way_is_not_tried_again(
    servers: list[KafkaServer], taken: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(*args: object) -> bool:
        tried.append(args)
        raise IndeterminateAppendError("the write failed", offsets=range(1, 2))

    class Broken:
        next_offset = 1
        append_plain = append_placed = append_raw = fail

    answers = []
    for server in servers:
        monkeypatch.setattr(server.store["t"][0].parts.active, "writer", Broken())
        with Peer(server.address) as peer:
            answers.append(peer.ask(PRODUCE, 9, produce_body("t", batch(b"x"))))
    assert answers[0]["responses"][0]["partition_responses"][0]["error_code"] == 56
    assert answers[0] == answers[1]
    assert not taken
    assert len(tried) == 2


def test_with_fsync_the_answer_waits_for_the_disk(tmp_path: Path, taken: list[bytes]) -> None:
    with (
        logstore.open(tmp_path / "store", durability="fsync") as store,
        KafkaServer(store) as server,
    ):
        store.create_topic("t")
        store["t"][0].append(b"first")
        with Peer(server.address) as peer:
            peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
        assert store["t"][0].durable_offset == 2
    assert not taken


def test_mutated_bytes_are_no_exception_of_the_parser() -> None:
    dice = random.Random(1)
    for _ in range(2000):
        frame = dice.randbytes(dice.randrange(120))
        found = read(frame)
        if found is not None:
            try:
                read_slowly(frame)
            except MALFORMED as error:
                pytest.fail(f"{frame.hex()}: {error}")
