"""Peers that are hostile or broken: each gets a closed socket or an error, and harms no other."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import BatchEncoder, KafkaServer, Store
from logstore.kafka.network import connection
from logstore.kafka.protocol.errors import ErrorCode
from logstore.testing import check_invariants
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, fetch_body, produce_body, request
from tests.kafka.test_server import join_body, until

PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, API_VERSIONS = 8, 10, 11, 12, 18
MIB = 1 << 20


@contextlib.contextmanager
def serving(store: Store, **config: Any) -> Iterator[KafkaServer]:
    with KafkaServer(store, config=config) as server:
        yield server


@pytest.fixture(autouse=True)
def topic(store: Store) -> None:
    store.create_topic("t")


@pytest.fixture(autouse=True)
def others_are_not_harmed(server: KafkaServer) -> Iterator[None]:
    """A client that was there before is served as before, and no memory is held."""
    with Peer(server.address) as peer:
        yield
        if not server.closed:
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
            until(lambda: server.metrics()["memory_in_use_bytes"] == 0)


def closed_for(server: KafkaServer, reason: str) -> float:
    return server.metrics().get(f'connections_closed_total{{reason="{reason}"}}', 0)


# ---- no frames ----

FOREIGN = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "": b"\xff\xfe\xfd\xfc" * 20,
}


@pytest.mark.parametrize("protocol", FOREIGN)
def test_another_protocol_is_closed_and_named(
    server: KafkaServer, caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    with caplog.at_level(logging.INFO, "logstore.kafka"), Peer(server.address) as peer:
        peer.socket.sendall(FOREIGN[protocol])
        assert peer.is_closed()
        until(lambda: closed_for(server, "size") == 1)
    [line] = [each.getMessage() for each in caplog.records if "closed" in each.getMessage()]
    assert ("(the client sends " + protocol in line) if protocol else "sends" not in line


@pytest.mark.parametrize("size", [2**31 - 1, -1, -(2**31), *range(10)])
def test_a_size_that_no_frame_has(server: KafkaServer, size: int) -> None:
    with Peer(server.address) as peer:
        peer.socket.sendall(struct.pack(">i", size) + bytes(8))
        assert peer.is_closed()
    assert server.metrics()["memory_peak_bytes"] == 0


def test_refused_peers_get_few_lines_in_the_log(
    server: KafkaServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "logstore.kafka"):
        for _ in range(60):
            with Peer(server.address) as peer:
                peer.socket.sendall(FOREIGN["HTTP"])
                assert peer.is_closed()
        until(lambda: closed_for(server, "size") == 60)
        until(lambda: "more connections" in caplog.text)
    assert caplog.text.count("sends HTTP") <= 30


# ---- half frames ----


@pytest.mark.parametrize("size", [1, 5, 60])
def test_half_a_frame_then_silence(store: Store, server: KafkaServer, size: int) -> None:
    server.close()
    with (
        serving(store, logstore_request_read_timeout_ms=100) as impatient,
        Peer(impatient.address) as peer,
        Peer(impatient.address) as idle,
    ):
        peer.socket.sendall(request(PRODUCE, 9, produce_body("t", batch(b"x")))[:size])
        assert peer.is_closed()
        until(lambda: closed_for(impatient, "slow") == 1)
        assert idle.ask(API_VERSIONS, 0, {})["error_code"] == 0, "idle is not slow"


def test_a_byte_at_a_time(store: Store, server: KafkaServer) -> None:
    server.close()
    with serving(store, logstore_request_read_timeout_ms=300) as impatient:
        with Peer(impatient.address) as peer:
            whole = request(API_VERSIONS, 0, {})
            for each in whole:  # fast enough
                peer.socket.sendall(bytes((each,)))
            peer.receive(API_VERSIONS, 0)
            with pytest.raises(OSError):  # reset, or broken pipe
                for each in request(PRODUCE, 9, produce_body("t", batch(b"x" * 1000))):
                    peer.socket.sendall(bytes((each,)))
                    time.sleep(0.05)
        assert closed_for(impatient, "slow") == 1
    assert not list(store["t"][0])


@pytest.mark.parametrize("hard", [False, True], ids=["FIN", "RST"])
def test_half_a_frame_then_the_end(store: Store, server: KafkaServer, hard: bool) -> None:
    whole = request(PRODUCE, 9, produce_body("t", batch(bytes(500_000))))
    peer = Peer(server.address)
    peer.socket.sendall(whole[:-1])
    until(lambda: server.metrics()["memory_in_use_bytes"] > 0)
    if hard:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.socket.close()
    until(lambda: server.metrics()["memory_in_use_bytes"] == 0)
    assert not list(store["t"][0])


def test_a_claimed_size_costs_nothing(server: KafkaServer) -> None:
    peers = [Peer(server.address) for _ in range(20)]
    for peer in peers:
        peer.socket.sendall(struct.pack(">ihh", 90 * MIB, PRODUCE, 9) + bytes(3000))
    until(lambda: server.metrics()["request_bytes_total"] > 60_000)
    assert server.metrics()["memory_peak_bytes"] == 0, "the bytes fit into the buffers at rest"
    for peer in peers:
        peer.socket.close()


def test_large_requests_wait_for_memory_and_all_are_served(
    store: Store, server: KafkaServer
) -> None:
    server.close()
    count, size = 12, 700_000
    with serving(store, queued_max_request_bytes=2 * MIB) as small:
        peers = [Peer(small.address) for _ in range(count)]
        frame = request(PRODUCE, 9, produce_body("t", batch(os.urandom(size))))
        senders = [threading.Thread(target=each.socket.sendall, args=(frame,)) for each in peers]
        for sender in senders:
            sender.start()
        for peer in peers:
            row = peer.receive(PRODUCE, 9)["responses"][0]["partition_responses"][0]
            assert row["error_code"] == 0
            peer.socket.close()
        for sender in senders:
            sender.join(10)
        assert small.metrics()["memory_peak_bytes"] <= 2 * MIB
        until(lambda: small.metrics()["memory_in_use_bytes"] == 0)
    assert store["t"][0].end_offset == count


def test_a_request_above_the_whole_budget_is_served(store: Store, server: KafkaServer) -> None:
    server.close()
    store.create_topic("wide", partitions=9)
    rows = [{"index": number, "records": batch(os.urandom(900_000))} for number in range(9)]
    body = produce_body("wide", None) | {"topic_data": [{"name": "wide", "partition_data": rows}]}
    with serving(store, queued_max_request_bytes=2 * MIB) as small:
        peers = [Peer(small.address) for _ in range(4)]
        frame = request(PRODUCE, 9, body)
        senders = [threading.Thread(target=each.socket.sendall, args=(frame,)) for each in peers]
        for sender in senders:
            sender.start()
        for peer in peers:
            rows = peer.receive(PRODUCE, 9)["responses"][0]["partition_responses"]
            assert {row["error_code"] for row in rows} == {0}
        for peer, sender in zip(peers, senders, strict=True):
            sender.join(10)
            peer.socket.close()
        assert small.metrics()["memory_peak_bytes"] <= 2 * MIB + 2 * len(frame)
        until(lambda: small.metrics()["memory_in_use_bytes"] == 0)
    assert store["wide"][8].end_offset == 4


def test_large_fetches_that_wait_do_not_hold_the_memory_of_others(
    store: Store, server: KafkaServer
) -> None:
    """Kafka ignores bytes after a request: they make it large."""
    server.close()
    body = request(FETCH, 11, fetch_body("t", 0, max_wait_ms=600_000))[4:] + bytes(900_000)
    with serving(store, queued_max_request_bytes=MIB) as small, Peer(small.address) as peer:
        fetching = [Peer(small.address) for _ in range(5)]
        for each in fetching:
            each.socket.sendall(struct.pack(">i", len(body)) + body)
        until(lambda: small.metrics()['purgatory_size{kind="fetch"}'] == len(fetching))
        # A fetch counts as waiting a moment before its buffer is returned.
        until(lambda: small.metrics()["memory_in_use_bytes"] == 0)
        answer = peer.ask(PRODUCE, 9, produce_body("t", batch(os.urandom(900_000))))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
        for each in fetching:
            assert each.receive(FETCH, 11)["responses"][0]["partitions"][0]["records"]
            each.socket.close()


# ---- frames whose inside is wrong ----


def framed(key: int, version: int, body: bytes) -> bytes:
    data = struct.pack(">hhih", key, version, 1, -1) + body
    return struct.pack(">i", len(data)) + data


INSIDES = {
    "cut off": framed(METADATA, 1, struct.pack(">i", 1)),
    "a count of 2^31 - 1": framed(METADATA, 1, struct.pack(">i", 2**31 - 1)),
    "a negative count": framed(METADATA, 1, struct.pack(">i", -2)),
    "more elements than bytes": framed(METADATA, 1, struct.pack(">i", 1000) + bytes(100)),
    "a varint without an end": framed(METADATA, 9, b"\0" + b"\xff" * 20),
    "bad UTF-8": framed(METADATA, 1, struct.pack(">ih", 1, 2) + b"\xff\xfe"),
    "a null name": framed(METADATA, 1, struct.pack(">ih", 1, -1)),
    "a string beyond the frame": framed(METADATA, 1, struct.pack(">ih", 1, 30_000) + b"a"),
    "a client id beyond the frame": struct.pack(">ihhih", 10, METADATA, 1, 1, 500),
    "tags that descend": framed(METADATA, 9, b"\2\2\0\1\0"),
    "records beyond the frame": framed(
        PRODUCE,
        8,
        struct.pack(">hhiih", -1, -1, 1000, 1, 1) + b"t" + struct.pack(">iii", 1, 0, 9999),
    ),
}


@pytest.mark.parametrize("what", INSIDES)
def test_a_frame_whose_inside_is_wrong(server: KafkaServer, what: str) -> None:
    with Peer(server.address) as peer:
        peer.socket.sendall(INSIDES[what] + request(API_VERSIONS, 0, {}))
        assert peer.is_closed(), "and the next request is not begun"
    until(lambda: closed_for(server, "malformed") == 1)


def test_malformed_frames_do_not_use_the_memory_up(server: KafkaServer) -> None:
    """More than the whole budget, in frames that are too large for a connection at rest."""
    bad = framed(METADATA, 1, struct.pack(">i", 2**31 - 1) + bytes(MIB))
    for _ in range(80):
        with Peer(server.address) as peer:
            with contextlib.suppress(OSError):
                peer.socket.sendall(bad)
            assert peer.is_closed()
    until(lambda: server.metrics()["memory_in_use_bytes"] == 0)
    assert closed_for(server, "malformed") == 80


@pytest.mark.parametrize(
    ("key", "version"), [(4, 0), (999, 0), (-1, 0), (METADATA, 99), (METADATA, -1), (FETCH, 3)]
)
def test_an_api_or_version_that_is_not_served(server: KafkaServer, key: int, version: int) -> None:
    with Peer(server.address) as peer:
        peer.socket.sendall(framed(key, version, bytes(20)))
        assert peer.is_closed()
    until(lambda: closed_for(server, "version") == 1)


def test_a_version_of_api_versions_that_is_not_served(server: KafkaServer) -> None:
    with Peer(server.address) as peer:
        peer.socket.sendall(framed(API_VERSIONS, 77, b"what is this"))
        answer = peer.receive(API_VERSIONS, 0)
        assert answer["error_code"] == ErrorCode.UNSUPPORTED_VERSION
        assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0, "the connection stays"


# ---- batches ----


def test_batches_that_lie(store: Store, server: KafkaServer) -> None:
    raw = batch(b"abc")
    lies = {
        "checksum": raw[:17] + bytes([raw[17] ^ 1]) + raw[18:],
        "length": raw[:8] + struct.pack(">i", 10**9) + raw[12:],
        "count": raw[:57] + struct.pack(">i", 10**9) + raw[61:],
        "compression": raw[:22] + bytes([raw[22] | 1]) + raw[23:],
    }
    with Peer(server.address) as peer:
        for what, lie in lies.items():
            answer = peer.ask(PRODUCE, 9, produce_body("t", lie))
            code = answer["responses"][0]["partition_responses"][0]["error_code"]
            assert code in (ErrorCode.CORRUPT_MESSAGE, ErrorCode.INVALID_RECORD), what
        answer = peer.ask(PRODUCE, 9, produce_body("t", raw))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
    assert [record.value for record in store["t"][0]] == [b"abc"]


def test_a_decompression_bomb(store: Store, server: KafkaServer) -> None:
    store.create_topic("small", config={"max.decompressed.message.bytes": MIB})
    for codec in ("gzip", "zstd", "lz4", "snappy"):
        encoder = BatchEncoder(compression=codec, config={"max.message.bytes": 32 * MIB})
        encoder.append(bytes(8 * MIB))
        bomb = encoder.take()
        assert len(bomb) < MIB
        with Peer(server.address) as peer:
            answer = peer.ask(PRODUCE, 9, produce_body("small", bomb))
            code = answer["responses"][0]["partition_responses"][0]["error_code"]
            assert code == ErrorCode.MESSAGE_TOO_LARGE, codec  # clients split it, or give up
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
    assert store["small"][0].end_offset == 0


# ---- too many requests ----


def test_thousands_of_requests_at_once_are_answered_in_order(server: KafkaServer) -> None:
    count = 5000
    with Peer(server.address) as peer:
        frames = b"".join(
            request(METADATA, 1, {"topics": []}, correlation_id=number % 7)
            for number in range(count)
        )
        sender = threading.Thread(target=peer.socket.sendall, args=(frames,))
        sender.start()
        for number in range(count):
            (got,) = struct.unpack_from(">i", peer.frame())
            assert got == number % 7
        sender.join(10)
    assert server.metrics()["memory_peak_bytes"] == 0, "one buffer at rest is read ahead"


def fill(store: Store, size: int) -> None:
    for _ in range(size // 500_000):
        store["t"].append(os.urandom(500_000))


def test_a_peer_that_reads_nothing(
    store: Store, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 20 * MIB)
    asked = fetch_body("t", 0, max_bytes=50 * MIB)
    with Peer(server.address) as stuck, Peer(server.address) as peer:
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            stuck.send(FETCH, 11, asked)
        until(lambda: server.metrics().get('requests_total{api="Fetch"}') == 1)
        rows = peer.ask(FETCH, 11, asked)["responses"][0]["partitions"]
        assert len(rows[0]["records"]) > 19 * MIB, "another reader is not slowed down"
        # One answer is being sent, one is next; the other requests are not begun.
        assert server.metrics()['requests_total{api="Fetch"}'] <= 3
        monkeypatch.setattr(connection, "SEND_SECONDS", 0.0)
        until(lambda: closed_for(server, "slow") == 1)


@pytest.mark.parametrize("gone", ["deleted", "closed"])
def test_a_log_that_is_gone_while_its_records_are_sent(
    store: Store, server: KafkaServer, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    """The frame cannot be completed: its peer is closed, and does not wait for the rest."""
    fill(store, 30 * MIB)  # more than the buffers of the sockets
    with Peer(server.address) as slow:
        slow.send(FETCH, 11, fetch_body("t", 0, max_bytes=50 * MIB))
        size = struct.unpack(">i", slow._exactly(4))[0]
        assert size > 29 * MIB
        if gone == "deleted":
            store.delete_topic("t")
        else:
            store["t"][0].close()
        with pytest.raises((EOFError, ConnectionResetError)):
            slow._exactly(size)
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_a_refused_peer_that_reads_nothing_is_not_kept(
    store: Store, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than the write buffer is left to send, and the peer never takes it."""
    fill(store, 6 * MIB)
    with Peer(server.address) as stuck:
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for size in (600_000,) * 30:
            stuck.send(FETCH, 11, fetch_body("t", 0, max_bytes=size))
        stuck.socket.sendall(FOREIGN["HTTP"])
        time.sleep(0.2)
        monkeypatch.setattr(connection, "SEND_SECONDS", 0.0)
        until(lambda: server.connections == 1)


# ---- too many connections ----


def test_a_thousand_idle_connections(server: KafkaServer) -> None:
    peers: list[Peer] = []
    while len(peers) < 990:
        peers.extend(Peer(server.address) for _ in range(90))  # the backlog holds 128
        until(lambda: server.connections == len(peers) + 1)
    assert peers[500].ask(API_VERSIONS, 0, {})["error_code"] == 0
    assert server.metrics()["memory_in_use_bytes"] == 0
    assert len([each for each in threading.enumerate() if "logstore kafka" in each.name]) <= 6
    for peer in peers:
        peer.socket.close()
    until(lambda: server.connections == 1)


def test_the_limit_of_connections(store: Store, server: KafkaServer) -> None:
    server.close()
    with serving(store, max_connections=3) as limited:
        peers = [Peer(limited.address) for _ in range(3)]
        for peer in peers:
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
        with Peer(limited.address, timeout=0.2) as waiting:
            waiting.send(API_VERSIONS, 0, {})
            with pytest.raises(TimeoutError):
                waiting.frame()
            assert limited.connections == 3
            peers.pop().socket.close()
            waiting.socket.settimeout(10)
            assert waiting.receive(API_VERSIONS, 0)["error_code"] == 0
        for peer in peers:
            assert peer.ask(API_VERSIONS, 0, {})["error_code"] == 0
            peer.socket.close()


def test_the_limit_of_one_address(store: Store, server: KafkaServer) -> None:
    server.close()
    with serving(store, max_connections_per_ip=2) as limited:
        assert limited._broker is not None
        limited._broker.by_ip["10.1.2.3"] = 2
        assert limited._may_accept("10.1.2.3") is False
        assert limited._may_accept("10.1.2.4") is True
        assert limited._may_accept("127.0.0.1") is True


def test_no_descriptor_left_and_back_again(server: KafkaServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Peer(server.address) as served, socket.socket() as unconnected:
        served.ask(API_VERSIONS, 0, {})
        # 0, 1 and 2 are open: whatever another thread closes now, no number below 3 is free.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            late = Peer(server.address, through=unconnected)
            late.send(API_VERSIONS, 0, {})
            assert served.ask(API_VERSIONS, 0, {})["error_code"] == 0
            late.socket.settimeout(0.3)
            with pytest.raises(TimeoutError):
                late.frame()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.socket.settimeout(10)
        assert late.receive(API_VERSIONS, 0)["error_code"] == 0


# ---- requests that ask for too much ----


def test_metadata_does_not_make_topics_without_end(store: Store, server: KafkaServer) -> None:
    server.close()
    with (
        serving(store, logstore_auto_create_max_per_request=3) as limited,
        Peer(limited.address) as peer,
    ):
        names = [{"name": f"new-{number}"} for number in range(5000)]
        asked = {"topics": names, "allow_auto_topic_creation": True}
        rows = peer.ask(METADATA, 8, asked)["topics"]
        codes = [row["error_code"] for row in rows]
        assert codes == [0] * 3 + [ErrorCode.POLICY_VIOLATION] * 4997
    assert len(store) == 4


def test_more_elements_than_a_request_may_have(server: KafkaServer) -> None:
    body = struct.pack(">i", 200_001) + struct.pack(">h1s", 1, b"a") * 200_001
    with Peer(server.address) as peer:
        peer.socket.sendall(framed(METADATA, 1, body))
        assert peer.is_closed()


def test_a_group_with_too_many_members_and_too_large_metadata(
    store: Store, server: KafkaServer
) -> None:
    server.close()
    with (
        serving(store, group_max_size=1, offset_metadata_max_bytes=10) as limited,
        Peer(limited.address) as first,
        Peer(limited.address) as second,
    ):
        assert first.ask(JOIN_GROUP, 3, join_body())["error_code"] == 0
        code = second.ask(JOIN_GROUP, 3, join_body())["error_code"]
        assert code == ErrorCode.GROUP_MAX_SIZE_REACHED
        row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "x" * 11}
        asked = {
            "group_id": "other",
            "generation_id_or_member_epoch": -1,
            "topics": [{"name": "t", "partitions": [row]}],
        }
        answer = first.ask(OFFSET_COMMIT, 7, asked)
        code = answer["topics"][0]["partitions"][0]["error_code"]
        assert code == ErrorCode.OFFSET_METADATA_TOO_LARGE


# ---- mutants ----


def frames_to_mutate() -> list[bytes]:
    partition = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}
    committed = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    return [
        request(API_VERSIONS, 3, {"client_software_name": "a", "client_software_version": "1"}),
        request(METADATA, 9, {"topics": [{"name": "m"}], "allow_auto_topic_creation": False}),
        request(METADATA, 1, {"topics": [{"name": "m"}]}),
        request(PRODUCE, 9, produce_body("m", batch(b"abc", b"def"))),
        request(PRODUCE, 8, produce_body("m", batch(b"abc", compression="gzip"))),
        request(FETCH, 11, fetch_body("m", 0)),
        request(FETCH, 12, fetch_body("m", 0)),
        request(LIST_OFFSETS, 6, {"topics": [{"name": "m", "partitions": [partition]}]}),
        request(FIND_COORDINATOR, 4, {"coordinator_keys": ["g"]}),
        request(HEARTBEAT, 4, {"group_id": "g", "generation_id": 1, "member_id": "m"}),
        request(JOIN_GROUP, 5, join_body("mutants", timeout_ms=6000)),
        request(
            OFFSET_COMMIT, 8,
            {"group_id": "g", "topics": [{"name": "m", "partitions": [committed]}]},
        ),
    ]  # fmt: skip


def mutated(frame: bytes, dice: random.Random) -> bytes:
    data = bytearray(frame)
    for _ in range(dice.randint(1, 4)):
        # The key stays: a mutant is no request to delete a topic.
        at = dice.randrange(6, len(data))
        kind = dice.randrange(4)
        if kind == 0:
            data[at] = dice.randrange(256)
        elif kind == 1:
            data[at : at + 4] = dice.choice([b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)])
        elif kind == 2:
            del data[at : at + dice.randint(1, 8)]
        else:
            data[at:at] = dice.randbytes(dice.randint(1, 8))
        if len(data) < 14:
            break
    if dice.random() < 0.9:
        data[:4] = struct.pack(">i", len(data) - 4)
    return bytes(data)


@pytest.mark.campaign
def test_mutated_frames_while_a_correct_client_works(tmp_path: Path) -> None:
    """Each mutant is sent alone; the correct client gets every answer in the meantime."""
    dice = random.Random(20)
    frames = frames_to_mutate()
    with logstore.open(tmp_path / "mutants", durability="os") as store:
        for name in ("t", "m"):
            store.create_topic(name)
        with KafkaServer(store) as server:
            stop = threading.Event()
            produced: list[int] = []

            def work() -> None:
                with Peer(server.address) as peer:
                    while not stop.is_set():
                        body = produce_body("t", batch(b"%d" % len(produced)))
                        answer = peer.ask(PRODUCE, 9, body)
                        row = answer["responses"][0]["partition_responses"][0]
                        assert row["error_code"] == 0
                        produced.append(row["base_offset"])

            worker = threading.Thread(target=work)
            worker.start()
            for _ in range(sized(600, 5_000, 20_000)):
                with Peer(server.address) as peer, contextlib.suppress(OSError):
                    peer.socket.sendall(mutated(dice.choice(frames), dice))
                    peer.socket.shutdown(socket.SHUT_WR)
                    while peer.socket.recv(65_536):
                        pass
            stop.set()
            worker.join(20)
            assert not worker.is_alive()
            until(lambda: server.connections == 0)
            found = server.metrics()
            assert found["memory_in_use_bytes"] == found["worker_busy"] == 0
            unexpected = [name for name in found if "UNKNOWN_SERVER_ERROR" in name]
            assert unexpected == []
        assert produced == list(range(len(produced)))
        assert len(produced) > 20
        values = [record.value for record in store["t"][0]]
        assert values == [b"%d" % number for number in range(len(produced))]
        for name in ("t", "m"):
            assert store[name][0].check() == []
    with logstore.open(tmp_path / "mutants", readonly=True) as store:
        check_invariants(store["m"][0])
