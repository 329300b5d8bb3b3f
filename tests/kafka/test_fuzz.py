"""Random and mutated requests of every API, over sockets, while a correct client works.

Requests are made from the schemas, with names and numbers that a store has or nearly has, so that
they pass the decoder and reach the handlers.  No request may end in a traceback or in
UNKNOWN_SERVER_ERROR, none may hang, memory is bounded, and the logs stay valid.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import KafkaServer, Store
from logstore.kafka.apis import APIS
from logstore.kafka.protocol import schema
from logstore.kafka.protocol.schema import Field
from logstore.testing import check_invariants
from tests.campaign import sized
from tests.kafka.peer import Peer, batch, produce_body, request
from tests.kafka.test_hostile import mutated
from tests.kafka.test_server import until

PRODUCE = 0
MEMBERS_WAIT = (11, 14)
NAMES = ["t", "m", "u", "g", "", "a/b", "x" * 300, "é", "..", "t\0", "__consumer_offsets"]
CODECS = [None, None, "gzip", "lz4", "zstd", "snappy"]
TIMES = {"max_wait_ms", "timeout_ms", "timeout"}
# The fields of a request that would make the store large, with the values that they get.
SMALL = {"num_partitions": [1, 2, 0, -1], "count": [1, 2, 3, -1], "replication_factor": [1, -1]}


class Dice(random.Random):
    """Makes requests."""

    ids: list[bytes]

    def value(self, field: Field, version: int, *, element: bool = False) -> Any:
        if version in field.nullable and not element and self.random() < 0.15:
            return None
        if field.array and not element:
            return [
                self.value(field, version, element=True)
                for _ in range(self.choice([0, 1, 1, 1, 2, 3]))
            ]
        if field.fields:
            return self.body(field.fields, version)
        made = {
            "string": lambda: self.choice(NAMES),
            "records": self.records,
            "bytes": lambda: self.randbytes(self.randrange(30)),
            "bool": lambda: self.random() < 0.5,
            "uuid": lambda: self.choice([*self.ids, bytes(16), self.randbytes(16)]),
            "float64": self.random,
        }.get(field.type)
        return self.number(field) if made is None else made()

    def number(self, field: Field) -> int:
        if field.name in SMALL:
            return self.choice(SMALL[field.name])
        bits = int(field.type.lstrip("uint"))
        top = (1 << (bits - 1)) - 1
        least = 0 if field.type.startswith("u") else -top - 1
        if field.name in TIMES:
            return self.choice([0, 1, 5, least])
        common = [0, 0, 0, 1, 1, 2, 3, self.randrange(100), top, least]
        return self.choice(common if least == 0 else [*common, -1, -1, -2])

    def records(self) -> bytes:
        """Return a batch, or what is nearly one."""
        if self.random() < 0.1:
            return self.randbytes(self.randrange(100))
        producer = self.choice([None, (self.randrange(5), self.randrange(3), self.randrange(4))])
        raw = bytearray(
            batch(
                b"a", b"b",
                compression=self.choice(CODECS),
                producer=producer,
                transactional=producer is not None and self.random() < 0.2,
            )
        )  # fmt: skip
        for _ in range(self.choice([0, 0, 1, 2, 3])):
            raw[self.randrange(len(raw))] = self.randrange(256)
        return bytes(raw)

    def body(self, fields: tuple[Field, ...], version: int) -> dict[str, Any]:
        return {
            field.name: self.value(field, version) for field in fields if version in field.versions
        }

    def frame(self) -> tuple[int, bytes]:
        api = APIS[self.choice(list(APIS))]
        version = self.randint(api.first, api.last)
        body = self.body(schema.message(api.key, "request").fields, version)
        made = request(api.key, version, body)
        return api.key, mutated(made, self) if self.random() < 0.6 else made


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def send(server: KafkaServer, key: int, frame: bytes) -> None:
    """Send one request alone, and wait until the server has ended the connection."""
    with Peer(server.address) as peer, contextlib.suppress(ConnectionError):
        peer.socket.sendall(frame)
        if key in MEMBERS_WAIT:
            return  # it waits for other members
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.socket.recv(65_536):
            pass


def work(server: KafkaServer, stop: threading.Event, produced: list[int]) -> None:
    with Peer(server.address) as peer:
        while not stop.is_set():
            answer = peer.ask(PRODUCE, 9, produce_body("good", batch(b"%d" % len(produced))))
            [row] = answer["responses"][0]["partition_responses"]
            assert row["error_code"] == 0
            produced.append(row["base_offset"])
            stop.wait(0.001)


@pytest.mark.campaign
def test_random_requests_of_every_api_harm_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = Dice(41)
    with logstore.open(tmp_path / "s", durability="os") as store:
        store.create_topic("good")
        with KafkaServer(store, config={"logstore.auto.create.max.per.request": 1}) as server:
            stop, produced = threading.Event(), list[int]()
            worker = threading.Thread(target=work, args=(server, stop, produced))
            worker.start()
            before = resident_bytes()
            for turn in range(sized(400, 5_000, 20_000)):
                if turn % 50 == 0:
                    dice.ids = make_again(store)
                send(server, *dice.frame())
            stop.set()
            worker.join(20)
            assert not worker.is_alive()
            until(lambda: server.connections == 0)
            found = server.metrics()
            assert found["memory_in_use_bytes"] == found["memory_unsent_bytes"] == 0
            assert [name for name in found if "UNKNOWN_SERVER_ERROR" in name] == []
        assert resident_bytes() - before < 200 << 20
        assert produced == list(range(len(produced)))
        assert len(produced) > 20
        check_logs(store)
    tracebacks = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert tracebacks == []


def make_again(store: Store) -> list[bytes]:
    """Make the topics that a request has deleted; return the ids of those that may be deleted."""
    for name in {"t", "m", "u"} - set(store):
        with contextlib.suppress(logstore.LogStoreError):  # a request makes or deletes it now
            store.create_topic(name, partitions=2)[0].append(b"hello")
    return [
        topic.id.bytes for topic in store.values() if topic.name != "good" and topic.id is not None
    ]


def check_logs(store: Store) -> None:
    for topic in store.values():
        for number in topic.partition_numbers:
            assert topic[number].check() == [], (topic.name, number)
    check_invariants(store["good"][0])
