"""A real broker as the judge of the listener: the same requests, the same answers.

`wire.py` has the walks' language and the differences that are allowed everywhere; a difference
that is allowed for one request is at that request, with its reason.
"""

from __future__ import annotations

import functools
import random
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import logstore
from logstore import Record
from logstore._native import crc32c
from logstore.kafka.apis import APIS
from logstore.kafka.server import KafkaServer
from tests.campaign import sized
from tests.kafka.peer import batch, fetch_body, produce_body, request, response

from .kafka import Broker, require_kafka
from .wire import ABSENT, START_MS, Side, Step, Walk, at, commit, differences, headers, join, sync

pytestmark = pytest.mark.interop

TOPIC = "ordinary"
UNKNOWN_ID = bytes(15) + b"\x07"
SETTINGS = {"auto.create.topics.enable": "true", "num.partitions": 1}


@pytest.fixture(autouse=True)
def no_file_stays_open() -> None:
    """Replace the check of each test: the store of the module opens files until its last test."""


class Sides(NamedTuple):
    """The judge and the judged."""

    kafka: Side
    ours: Side


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    require_kafka()
    settings = SETTINGS | {"offsets.topic.num.partitions": 50}
    broker = Broker(tmp_path_factory.mktemp("broker"), settings)
    broker.start()
    try:
        path = tmp_path_factory.mktemp("store")
        host, _, port = broker.bootstrap.partition(":")
        with (
            logstore.open(path, durability="os") as store,
            KafkaServer(store, config=SETTINGS) as server,
        ):
            both = Sides(Side((host, int(port))), Side(server.address))
            for side in both:
                side.await_coordinators()
            yield both
    finally:
        broker.kill()


def compare(sides: Sides, walk: Callable[[Walk], object]) -> None:
    found = compared(sides, walk)
    assert not found, "\n" + "\n".join(found)


def compared(sides: Sides, walk: Callable[[Walk], object]) -> list[str]:
    """Return the differences between the answers of the two sides."""
    with Walk(sides.kafka) as kafka, Walk(sides.ours) as ours:
        walk(kafka)
        walk(ours)
        return list(differences(kafka, ours))


# ---- every version of every API ----

Ordinary = Callable[[Walk, int], dict[str, Any]]
ORDINARY: dict[int, Ordinary] = {}


def ordinary(key: int) -> Callable[[Ordinary], Ordinary]:
    """Register the function that returns an ordinary request of an API."""

    def register(function: Ordinary) -> Ordinary:
        ORDINARY[key] = function
        return function

    return register


@ordinary(0)
def _produce(walk: Walk, version: int) -> dict[str, Any]:
    made = walk.topic("ordinary-produce")
    return by_id(produce_body("ordinary-produce", at(START_MS, b"a", b"b")), made)


def by_id(body: dict[str, Any], topic_id: bytes) -> dict[str, Any]:
    """Add the id of the first topic to a request; versions without ids do not send it."""
    body[next(name for name in ("topic_data", "topics") if name in body)][0]["topic_id"] = topic_id
    return body


@ordinary(1)
def _fetch(walk: Walk, version: int) -> dict[str, Any]:
    return by_id(fetch_body(TOPIC, 1), walk.id_of(TOPIC))


@ordinary(2)
def _list_offsets(walk: Walk, version: int) -> dict[str, Any]:
    rows = [{"partition_index": 0, "timestamp": -1}, {"partition_index": 1, "timestamp": START_MS}]
    return {"replica_id": -1, "topics": [{"name": TOPIC, "partitions": rows}]}


@ordinary(3)
def _metadata(walk: Walk, version: int) -> dict[str, Any]:
    return {"topics": [{"name": TOPIC}] + [{"name": "ordinary-none"}] * (version >= 4),
            "allow_auto_topic_creation": False}  # fmt: skip


@ordinary(8)
def _offset_commit(walk: Walk, version: int) -> dict[str, Any]:
    body = commit(f"ordinary-commit-{version}", TOPIC, 2, metadata="here")
    return by_id(body, walk.id_of(TOPIC))


@ordinary(9)
def _offset_fetch(walk: Walk, version: int) -> dict[str, Any]:
    group = "ordinary-fetch"
    walk.quietly(8, 7, commit(group, TOPIC, 2, metadata="here"))
    topics = [{"name": TOPIC, "partition_indexes": [0, 1, 7], "topic_id": walk.id_of(TOPIC)}]
    if version >= 8:
        everything = {"group_id": group, "topics": None}
        return {"groups": [{"group_id": group, "topics": topics}, everything]}
    return {"group_id": group, "topics": topics}


@ordinary(10)
def _find_coordinator(walk: Walk, version: int) -> dict[str, Any]:
    kind = 0 if version == 0 else 1
    if version >= 4:
        return {"key_type": kind, "coordinator_keys": ["a", "b"]}
    return {"key": "a", "key_type": kind}


@ordinary(11)
def _join_group(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-join-{version}"
    asked = join(group, TOPIC, protocols=("range", "roundrobin"))
    if version >= 4:
        asked["member_id"] = walk.ask(11, version, asked)["member_id"]
    return asked


@ordinary(12)
def _heartbeat(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-heartbeat-{version}"
    member, generation = walk.joined(group)
    return {"group_id": group, "member_id": member, "generation_id": generation}


@ordinary(13)
def _leave_group(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-leave-{version}"
    member, _ = walk.joined(group)
    return {"group_id": group, "member_id": member, "members": [{"member_id": member}]}


@ordinary(14)
def _sync_group(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-sync-{version}"
    member, generation = walk.joined(group)
    return sync(group, member, generation, protocol_type="consumer", protocol_name="range")


@ordinary(15)
def _describe_groups(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-describe-{version}"
    walk.joined(group, instance="one")
    return {"groups": [group]}


@ordinary(16)
def _list_groups(walk: Walk, version: int) -> dict[str, Any]:
    walk.joined(f"ordinary-list-{version}")
    return {}


@ordinary(18)
def _api_versions(walk: Walk, version: int) -> dict[str, Any]:
    return {"client_software_name": "walk", "client_software_version": "1.0"}


@ordinary(19)
def _create_topics(walk: Walk, version: int) -> dict[str, Any]:
    rows = [
        {
            "name": f"made-{version}-{number}", "num_partitions": count,
            "replication_factor": factor,
            "configs": [{"name": "retention.ms", "value": "1000000"}],
        }
        for number, (count, factor) in enumerate([(2, 1), (-1, -1)])
        if count > 0 or version >= 4
    ]  # fmt: skip
    return {"topics": rows, "timeout_ms": 10_000}


@ordinary(20)
def _delete_topics(walk: Walk, version: int) -> dict[str, Any]:
    name, other = f"deleted-{version}", f"deleted-{version}-by-id"
    walk.topic(name)
    rows = [{"name": name, "topic_id": bytes(16)}]
    if version >= 6:
        rows.append({"name": None, "topic_id": walk.topic(other)})
    return {"topics": rows, "topic_names": [name], "timeout_ms": 10_000}


@ordinary(21)
def _delete_records(walk: Walk, version: int) -> dict[str, Any]:
    name = f"trimmed-{version}"
    walk.topic(name, 2)
    walk.produce(name, b"a", b"b", b"c")
    rows = [{"partition_index": 0, "offset": 2}, {"partition_index": 1, "offset": -1}]
    return {"topics": [{"name": name, "partitions": rows}], "timeout_ms": 10_000}


@ordinary(22)
def _init_producer_id(walk: Walk, version: int) -> dict[str, Any]:
    plain = {"transactional_id": None, "transaction_timeout_ms": 60_000}
    walk.ask(22, version, plain)
    return plain | {"transactional_id": f"ordinary-init-{version}"}


@ordinary(23)
def _offset_for_leader_epoch(walk: Walk, version: int) -> dict[str, Any]:
    rows = [{"partition": 0, "leader_epoch": 0}]
    return {"replica_id": -2, "topics": [{"topic": TOPIC, "partitions": rows}]}


def in_transaction(walk: Walk, name: str, *, group: str | None = None) -> dict[str, Any]:
    """Begin a transaction; return the fields that name its producer."""
    producer_id, epoch = walk.producer(name)
    mine = {"transactional_id": name, "producer_id": producer_id, "producer_epoch": epoch}
    if group is not None:
        assert not walk.quietly(25, 3, mine | {"group_id": group})["error_code"]
    else:
        walk.quietly(24, 3, add(mine, TOPIC))
    return mine


def add(mine: dict[str, Any], *topics: str) -> dict[str, Any]:
    """Return an AddPartitionsToTxn request for partition 0 of topics."""
    body = {f"v3_and_below_{name}": value for name, value in mine.items()}
    return body | {"v3_and_below_topics": [{"name": each, "partitions": [0]} for each in topics]}


@ordinary(24)
def _add_partitions_to_txn(walk: Walk, version: int) -> dict[str, Any]:
    name = f"ordinary-add-{version}"
    producer_id, epoch = walk.producer(name)
    mine = {"transactional_id": name, "producer_id": producer_id, "producer_epoch": epoch}
    return add(mine, TOPIC)


@ordinary(25)
def _add_offsets_to_txn(walk: Walk, version: int) -> dict[str, Any]:
    return in_transaction(walk, f"ordinary-offsets-{version}") | {"group_id": "g"}


@ordinary(26)
def _end_txn(walk: Walk, version: int) -> dict[str, Any]:
    return in_transaction(walk, f"ordinary-end-{version}") | {"committed": version % 2 == 0}


@ordinary(27)
def _write_txn_markers(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic("ordinary-markers")
    producer_id, epoch = walk.producer(None)
    rows = [{"name": "ordinary-markers", "partition_indexes": [0]}]
    marker = {"producer_id": producer_id, "producer_epoch": epoch, "transaction_result": False}
    return {"markers": [marker | {"topics": rows, "coordinator_epoch": 0}]}


def txn_commit(mine: dict[str, Any], group: str, **more: Any) -> dict[str, Any]:
    """Return a TxnOffsetCommit request for partition 0."""
    row = {"partition_index": 0, "committed_offset": 1, "committed_metadata": "x"}
    return mine | {"group_id": group, "topics": [{"name": TOPIC, "partitions": [row]}]} | more


@ordinary(28)
def _txn_offset_commit(walk: Walk, version: int) -> dict[str, Any]:
    group = f"ordinary-txn-{version}"
    return txn_commit(in_transaction(walk, group, group=group), group)


@ordinary(32)
def _describe_configs(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic("configured", retention_ms="1000000", cleanup_policy="compact,delete")
    row = {"resource_type": 2, "resource_name": "configured", "configuration_keys": None}
    some = {"resource_type": 2, "resource_name": TOPIC}
    return {
        "resources": [row, some | {"configuration_keys": ["retention.ms", "no.such"]}],
        "include_synonyms": False, "include_documentation": version >= 3,
    }  # fmt: skip


@ordinary(33)
def _alter_configs(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic("altered")
    settings = [{"name": "retention.ms", "value": str(version + 1_000_000)}]
    row = {"resource_type": 2, "resource_name": "altered", "configs": settings}
    return {"resources": [row], "validate_only": False}


@ordinary(34)
def _alter_replica_log_dirs(walk: Walk, version: int) -> dict[str, Any]:
    [found] = walk.quietly(35, 1, {"topics": None})["results"]
    rows = [{"name": TOPIC, "partitions": [0, 7]}]
    return {"dirs": [{"path": found["log_dir"], "topics": rows}]}


@ordinary(35)
def _describe_log_dirs(walk: Walk, version: int) -> dict[str, Any]:
    return {"topics": [{"topic": TOPIC, "partitions": [0]}, {"topic": "no", "partitions": [0]}]}


@ordinary(37)
def _create_partitions(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic(f"grown-{version}")
    return {"topics": [{"name": f"grown-{version}", "count": 3, "assignments": None}],
            "timeout_ms": 10_000, "validate_only": False}  # fmt: skip


@ordinary(42)
def _delete_groups(walk: Walk, version: int) -> dict[str, Any]:
    walk.quietly(8, 7, commit(f"gone-{version}", TOPIC, 1))
    return {"groups_names": [f"gone-{version}", "never-was"]}


@ordinary(43)
def _elect_leaders(walk: Walk, version: int) -> dict[str, Any]:
    rows = [{"topic": TOPIC, "partitions": [0, 7]}]
    return {"election_type": 0, "topic_partitions": rows, "timeout_ms": 10_000}


@ordinary(44)
def _incremental_alter_configs(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic("altered")
    settings = [
        {"name": "cleanup.policy", "config_operation": 2, "value": "compact"},
        {"name": "retention.ms", "config_operation": 1, "value": None},
        {"name": "segment.ms", "config_operation": 0, "value": "1000000"},
    ]
    row = {"resource_type": 2, "resource_name": "altered", "configs": settings}
    return {"resources": [row], "validate_only": False}


@ordinary(45)
def _alter_partition_reassignments(walk: Walk, version: int) -> dict[str, Any]:
    cases = ((0, [1]), (1, [2]), (7, [1]))
    rows = [{"partition_index": number, "replicas": nodes} for number, nodes in cases]
    return {"topics": [{"name": TOPIC, "partitions": rows}], "timeout_ms": 10_000}


@ordinary(46)
def _list_partition_reassignments(walk: Walk, version: int) -> dict[str, Any]:
    return {"topics": None, "timeout_ms": 10_000}


@ordinary(47)
def _offset_delete(walk: Walk, version: int) -> dict[str, Any]:
    walk.quietly(8, 7, commit("forgetful", TOPIC, 1))
    rows = [{"partition_index": 0}, {"partition_index": 1}, {"partition_index": 7}]
    other = {"name": "no-such-topic", "partitions": [{"partition_index": 0}]}
    return {"group_id": "forgetful", "topics": [{"name": TOPIC, "partitions": rows}, other]}


@ordinary(60)
def _describe_cluster(walk: Walk, version: int) -> dict[str, Any]:
    return {"endpoint_type": 1}


@ordinary(61)
def _describe_producers(walk: Walk, version: int) -> dict[str, Any]:
    walk.topic("produced")
    producer_id, epoch = walk.producer(None)
    raw = at(START_MS, b"a", b"b", producer=(producer_id, epoch, 0))
    walk.quietly(0, 9, produce_body("produced", raw))
    rows = [{"name": name, "partition_indexes": [0, 7]} for name in ("produced", "no", "a b")]
    return {"topics": rows}


@ordinary(65)
def _describe_transactions(walk: Walk, version: int) -> dict[str, Any]:
    in_transaction(walk, "described")
    walk.producer("described-empty")
    return {"transactional_ids": ["described", "described-empty", "never-was", ""]}


@ordinary(66)
def _list_transactions(walk: Walk, version: int) -> dict[str, Any]:
    in_transaction(walk, f"listed-{version}")
    return {"state_filters": ["Ongoing", "zz"], "duration_filter": -1}


@ordinary(68)
def _consumer_group_heartbeat(walk: Walk, version: int) -> dict[str, Any]:
    # A join of an unknown topic: which epochs follow is in test_wire_consumer_groups.
    return {
        "group_id": f"ordinary-consumer-{version}", "member_id": "00000000-0000-0000-0000-00000001",
        "member_epoch": 0, "instance_id": None, "rack_id": None, "rebalance_timeout_ms": 9_000,
        "subscribed_topic_names": ["ordinary-none"], "subscribed_topic_regex": None,
        "server_assignor": None, "topic_partitions": [],
    }  # fmt: skip


@ordinary(69)
def _consumer_group_describe(walk: Walk, version: int) -> dict[str, Any]:
    walk.quietly(68, 1, _consumer_group_heartbeat(walk, 7))
    names = ["ordinary-consumer-7", "ordinary-none"]
    return {"group_ids": names, "include_authorized_operations": False}


@ordinary(75)
def _describe_topic_partitions(walk: Walk, version: int) -> dict[str, Any]:
    names = [TOPIC, "no-such-topic", "a b"]
    return {"topics": [{"name": name} for name in names], "response_partition_limit": 100}


ONLY: dict[int, Callable[[dict[str, Any]], bool]] = {
    16: lambda row: row["group_id"].startswith("ordinary-list-"),
    66: lambda row: row["transactional_id"].startswith("listed-"),
}
MAY_RETRY = {24: {51}, 25: {51}}


@pytest.mark.parametrize("key", sorted(APIS), ids=lambda key: APIS[key].name)
def test_every_version_of_an_api(sides: Sides, key: int) -> None:
    def walk(walk: Walk) -> None:
        walk.topic(TOPIC, 2)
        if key in (1, 2):
            for number in (0, 1):
                walk.produce(TOPIC, b"a", b"b", b"c", partition=number)
        for version in range(APIS[key].first, APIS[key].last + 1):
            body = ORDINARY[key](walk, version)
            only, retry = ONLY.get(key), MAY_RETRY.get(key, ())
            walk.ask(key, version, body, only=only, retry=retry)

    compare(sides, walk)


def test_no_version_is_served_that_the_broker_does_not_serve(sides: Sides) -> None:
    with Walk(sides.kafka) as walk:
        answer = walk.quietly(18, 0, {})
    theirs = {each["api_key"]: (each["min_version"], each["max_version"])
              for each in answer["api_keys"]}  # fmt: skip
    for key, api in APIS.items():
        first, last = api.versions
        assert theirs[key][0] <= first <= last <= theirs[key][1], api.name


# ---- errors, and which of them comes first ----

CASES: list[Callable[[Walk], None]] = []


def case(function: Callable[[Walk], None]) -> Callable[[Walk], None]:
    """Register a walk."""
    CASES.append(function)
    return function


@case
def api_versions(walk: Walk) -> None:
    unknown = request(18, 4, {"client_software_name": "a", "client_software_version": "1"})
    walk.raw("version 9", unknown[:6] + struct.pack(">h", 9) + unknown[8:])
    walk.ask(18, 3, {"client_software_name": "!!", "client_software_version": "1"})
    plain = request(18, 0, {})
    for name, frame in (("v0", plain), ("4 bytes more", plain[4:] + b"more")):
        peer = walk.connect()
        peer.socket.sendall(frame if name == "v0" else struct.pack(">i", len(frame)) + frame)
        walk.note(f"ApiVersions {name}", response(18, 0, peer.frame())[1])


@case
def no_request(walk: Walk) -> None:
    known = request(3, 9, {"topics": [{"name": TOPIC}]})
    for name, key, version in (
        ("key 999", 999, 0), ("Metadata v99", 3, 99), ("Produce v2", 0, 2), ("Fetch v3", 1, 3),
    ):  # fmt: skip
        walk.raw(name, known[:4] + struct.pack(">hh", key, version) + known[8:])
    walk.raw("cut off", struct.pack(">i", len(known) - 12) + known[4:-8])
    for size in (-1, 0, 1 << 30):
        walk.raw(f"size {size}", struct.pack(">i", size) + known[4:])
    walk.raw("HTTP", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")


@case
def metadata(walk: Walk) -> None:
    def asked(*names: str | None, create: bool = False, **more: Any) -> dict[str, Any]:
        rows = [{"name": name} | more for name in names]
        return {"topics": rows, "allow_auto_topic_creation": create}

    walk.ask(3, 9, asked("auto-made", create=True), we=AT_ONCE)
    walk.await_topic("auto-made")
    walk.ask(3, 9, asked("auto-made", create=True))
    walk.ask(3, 1, {"topics": [{"name": "auto-made-1"}]}, we=AT_ONCE)
    walk.ask(3, 9, asked("never-made"))
    walk.ask(3, 9, asked("a b"))
    walk.ask(3, 9, asked("a b", create=True))
    walk.ask(3, 9, asked("", create=True))
    walk.ask(3, 9, asked("x" * 250, create=True))
    walk.ask(3, 12, {"topics": []})
    walk.ask(3, 12, asked(None, topic_id=UNKNOWN_ID))
    walk.ask(3, 12, asked(None, topic_id=walk.id_of(TOPIC)))
    walk.ask(3, 12, asked(TOPIC, topic_id=walk.id_of(TOPIC)))
    walk.ask(3, 12, asked("never-made", topic_id=UNKNOWN_ID))
    walk.ask(3, 12, asked(TOPIC, "never-made"))
    for version in (1, 8, 12):
        walk.ask(3, version, {"topics": None}, only=only_topics(TOPIC, "auto-made"))
    walk.ask(3, 0, {"topics": []}, only=only_topics(TOPIC, "auto-made"))


# A broker answers that an auto-created topic is unknown, and creates it after the answer.
AT_ONCE = {"error_code": (3, 0), "partitions": (ABSENT, ...)}


def only_topics(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Keep the rows of some topics, and every row that is not about a topic."""
    return lambda row: "name" not in row or row["name"] in names


@case
def describe_topic_partitions(walk: Walk) -> None:
    walk.topic("paged-a", 3)
    walk.topic("paged-b", 2)
    names = [{"name": name} for name in ("paged-b", "paged-a", "paged-c")]
    for limit in (1, 2, 3, 4, 5, 100, 0, -1):
        walk.ask(75, 0, {"topics": names, "response_partition_limit": limit})
    for topic, number in (("paged-a", 1), ("paged-a", 9), ("paged-b", 0), ("paged-z", 0),
                          ("paged", 0), ("paged-a", -1)):  # fmt: skip
        cursor = {"topic_name": topic, "partition_index": number}
        walk.ask(75, 0, {"topics": names, "response_partition_limit": 2, "cursor": cursor})


@case
def find_coordinator(walk: Walk) -> None:
    for kind in (0, 1, 2, 3, 9):
        walk.ask(10, 2, {"key": "a", "key_type": kind})
        walk.ask(10, 5, {"key_type": kind, "coordinator_keys": ["a", "b"]})
    walk.ask(10, 2, {"key": "", "key_type": 0})
    walk.ask(10, 2, {"key": "", "key_type": 1})
    walk.ask(10, 4, {"key_type": 0, "coordinator_keys": []})
    walk.ask(10, 6, {"key_type": 2, "coordinator_keys": ["g:t:1", "x"]})


@case
def describe_cluster(walk: Walk) -> None:
    for kind in (1, 2, 3):
        walk.ask(60, 1, {"endpoint_type": kind})
    walk.ask(60, 2, {"endpoint_type": 1, "include_fenced_brokers": True})


def new_topic(name: str, **more: Any) -> dict[str, Any]:
    """Return a CreateTopics request for one topic."""
    row = {"name": name, "num_partitions": 1, "replication_factor": 1} | more
    return {"topics": [row], "timeout_ms": 10_000}


@case
def create_topics(walk: Walk) -> None:
    walk.ask(19, 7, new_topic("ct", num_partitions=3))
    walk.await_topic("ct", 3)
    walk.ask(19, 7, new_topic("ct"))
    for factor in (3, 0, -2):
        walk.ask(19, 7, new_topic("ct-a", replication_factor=factor))
    for count in (0, -2):
        walk.ask(19, 7, new_topic("ct-a", num_partitions=count))
    walk.ask(19, 7, new_topic("ct-b", num_partitions=-1, replication_factor=-1))
    for name in ("a/b", "", ".", "..", "x" * 250):
        walk.ask(19, 7, new_topic(name))
    walk.topic("ct_a.b")
    walk.ask(19, 7, new_topic("ct.a_b"))
    for name, value in (
        ("no.such", "1"), ("retention.ms", "x"), ("retention.ms", None), ("retention.ms", ""),
        ("cleanup.policy", "nothing"), ("segment.bytes", "1"),
    ):  # fmt: skip
        configs = [{"name": name, "value": value}]
        walk.ask(19, 7, new_topic("ct-c", configs=configs))
    twice = new_topic("ct-e")
    walk.ask(19, 7, twice | {"topics": twice["topics"] * 2})
    mixed = new_topic("ct-f")
    mixed["topics"] += new_topic("ct")["topics"] + new_topic("a b")["topics"]
    walk.ask(19, 7, mixed)


@case
def create_topics_validated(walk: Walk) -> None:
    for count in (1, -1):
        body = new_topic("ct-d", num_partitions=count) | {"validate_only": True}
        walk.ask(19, 7, body, we={"topic_id": (..., bytes(16))})  # no topic has the id of a broker
    walk.ask(19, 7, new_topic("ct-d", num_partitions=0) | {"validate_only": True})
    walk.ask(3, 9, {"topics": [{"name": "ct-d"}], "allow_auto_topic_creation": False})


def placed(*replicas: tuple[int, list[int]]) -> list[dict[str, Any]]:
    return [{"partition_index": number, "broker_ids": nodes} for number, nodes in replicas]


@case
def create_topics_with_assignments(walk: Walk) -> None:
    alone = {"num_partitions": -1, "replication_factor": -1}
    walk.ask(19, 7, new_topic("as-a", assignments=placed((0, [1]))))
    walk.ask(19, 7, new_topic("as-a", num_partitions=-1, assignments=placed((0, [1]))))
    walk.ask(19, 7, new_topic("as-b", assignments=placed((0, [1]), (1, [1])), **alone))
    walk.ask(19, 7, new_topic("as-c", assignments=placed((0, [1]), (2, [1])), **alone))
    walk.ask(19, 7, new_topic("as-d", assignments=placed((0, [9])), **alone))
    walk.ask(19, 7, new_topic("as-e", assignments=placed((0, [1, 1])), **alone))
    walk.ask(19, 7, new_topic("as-f", assignments=placed((0, [])), **alone))
    walk.ask(19, 7, new_topic("as-g", assignments=placed((0, [1]), (0, [1])), **alone))
    walk.ask(19, 7, new_topic("__cluster_metadata"))
    # The listener makes its internal topics itself, and only then.
    walk.ask(19, 7, new_topic("__consumer_offsets"), we={"error_code": (36, 17)})


PRODUCED = "produced-cases"


def changed(raw: bytes, place: int, data: bytes, *, crc: bool = True) -> bytes:
    """Return a batch with some bytes changed, and its CRC made right again."""
    made = bytearray(raw)
    made[place : place + len(data)] = data
    if crc:
        made[17:21] = struct.pack(">I", crc32c(bytes(made[21:])))
    return bytes(made)


@case
def produce_what_is_no_batch(walk: Walk) -> None:
    walk.topic(PRODUCED)
    good = at(START_MS, b"a", b"b", key=b"k")

    def ask(name: str, records: bytes | None, **options: Any) -> None:
        body = produce_body(options.pop("topic", PRODUCED), records,
                            partition=options.pop("partition", 0))  # fmt: skip
        walk.ask(0, options.pop("version", 9), body, name=f"Produce {name}", **options)

    ask("unknown topic", good, topic="never-made")
    ask("bad topic", good, topic="a b")
    ask("unknown partition", good, partition=7)
    ask("no batch", b"")
    ask("half a header", good[:30])
    ask("two batches", good + good)
    ask("CRC off by a bit", changed(good, 17, bytes([good[17] ^ 1]), crc=False))
    ask("magic 1", changed(good, 16, b"\x01", crc=False))
    ask("magic 0", changed(good, 16, b"\x00", crc=False))
    ask("magic 5", changed(good, 16, b"\x05", crc=False))
    ask("cut short", good[:-3])
    # A broker drops what is shorter than a header.
    walk.topic("produced-more")
    at_zero = REFUSED | {"log_start_offset": (0, -1)}
    ask("bytes more", good + b"abc", topic="produced-more", we=at_zero)
    ask("count is larger", changed(good, 57, struct.pack(">i", 3)))
    ask("count is less", changed(good, 57, struct.pack(">i", 1)))
    ask("last delta is larger", changed(good, 23, struct.pack(">i", 5)))
    ask("last delta is less", changed(good, 23, struct.pack(">i", 0)))
    ask("control bit", changed(good, 21, struct.pack(">h", 0x20)))
    empty = changed(good[:61], 8, struct.pack(">i", 49))
    ask("0 records", changed(changed(empty, 57, bytes(4)), 23, struct.pack(">i", -1)))
    ask("codec 6", changed(good, 21, struct.pack(">h", 6)), we=answered_with(-1, 76))
    ask("garbage gzip", changed(good, 21, struct.pack(">h", 1)),
        we=answered_with(-1, 2) | {"log_start_offset": (0, -1)})  # fmt: skip
    walk.topic("produced-stamped")
    stamped = changed(good, 21, struct.pack(">h", 8))
    ask("LogAppendTime bit", stamped, topic="produced-stamped", we=REFUSED)
    ask("id without sequence", changed(good, 43, struct.pack(">q", 1 << 40)))
    ask("zstd v3", at(START_MS, b"a" * 99, compression="zstd"), version=3)
    ask("zstd v7", at(START_MS, b"a" * 99, compression="zstd"), version=7)
    for version in (3, 11):
        ask(f"unknown topic v{version}", good, version=version, topic="never-made")


def answered_with(kafka: int, ours: int) -> dict[str, tuple[Any, Any]]:
    """The listener has a code where a broker has none of its own."""
    return {"error_code": (kafka, ours)}


# A broker takes the batch, and changes it.
REFUSED = {"error_code": (0, 87), "base_offset": (0, -1)}


@case
def produce_what_is_refused(walk: Walk) -> None:
    walk.topic("refused")
    walk.topic("refused-compact", cleanup_policy="compact")
    walk.topic("refused-large", max_message_bytes="200")
    walk.topic("refused-late", message_timestamp_before_max_ms="1000")
    walk.topic("stamped", message_timestamp_type="LogAppendTime")
    good = at(START_MS, b"a", b"b")
    walk.ask(0, 9, produce_body("refused", good, acks=2), name="Produce acks 2")
    walk.ask(0, 9, produce_body("refused", good, acks=-2), name="Produce acks -2")
    for version in (7, 8, 9, 13):
        for name, topic, raw in (
            ("null keys", "refused-compact", good),
            ("too large", "refused-large", at(START_MS, b"a" * 500)),
            ("time out of range", "refused-late", good),
        ):
            body = by_id(produce_body(topic, raw), walk.id_of(topic))
            walk.ask(0, version, body, name=f"Produce {name} v{version}")
    walk.ask(0, 9, produce_body("stamped", good), name="Produce LogAppendTime")
    walk.ask(0, 9, produce_body("__consumer_offsets", good), name="Produce internal topic")
    producer_id, epoch = walk.producer(None)
    raw = at(START_MS, b"a", producer=(producer_id, epoch, 0), transactional=True)
    walk.ask(0, 9, produce_body("refused", raw), name="Produce transactional without id")
    body = produce_body("never-made", good, acks=0)
    walk.first.send(0, 9, body)
    walk.steps.append(Step("acks=0 to an unknown topic", walk.first.is_closed(), {}))
    walk.first = walk.connect()


@case
def produce_records_that_are_refused(walk: Walk) -> None:
    both = {"cleanup_policy": "compact", "message_timestamp_before_max_ms": "1000000",
            "message_timestamp_after_max_ms": "1000000"}  # fmt: skip
    walk.topic("records-refused", **both)
    walk.topic("records-stamped", cleanup_policy="compact", message_timestamp_type="LogAppendTime")
    early, late = START_MS - 5_000_000, START_MS + 5_000_000
    for name, rows in (
        ("one of three has no key", [(b"k", START_MS), (None, START_MS), (b"k", START_MS)]),
        ("two are early", [(b"k", early), (b"k", START_MS), (b"k", early)]),
        ("one is late", [(b"k", START_MS), (b"k", late)]),
        ("early and late", [(b"k", late), (b"k", early)]),
        ("no key, and another one early", [(None, START_MS), (b"k", early)]),
        ("no key and early", [(b"k", START_MS), (None, early)]),
        ("nothing wrong", [(b"k", START_MS), (b"", START_MS)]),
    ):
        for codec in (None, "gzip"):
            records = [Record(b"v" * 20, key=key, timestamp=when) for key, when in rows]
            raw = batch(*records, compression=codec)
            for topic in ("records-refused", "records-stamped"):
                walk.ask(0, 9, produce_body(topic, raw), name=f"Produce {name} {codec} {topic}")


@case
def produce_to_a_partition_twice(walk: Walk) -> None:
    walk.topic("twice", 2)
    raw = at(START_MS, b"a")
    rows = [{"index": number, "records": raw} for number in (0, 1, 0)]
    body = produce_body("twice", None)
    body["topic_data"][0]["partition_data"] = rows
    # A broker appends the last batch, loses the others, and answers one row.
    every = {"error_code": (0, 42), "base_offset": (0, -1), "log_start_offset": (0, -1)}
    every |= {"partition_responses": (ABSENT, ...), "index": (1, 0)}
    walk.ask(0, 9, body, name="Produce twice", we=every)


@case
def topics_by_id(walk: Walk) -> None:
    known = walk.topic("by-id", 2)
    good = at(START_MS, b"a", b"b")
    for name, topic_id, number in (
        ("known", known, 0), ("unknown partition", known, 7), ("unknown", UNKNOWN_ID, 0),
        ("zero", bytes(16), 0),
    ):  # fmt: skip
        body = produce_body("", good, partition=number)
        walk.ask(0, 13, by_id(body, topic_id), name=f"Produce {name}")
        body = commit("by-id", "", 2, metadata="m")
        body["topics"][0]["partitions"][0]["partition_index"] = number
        walk.ask(8, 10, by_id(body, topic_id), name=f"OffsetCommit {name}")
        rows = [{"topic_id": topic_id, "partition_indexes": [number]}]
        body = {"groups": [{"group_id": "by-id", "topics": rows}]}
        walk.ask(9, 10, body, name=f"OffsetFetch {name}")
    mixed = by_id(commit("by-id", "", 3), UNKNOWN_ID)
    mixed["topics"] += by_id(commit("by-id", "", 3), known)["topics"]
    walk.ask(8, 10, mixed, name="OffsetCommit both")
    everything = {"groups": [{"group_id": "by-id", "topics": None}]}
    walk.ask(9, 10, everything, name="OffsetFetch all")
    walk.ask(8, 10, by_id(commit("", "", 1), UNKNOWN_ID), name="OffsetCommit no group")
    body = by_id(commit("never-was", "", 1, member="m", generation=5), UNKNOWN_ID)
    walk.ask(8, 10, body, name="OffsetCommit unknown group and id")
    internal = walk.id_of("__consumer_offsets")
    walk.ask(0, 13, by_id(produce_body("", good), internal), name="Produce internal topic by id")
    gone = walk.topic("by-id-gone")
    walk.quietly(8, 10, by_id(commit("by-id", "", 4), gone))
    walk.quietly(20, 4, {"topic_names": ["by-id-gone"], "timeout_ms": 10_000})
    walk.await_gone("by-id-gone")
    walk.ask(0, 13, by_id(produce_body("", good), gone), name="Produce deleted")
    walk.ask(9, 10, everything, name="OffsetFetch all after a deletion")
    for version in (12, 13):
        producer_id, epoch = walk.producer(None)
        raw = at(START_MS, b"a", producer=(producer_id, epoch, 0))
        for name in ("first", "again"):
            body = by_id(produce_body("by-id", raw, partition=1), known)
            walk.ask(0, version, body, name=f"Produce v{version} {name}")


@case
def produce_sequences(walk: Walk) -> None:
    walk.topic("sequences")
    producer_id, _ = walk.producer(None)
    other, _ = walk.producer(None)
    for name, producer in (
        ("0-1", (producer_id, 0, 0)), ("the same", (producer_id, 0, 0)),
        ("5", (producer_id, 0, 5)), ("2-3", (producer_id, 0, 2)),
        ("epoch 1 from 5", (producer_id, 1, 5)), ("epoch 1 from 0", (producer_id, 1, 0)),
        ("epoch 0 again", (producer_id, 0, 4)), ("a new id from 9", (other, 0, 9)),
        ("before the last five", (producer_id, 1, 0)),
    ):  # fmt: skip
        raw = at(START_MS, b"a", b"b", producer=producer)
        walk.ask(0, 9, produce_body("sequences", raw), name=f"Produce {name}")
    walk.ask(61, 0, {"topics": [{"name": "sequences", "partition_indexes": [0]}]})


@case
def list_offsets(walk: Walk) -> None:
    walk.topic("times")
    walk.topic("times-empty")
    for time_ms in (START_MS, START_MS + 20, START_MS + 20, START_MS + 10):
        walk.quietly(0, 9, produce_body("times", at(time_ms, b"a", b"b")))

    def asked(when: int, *, topic: str = "times", number: int = 0, epoch: int = -1,
              isolation: int = 0) -> dict[str, Any]:  # fmt: skip
        row = {"partition_index": number, "timestamp": when, "current_leader_epoch": epoch}
        topics = [{"name": topic, "partitions": [row]}]
        return {"replica_id": -1, "isolation_level": isolation, "topics": topics}

    times = (0, START_MS, START_MS + 1, START_MS + 11, START_MS + 20, START_MS + 99)
    for version in (1, 4, 7, 8, 9, 11):
        for when in (*times, *range(-1, -8, -1)):
            for topic in ("times", "times-empty"):
                body = asked(when, topic=topic)
                walk.ask(2, version, body, name=f"ListOffsets v{version} {when} {topic}")
    walk.ask(2, 9, asked(-1, isolation=1))
    walk.ask(2, 9, asked(-3, isolation=1))
    walk.ask(2, 9, asked(-1, epoch=5))
    walk.ask(2, 9, asked(-1, epoch=0))
    walk.ask(2, 9, asked(-1, number=7))
    walk.ask(2, 9, asked(-1, topic="never-made"))
    walk.ask(2, 9, asked(-1, topic="a b"))
    twice = asked(-1)
    twice["topics"][0]["partitions"] *= 2
    walk.ask(2, 9, twice)
    walk.ask(2, 1, twice)


@case
def offset_for_leader_epoch(walk: Walk) -> None:
    walk.topic("epochs")
    walk.produce("epochs", b"a", b"b")
    walk.topic("epochs-empty")
    for topic, number, current, epoch in (
        ("epochs", 0, -1, -1), ("epochs", 0, -1, 0), ("epochs", 0, -1, 1), ("epochs", 0, -1, 9),
        ("epochs", 0, 0, 0), ("epochs", 0, 5, 0), ("epochs", 7, -1, 0), ("no", 0, -1, 0),
        ("epochs-empty", 0, -1, 0), ("epochs-empty", 0, -1, 1),
    ):  # fmt: skip
        row = {"partition": number, "current_leader_epoch": current, "leader_epoch": epoch}
        body = {"replica_id": -2, "topics": [{"topic": topic, "partitions": [row]}]}
        walk.ask(23, 4, body, name=f"OffsetForLeaderEpoch {topic}-{number} {current} {epoch}")


@case
def fetch(walk: Walk) -> None:
    walk.topic("fetched")
    walk.topic("fetched-2")
    walk.produce("fetched-2", b"a")
    walk.produce("fetched", *(b"%d" % n * 100 for n in range(8)))
    for offset in (0, 3, 8, 9, -3):
        walk.ask(1, 11, fetch_body("fetched", offset), name=f"Fetch at {offset}")
    walk.ask(1, 11, fetch_body("fetched", 0, max_bytes=10), name="Fetch 10 bytes")
    walk.ask(1, 11, fetch_body("fetched", 0, max_bytes=0), name="Fetch 0 bytes")
    for isolation in (0, 1):
        walk.ask(1, 11, fetch_body("fetched", 0, isolation=isolation), name=f"Fetch {isolation}")
    walk.ask(1, 11, fetch_body("never-made", 0), name="Fetch unknown topic")
    for number in (7, -1):
        body = fetch_body("fetched", 0, partition=number)
        walk.ask(1, 11, body, name=f"Fetch partition {number}")
    walk.ask(1, 11, fetch_body("fetched", 0, current_leader_epoch=5), name="Fetch epoch 5")
    walk.ask(1, 12, fetch_body("fetched", 2, last_fetched_epoch=3), name="Fetch last epoch 3")
    walk.ask(1, 12, fetch_body("fetched", 2, last_fetched_epoch=0), name="Fetch last epoch 0")
    unknown = fetch_body("fetched", 0)
    for name, id_bytes in (("unknown", UNKNOWN_ID), ("zero", bytes(16))):
        unknown["topics"][0]["topic_id"] = id_bytes
        walk.ask(1, 13, unknown, name=f"Fetch {name} id")
    session = {"session_id": 12345, "session_epoch": 3}
    walk.ask(1, 11, fetch_body("fetched", 0) | session, name="Fetch session 12345")
    walk.ask(1, 11, fetch_body("fetched", 0) | {"replica_id": 5}, name="Fetch replica 5")
    many = fetch_body("fetched", 7)
    many["topics"].append(fetch_body("never-made", 0)["topics"][0])
    many["topics"].append(fetch_body("fetched-2", 0)["topics"][0])
    walk.ask(1, 11, many, name="Fetch many")
    walk.ask(1, 11, fetch_body("fetched", 0) | {"topics": []}, name="Fetch nothing")


class Fetcher:
    """A client with a fetch session, as KIP-227 has it."""

    def __init__(self, walk: Walk, version: int) -> None:
        self.walk = walk
        self.version = version
        self.id = self.epoch = 0

    def body(self, *rows: tuple[str, int, int], forget: tuple[tuple[str, int], ...] = (),
             max_bytes: int = 1 << 20, **more: Any) -> dict[str, Any]:  # fmt: skip
        """Return a request for (topic, partition, offset) of each row."""
        body = fetch_body("", 0, max_bytes=max_bytes)
        [row] = body["topics"][0]["partitions"]
        body["topics"] = [
            self.named(topic)
            | {"partitions": [row | {"partition": number, "fetch_offset": offset}]}
            for topic, number, offset in rows
        ]
        gone = [self.named(topic) | {"partitions": [number]} for topic, number in forget]
        session = {"session_id": self.id, "session_epoch": self.epoch}
        return body | session | {"forgotten_topics_data": gone} | more

    def named(self, topic: str) -> dict[str, Any]:
        return {"topic": topic, "topic_id": self.walk.ids_of.get(topic, UNKNOWN_ID)}

    def full(self, name: str, *rows: tuple[str, int, int], **more: Any) -> dict[str, Any]:
        """Fetch all partitions, and begin a session."""
        self.epoch = 0
        answer = self.walk.ask(1, self.version, self.body(*rows, **more), name=f"Fetch {name}")
        self.id, self.epoch = answer["session_id"], 1
        return answer

    def next(self, name: str, *rows: tuple[str, int, int], **more: Any) -> dict[str, Any]:
        """Fetch what has changed."""
        answer = self.walk.ask(1, self.version, self.body(*rows, **more), name=f"Fetch {name}")
        self.epoch += 1
        return answer

    def refused(self, name: str, *rows: tuple[str, int, int], **more: Any) -> None:
        """Send a request that must not change the session."""
        version = more.pop("version", self.version)
        self.walk.ask(1, version, self.body(*rows, **more), name=f"Fetch {name}")


def session_topics(walk: Walk, version: int, *names: str) -> list[str]:
    """Make topics of three partitions, with records in partition 0; return their names."""
    made = [f"session-{version}-{name}" for name in names]
    for name in made:
        walk.ids_of[name] = walk.topic(name, 3)
        walk.produce(name, b"a", b"b")
    return made


@case
def fetch_sessions(walk: Walk) -> None:
    for version in (7, 12, 13, 16):
        a, b = session_topics(walk, version, "a", "b")
        fetcher = Fetcher(walk, version)
        fetcher.full("full", (a, 0, 0), (a, 1, 0), (b, 0, 2))
        fetcher.next("the same offsets")
        fetcher.next("offset 1", (a, 0, 1))
        fetcher.next("at the end", (a, 0, 2))
        fetcher.next("nothing")
        walk.produce(a, b"c", partition=1)
        walk.produce(a, b"d", partition=2)
        fetcher.next("a record of a partition")
        fetcher.next("another partition", (a, 1, 1), (a, 2, 0))
        fetcher.next("all at the end", (a, 2, 1))
        fetcher.next("forgotten", forget=((a, 2), (b, 1)))
        walk.produce(a, b"e", partition=2)
        fetcher.next("a record of the forgotten one")
        fetcher.next("changed and forgotten", (a, 0, 0), forget=((a, 0),))
        fetcher.next("a row twice", (a, 0, 0), (a, 0, 1))
        fetcher.next("back at the end", (a, 0, 2))
        rows = [{"name": a, "partitions": [{"partition_index": 0, "offset": 1}]}]
        walk.quietly(21, 2, {"topics": rows, "timeout_ms": 10_000})
        fetcher.next("the start moved")
        fetcher.next("the start moved, nothing")
        fetcher.next("out of range", (a, 0, 0))
        fetcher.next("out of range again")
        fetcher.next("in range", (a, 0, 2))
        fetcher.next("unknown partition", (a, 7, 0))
        fetcher.next("unknown partition again")
        fetcher.next("unknown topic", ("never-made", 0, 0), forget=((a, 7),))
        fetcher.next("unknown topic again")
        fetcher.next("unknown topic forgotten", forget=(("never-made", 0),))
        fetcher.refused("nothing", session_epoch=fetcher.epoch - 1)
        fetcher.refused("nothing", session_epoch=fetcher.epoch + 1)
        fetcher.refused("nothing", session_epoch=-2)
        fetcher.refused("another version", version=11 if version >= 13 else 13)
        fetcher.refused("an unknown id", session_id=7)
        fetcher.refused("no id", session_id=0)
        fetcher.next("as before")
        fetcher.next("all forgotten", forget=((a, 0), (a, 1), (b, 0)))
        fetcher.refused("all forgotten")


@case
def fetch_sessions_that_end(walk: Walk) -> None:
    for version in (11, 15):
        [a] = session_topics(walk, version, "ended")
        fetcher = Fetcher(walk, version)
        fetcher.full("nothing")
        fetcher.next("nothing, nothing")
        fetcher.full("full", (a, 0, 2))
        old = fetcher.id
        fetcher.full("full again", (a, 0, 2), (a, 1, 0))
        fetcher.refused("the old one", session_id=old)
        fetcher.next("the new one")
        fetcher.refused("ended", (a, 0, 1), session_epoch=-1)
        fetcher.refused("ended")
        fetcher.full("two rows", (a, 0, 1), (a, 0, 2))
        fetcher.next("unknown only", ("never-made", 0, 0), forget=((a, 0),))
        fetcher.full("unknown, too", ("never-made", 0, 0), (a, 0, 2))
        fetcher.next("unknown, too")


@case
def fetch_sessions_take_turns(walk: Walk) -> None:
    [a] = session_topics(walk, 11, "turns")
    for number in range(3):
        walk.produce(a, *[b"%d" % n * 100 for n in range(4)], partition=number)
    fetcher = Fetcher(walk, 11)
    offsets = {0: 2, 1: 0, 2: 0}
    answer = fetcher.full("first turn", *((a, n, at) for n, at in offsets.items()), max_bytes=150)
    for turn in range(8):
        rows = []
        for row in (each for topic in answer["responses"] for each in topic["partitions"]):
            for _ in headers(row["records"]):
                offsets[row["partition_index"]] += 1
                rows.append((a, row["partition_index"], offsets[row["partition_index"]]))
        answer = fetcher.next(f"turn {turn}", *rows, max_bytes=150)


@case
def fetch_sessions_that_wait(walk: Walk) -> None:
    [a] = session_topics(walk, 11, "waits")
    fetcher = Fetcher(walk, 11)
    fetcher.full("full", (a, 0, 2), (a, 1, 0))
    other = walk.connect()
    other.send(1, 11, fetcher.body(max_wait_ms=20_000))
    walk.produce(a, b"c", partition=1)
    walk.note("Fetch that waited", other.receive(1, 11))
    fetcher.epoch += 1
    other.send(1, 11, fetcher.body((a, 1, 1), max_wait_ms=20_000, min_bytes=500))
    walk.produce(a, b"d" * 300, partition=1)
    walk.produce(a, b"d" * 300, partition=0)
    walk.note("Fetch that waited for 500 bytes", other.receive(1, 11))
    fetcher.epoch += 1
    other.send(1, 11, fetcher.body((a, 1, 2), (a, 0, 3), max_wait_ms=300))
    walk.note("Fetch that waited for nothing", other.receive(1, 11))
    fetcher.epoch += 1
    other.send(1, 11, fetcher.body(max_wait_ms=1000))
    fetcher.epoch += 1
    walk.ask(1, 11, fetcher.body(), name="Fetch while another one waits", retry={71})
    fetcher.epoch += 1
    walk.note("Fetch that is not the last", other.receive(1, 11))
    fetcher.next("after it")
    fetcher.refused("unknown, waits", ("never-made", 0, 0), max_wait_ms=100)


@case
def fetch_sessions_of_a_deleted_topic(walk: Walk) -> None:
    for version in (12, 16):
        a, b = session_topics(walk, version, "deleted", "kept")
        fetcher = Fetcher(walk, version)
        fetcher.full("full", (a, 0, 2), (b, 0, 2))
        walk.quietly(20, 4, {"topic_names": [a], "timeout_ms": 10_000})
        walk.await_gone(a)
        fetcher.next("deleted")
        fetcher.next("deleted, again")
        session_topics(walk, version, "deleted")
        if version < 13:
            fetcher.next("made again")
            fetcher.next("made again, nothing", (a, 0, 2))
        else:
            fetcher.next("made again, by its old id")


@case
def members_that_are_not_known(walk: Walk) -> None:
    for version in (0, 4):
        for group in ("never-was", ""):
            body = {"group_id": group, "generation_id": 1, "member_id": "m"}
            walk.ask(12, version, body, name=f"Heartbeat v{version} {group!r}")
            walk.ask(14, version, body, name=f"SyncGroup v{version} {group!r}")
    for version in (2, 5):
        for group in ("never-was", ""):
            body = {"group_id": group, "member_id": "m", "members": [{"member_id": "m"}]}
            walk.ask(13, version, body, name=f"LeaveGroup v{version} {group!r}")
    walk.ask(13, 5, {"group_id": "never-was", "members": []})
    walk.joined("known")
    for group, generation, member in (("known", 1, "m"), ("known", 9, "m"), ("known", -1, "")):
        body = {"group_id": group, "generation_id": generation, "member_id": member}
        walk.ask(12, 4, body)
        walk.ask(14, 5, body)


@case
def join_group(walk: Walk) -> None:
    for version in (3, 6, 9):
        for name, body in (
            ("unknown member", join("j-none", member="m")),
            ("unknown member of a group", join(f"j-known-{version}", member="m")),
            ("no group", join("")),
            ("session 100", join("j-none", session=100)),
            ("session 2 hours", join("j-none", session=7_200_000)),
            ("no protocols", join("j-none", protocols=())),
            ("no type", join("j-none", kind="")),
            ("no group, session 100", join("", session=100)),
            ("unknown member, no type", join("j-none", member="m", kind="")),
            ("unknown instance and member", join("j-none", member="m", instance="i")),
        ):
            if name.endswith("of a group"):
                walk.joined(f"j-known-{version}")
            walk.ask(11, version, body, name=f"JoinGroup v{version} {name}")
    first = walk.ask(11, 9, join("j-first"))
    walk.ask(11, 9, join("j-first", member=first["member_id"], kind="connect"))
    walk.joined("j-other")
    walk.ask(11, 9, join("j-other", kind="connect"))
    walk.ask(11, 9, join("j-other", protocols=("sticky",)))


@case
def a_group_of_one(walk: Walk) -> None:
    walk.topic("of-one")
    group = "of-one"
    member = walk.ask(11, 9, join(group, "of-one"))["member_id"]
    joined = walk.ask(11, 9, join(group, "of-one", member=member, protocols=("range", "sticky")))
    generation = joined["generation_id"]
    mine = {"group_id": group, "generation_id": generation, "member_id": member}
    # CompletingRebalance
    walk.ask(12, 4, mine)
    by_member = commit(group, "of-one", 1, member=member, generation=generation)
    walk.ask(8, 8, by_member)
    for version in (0, 5, 6):
        walk.ask(15, version, {"groups": [group]})
    named = {"protocol_type": "consumer", "protocol_name": "range"}
    walk.ask(14, 5, sync(group, member, generation, **named | {"protocol_name": "sticky"}))
    walk.ask(14, 5, sync(group, member, generation, **named | {"protocol_type": "connect"}))
    walk.ask(14, 5, sync(group, member, generation + 4, **named))
    walk.ask(14, 5, sync(group, "m", generation, **named))
    walk.ask(14, 5, sync(group, member, generation, **named))
    # Stable
    walk.ask(14, 5, sync(group, member, generation, **named))
    walk.ask(14, 3, sync(group, member, generation))
    walk.ask(14, 5, sync(group, member, generation, **named | {"protocol_name": "sticky"}))
    walk.ask(12, 4, mine)
    walk.ask(12, 4, mine | {"generation_id": generation + 1})
    walk.ask(12, 4, mine | {"member_id": "m"})
    for version in (0, 4, 6):
        walk.ask(15, version, {"groups": [group]})
    walk.ask(8, 9, by_member)
    for name, body in (
        ("from outside", commit(group, "of-one", 2)),
        ("unknown member", commit(group, "of-one", 2, member="m", generation=generation)),
        ("old generation", commit(group, "of-one", 2, member=member, generation=generation - 1)),
        ("no generation", commit(group, "of-one", 2, member=member)),
        ("unknown topic", commit(group, "no", 2, member=member, generation=generation)),
        ("long metadata",
         commit(group, "of-one", 2, member=member, generation=generation, metadata="x" * 5000)),
        ("unknown topic, member", commit(group, "no", 2, member="m", generation=generation)),
        ("below zero", commit(group, "of-one", -2, member=member, generation=generation)),
    ):  # fmt: skip
        walk.ask(8, 8, body, name=f"OffsetCommit {name}")
    asked = {"group_id": group, "topics": [{"name": "of-one", "partition_indexes": [0]}]}
    walk.ask(9, 7, asked)
    walk.ask(42, 2, {"groups_names": [group]})
    rows = [{"name": "of-one", "partitions": [{"partition_index": 0}]},
            {"name": TOPIC, "partitions": [{"partition_index": 0}]}]  # fmt: skip
    walk.ask(47, 0, {"group_id": group, "topics": rows})
    for states, types in (
        (["stable"], []), ([], ["Classic"]), (["zz"], []), ([], ["zz"]), (["Empty"], ["classic"]),
        (["Stable"], ["consumer"]),
    ):  # fmt: skip
        body = {"states_filter": states, "types_filter": types}
        walk.ask(16, 5, body, only=lambda row: row["group_id"] == group)
    walk.ask(13, 5, {"group_id": group, "members": [{"member_id": member}, {"member_id": "m"}]})
    # Empty
    walk.ask(12, 4, mine)
    walk.ask(15, 6, {"groups": [group]})
    walk.ask(8, 8, commit(group, "of-one", 3, member=member), name="OffsetCommit -1 of Empty")
    walk.ask(8, 8, commit(group, "of-one", 3, member=member, generation=1), name="of Empty")
    walk.ask(8, 8, commit(group, "of-one", 4))
    walk.ask(9, 7, asked)
    walk.ask(47, 0, {"group_id": group, "topics": rows})
    walk.ask(9, 7, asked)
    walk.ask(42, 2, {"groups_names": [group, group, ""]})
    walk.ask(15, 5, {"groups": [group]})


@case
def a_group_of_two(walk: Walk) -> None:
    group = "of-two"
    one, two = walk.connect(), walk.connect()
    first = walk.ask(11, 5, join(group))["member_id"]
    walk.ask(11, 5, join(group, member=first))
    walk.ask(14, 3, sync(group, first, 1))
    second = walk.ask(11, 5, join(group, "u"))["member_id"]
    two.send(11, 5, join(group, "u", member=second))
    await_state(walk, group, "PreparingRebalance")
    mine = {"group_id": group, "generation_id": 1, "member_id": first}
    walk.ask(12, 3, mine, name="Heartbeat while preparing")
    walk.ask(12, 3, mine | {"member_id": second}, name="Heartbeat of the one who waits")
    walk.ask(14, 3, sync(group, first, 1), name="SyncGroup while preparing")
    walk.ask(8, 7, commit(group, TOPIC, 1, member=first, generation=1), name="OffsetCommit then")
    walk.ask(15, 5, {"groups": [group]}, name="DescribeGroups while preparing")
    one.send(11, 5, join(group, member=first))
    leader, follower = one.receive(11, 5), two.receive(11, 5)
    walk.note("JoinGroup leader", leader)
    walk.note("JoinGroup follower", follower)
    two.send(14, 3, sync(group, second, 2) | {"assignments": []})
    rows = [{"member_id": first, "assignment": b"1"}, {"member_id": second, "assignment": b"2"}]
    walk.ask(14, 3, sync(group, first, 2) | {"assignments": rows})
    walk.note("SyncGroup follower", two.receive(14, 3))
    walk.ask(15, 5, {"groups": [group]})
    walk.ask(13, 2, {"group_id": group, "member_id": second})
    walk.ask(12, 3, mine | {"generation_id": 2})
    walk.ask(13, 2, {"group_id": group, "member_id": second})
    walk.ask(13, 4, {"group_id": group, "members": [{"member_id": first}]})


def await_state(walk: Walk, group: str, state: str) -> None:
    while walk.quietly(15, 5, {"groups": [group]})["groups"][0]["group_state"] != state:
        time.sleep(0.01)


@case
def static_members(walk: Walk) -> None:
    for version, group in ((9, "static-9"), (5, "static-5")):
        old, generation = walk.joined(group, instance="one")
        again = walk.ask(11, version, join(group, instance="one"))
        new = again["member_id"]
        stale = {"group_id": group, "generation_id": generation, "member_id": old,
                 "group_instance_id": "one"}  # fmt: skip
        walk.ask(12, 4, stale)
        walk.ask(14, 3, sync(group, old, generation, instance="one"))
        members = [{"member_id": old, "group_instance_id": "one"}]
        walk.ask(13, 5, {"group_id": group, "members": members})
        body = commit(group, TOPIC, 1, member=old, generation=generation, instance="one")
        walk.ask(8, 8, body)
        walk.ask(11, version, join(group, instance="one", member=old))
        walk.ask(12, 4, stale | {"member_id": new})
        walk.ask(12, 4, stale | {"group_instance_id": "two"})
        walk.ask(14, 3, sync(group, new, generation, instance="one"))
        walk.ask(15, 5, {"groups": [group]})
        members = [{"member_id": "", "group_instance_id": name} for name in ("one", "two")]
        walk.ask(13, 5, {"group_id": group, "members": members})
        walk.ask(15, 5, {"groups": [group]})


@case
def offsets_of_groups(walk: Walk) -> None:
    for version in (8, 9):
        body = commit("never-was", TOPIC, 1, member="m", generation=5)
        walk.ask(8, version, body, name=f"OffsetCommit unknown group v{version}")
    walk.ask(8, 8, commit("outside", TOPIC, 1, metadata="x" * 4096))
    walk.ask(8, 8, commit("outside", TOPIC, 2, metadata="x" * 4097))
    walk.ask(8, 8, commit("outside", TOPIC, -5))
    walk.ask(8, 8, commit("outside", TOPIC, 3) | {"topics": []})
    two = commit("outside", TOPIC, 3)
    two["topics"] += commit("outside", "never-made", 3)["topics"]
    walk.ask(8, 8, two)
    walk.ask(8, 2, commit("outside", TOPIC, 4) | {"retention_time_ms": 1_000_000})
    walk.ask(15, 5, {"groups": ["outside"]})
    walk.ask(15, 6, {"groups": ["outside", "never-was", ""]})
    walk.ask(15, 5, {"groups": ["never-was", ""]})
    topics = [{"name": name, "partition_indexes": [0, 9]} for name in (TOPIC, "never-made")]
    for group in ("outside", "never-was", ""):
        for rows in (topics, None, []):
            walk.ask(9, 7, {"group_id": group, "topics": rows})
            walk.ask(9, 9, {"groups": [{"group_id": group, "topics": rows}]})
    walk.ask(9, 1, {"group_id": "outside", "topics": topics})
    walk.ask(9, 9, {"groups": [{"group_id": "outside", "topics": None, "member_id": "m",
                                "member_epoch": 1}]})  # fmt: skip
    # A broker has a group without a name, for offsets only.
    walk.ask(8, 8, commit("", TOPIC, 1), we={"error_code": (0, 24)})
    mine = in_transaction(walk, "nameless")
    walk.ask(25, 3, mine | {"group_id": ""}, we={"error_code": (0, 24)})
    walk.ask(42, 2, {"groups_names": ["never-was"]})
    rows = [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]
    walk.ask(47, 0, {"group_id": "never-was", "topics": rows})
    walk.ask(47, 0, {"group_id": "", "topics": rows})


# ---- transactions ----


def init(name: str | None, *, producer: tuple[int, int] = (-1, -1),
         timeout: int = 60_000) -> dict[str, Any]:  # fmt: skip
    """Return an InitProducerId request."""
    return {
        "transactional_id": name, "transaction_timeout_ms": timeout,
        "producer_id": producer[0], "producer_epoch": producer[1],
    }  # fmt: skip


@case
def init_producer_id(walk: Walk) -> None:
    walk.ask(22, 5, init(""))
    for timeout in (0, -1, 900_000, 900_001):
        walk.ask(22, 5, init("init", timeout=timeout), retry={51})
    walk.ask(22, 5, init(None, timeout=0))
    for producer in ((7, 3), (7, -1), (-1, 3)):
        walk.ask(22, 5, init(None, producer=producer))
    producer_id, epoch = walk.producer("init")
    walk.ask(22, 5, init("init", producer=(producer_id, -1)))
    walk.ask(22, 5, init("init", producer=(-1, epoch)))
    for version in (3, 5):
        current = producer_id, epoch
        made = walk.ask(22, version, init("init", producer=current), name="current", retry={51})
        walk.ask(22, version, init("init", producer=current), name="the same again", retry={51})
        walk.ask(22, version, init("init", producer=(producer_id, epoch - 1)), name="older")
        walk.ask(22, version, init("init", producer=(producer_id, epoch + 9)), name="newer")
        walk.ask(22, version, init("init", producer=(producer_id + 999, epoch)), name="other id")
        epoch = made["producer_epoch"]
    walk.ask(22, 5, init("init-new", producer=(producer_id, epoch)), name="new name")
    walk.ask(22, 5, init("init-open"))
    in_transaction(walk, "init-open")
    walk.ask(22, 4, init("init-open"), retry={51}, name="InitProducerId of an open transaction")


@case
def transactions_that_are_not_there(walk: Walk) -> None:
    walk.topic("tx-none")
    walk.topic("tx-other")
    producer_id, epoch = walk.producer("tx-none")
    mine = {"transactional_id": "tx-none", "producer_id": producer_id, "producer_epoch": epoch}
    for version in (1, 3):
        for name, changes in (
            ("unknown id", {"transactional_id": "never-was"}), ("no id", {"transactional_id": ""}),
            ("wrong producer", {"producer_id": producer_id + 999}),
            ("new epoch", {"producer_epoch": epoch + 1}),
            ("old epoch", {"producer_epoch": epoch - 1}),
        ):  # fmt: skip
            who = mine | changes
            walk.ask(24, version, add(who, "tx-none"), name=f"AddPartitionsToTxn {name}")
            walk.ask(25, version, who | {"group_id": "g"}, name=f"AddOffsetsToTxn {name}")
            walk.ask(26, version, who | {"committed": True}, name=f"EndTxn {name}")
            walk.ask(28, version, txn_commit(who, "g"), name=f"TxnOffsetCommit {name}")
        walk.ask(24, version, add(mine, "tx-none", "never-made"), name="AddPartitionsToTxn two")
        walk.ask(24, version, add(mine), name="AddPartitionsToTxn none")
        for internal in ("__consumer_offsets", "__transaction_state"):
            name = "AddPartitionsToTxn internal"
            walk.ask(24, version, add(mine, "tx-none", internal), name=name)
        walk.ask(26, version, mine | {"committed": True}, name="EndTxn of Empty", retry={51})
        walk.ask(26, version, mine | {"committed": False}, name="EndTxn of Empty", retry={51})
    raw = at(START_MS, b"a", producer=(producer_id, epoch, 0), transactional=True)
    for version in (9, 11):
        body = produce_body("tx-none", raw, transactional_id="tx-none")
        walk.ask(0, version, body, name=f"Produce v{version} before AddPartitions")
    for version in (3, 4):
        walk.ask(28, version, txn_commit(mine, "g"), name="TxnOffsetCommit before AddOffsets")


@case
def a_transaction(walk: Walk) -> None:
    walk.topic("tx", 2)
    walk.topic("tx-offsets")
    producer_id, epoch = walk.producer("tx")
    mine = {"transactional_id": "tx", "producer_id": producer_id, "producer_epoch": epoch}
    walk.ask(24, 3, add(mine, "tx"), retry={51})
    walk.ask(24, 3, add(mine, "tx"))

    def batch_of(sequence: int, *, transactional: bool = True, epoch: int = epoch) -> bytes:
        producer = producer_id, epoch, sequence
        return at(START_MS, b"a", b"b", producer=producer, transactional=transactional)

    def produce(name: str, raw: bytes, *, version: int = 9, partition: int = 0) -> None:
        body = produce_body("tx", raw, transactional_id="tx", partition=partition)
        walk.ask(0, version, body, name=f"Produce {name}")

    walk.ask(65, 0, {"transactional_ids": ["tx"]})
    produce("first", batch_of(0))
    produce("again", batch_of(0))
    produce("plain batch inside the transaction", batch_of(2, transactional=False))
    produce("plain batch inside v11", batch_of(2, transactional=False), version=11)
    produce("another partition", batch_of(0), partition=1)
    produce("another partition v11", batch_of(0), partition=1, version=11)
    produce("second", batch_of(2))
    for isolation in (0, 1):
        walk.ask(1, 11, fetch_body("tx", 0, isolation=isolation), name=f"Fetch open {isolation}")
    offsets = [{"name": "tx", "partitions": [{"partition_index": 0, "timestamp": -1}]}]
    for isolation in (0, 1):
        body = {"replica_id": -1, "isolation_level": isolation, "topics": offsets}
        walk.ask(2, 9, body, name=f"ListOffsets open {isolation}")
    group = "tx-group"
    walk.ask(25, 3, mine | {"group_id": group})
    walk.ask(28, 3, txn_commit(mine, group, generation_id=5, member_id="m"))
    walk.ask(28, 3, txn_commit(mine, group, generation_id=5))
    walk.ask(28, 3, txn_commit(mine, group))
    fetched = {"group_id": group, "topics": [{"name": TOPIC, "partition_indexes": [0]}]}
    walk.ask(9, 7, fetched | {"require_stable": True}, name="OffsetFetch stable, open")
    walk.ask(9, 7, fetched, name="OffsetFetch open")
    walk.ask(61, 0, {"topics": [{"name": "tx", "partition_indexes": [0]}]})
    walk.ask(26, 4, mine | {"committed": True}, name="EndTxn commit")
    walk.ask(26, 4, mine | {"committed": True}, name="EndTxn again", retry={51})
    walk.ask(26, 4, mine | {"committed": False}, name="EndTxn abort then", retry={51})
    walk.ask(9, 7, fetched | {"require_stable": True}, name="OffsetFetch stable", retry={88})
    walk.ask(28, 3, txn_commit(mine, group), name="TxnOffsetCommit after the end")
    await_stable(walk, "tx", 5)
    for isolation in (0, 1):
        walk.ask(1, 11, fetch_body("tx", 0, isolation=isolation), name=f"Fetch done {isolation}")
    walk.ask(24, 3, add(mine, "tx"), name="AddPartitionsToTxn second", retry={51})
    produce("to be aborted", batch_of(4))
    walk.ask(26, 4, mine | {"committed": False}, name="EndTxn abort")
    walk.ask(26, 4, mine | {"committed": False}, name="EndTxn abort again", retry={51})
    walk.ask(26, 4, mine | {"committed": True}, name="EndTxn commit then", retry={51})
    await_stable(walk, "tx", 8)
    for isolation in (0, 1):
        walk.ask(1, 11, fetch_body("tx", 0, isolation=isolation), name=f"Fetch end {isolation}")
    walk.ask(61, 0, {"topics": [{"name": "tx", "partition_indexes": [0]}]})
    # Fenced by its successor.
    walk.ask(24, 3, add(mine, "tx"), name="AddPartitionsToTxn third", retry={51})
    walk.ask(22, 4, init("tx"), retry={51}, name="InitProducerId of a successor")
    for version in (1, 4):
        walk.ask(26, version, mine | {"committed": True}, name=f"EndTxn v{version} fenced")
    for version in (1, 3):
        walk.ask(24, version, add(mine, "tx"), name=f"AddPartitionsToTxn v{version} fenced")
        walk.ask(25, version, mine | {"group_id": "g"}, name=f"AddOffsetsToTxn v{version} fenced")
        walk.ask(28, version, txn_commit(mine, group), name=f"TxnOffsetCommit v{version} fenced")
    produce("fenced", batch_of(6))
    walk.ask(66, 0, {}, only=lambda row: row["transactional_id"] == "tx")


@case
def a_transaction_of_version_2(walk: Walk) -> None:
    walk.topic("tx2", 2)
    name, group = "tx2", "tx2-group"
    producer_id, epoch = walk.producer(name)

    def fields(epoch: int) -> dict[str, Any]:
        return {"transactional_id": name, "producer_id": producer_id, "producer_epoch": epoch}

    def produce(
        what: str, epoch: int, sequence: int, *, partition: int = 0, version: int = 12,
        transactional: bool = True, transactional_id: str | None = name, producer: int = 0,
        topic: str = "tx2",
    ) -> None:  # fmt: skip
        made = (producer_id + producer, epoch, sequence)
        raw = at(START_MS, b"a", b"b", producer=made, transactional=transactional)
        body = produce_body(topic, raw, transactional_id=transactional_id, partition=partition)
        walk.ask(0, version, body, name=f"Produce {what}", retry={51})

    def end(what: str, epoch: int, *, commit: bool, version: int = 5) -> None:
        walk.ask(26, version, fields(epoch) | {"committed": commit}, name=f"EndTxn {what}",
                 retry={51})  # fmt: skip

    def described(what: str) -> None:
        walk.ask(65, 0, {"transactional_ids": [name]}, name=f"DescribeTransactions {what}")

    produce("unknown id", epoch, 0, transactional_id="tx2-never")
    produce("empty id", epoch, 0, transactional_id="")
    produce("no id", epoch, 0, transactional_id=None)
    produce("unknown producer", epoch, 0, producer=99_999)
    produce("newer epoch", epoch + 1, 0)
    walk.ask(26, 5, fields(epoch) | {"producer_id": -1, "committed": True}, name="EndTxn of none")
    end("commit Empty", epoch, commit=True)
    end("abort Empty", epoch, commit=False)
    end("abort Empty again", epoch, commit=False)
    end("commit what was aborted", epoch, commit=True)
    end("abort CompleteAbort", epoch + 1, commit=False)
    end("commit CompleteAbort", epoch + 2, commit=True)
    epoch += 2
    produce("does not begin at 0", epoch, 5)
    produce("first", epoch, 0)
    described("first")
    produce("again", epoch, 0)
    produce("a gap", epoch, 9)
    produce("another partition", epoch, 0, partition=1)
    produce("older version", epoch, 2, version=11)
    produce("plain batch inside", epoch, 4, transactional=False)
    produce("old epoch", epoch - 1, 4)
    produce("new epoch", epoch + 1, 4)
    produce("unknown topic", epoch, 0, topic="tx2-never")
    described("two partitions")
    for what, who in (
        ("", fields(epoch)), ("old epoch", fields(epoch - 1)), ("new epoch", fields(epoch + 1)),
        ("other producer", fields(epoch) | {"producer_id": producer_id + 99_999}),
    ):  # fmt: skip
        walk.ask(28, 5, txn_commit(who, group), name=f"TxnOffsetCommit v5 {what}")
    walk.ask(28, 5, txn_commit(fields(epoch), group, generation_id=5, member_id="m"))
    walk.ask(28, 5, txn_commit(fields(epoch), ""))
    walk.ask(28, 4, txn_commit(fields(epoch), group + "-other"), name="TxnOffsetCommit v4")
    end("newer epoch", epoch + 1, commit=True)
    end("older epoch", epoch - 1, commit=True)
    end("v4, newer epoch", epoch + 1, commit=True, version=4)
    end("commit", epoch, commit=True)
    end("commit again", epoch, commit=True)
    end("abort what was committed", epoch, commit=False)
    end("commit with the next epoch", epoch + 1, commit=True)
    described("committed")
    await_stable(walk, "tx2", 5)
    fetched = {"group_id": group, "topics": [{"name": TOPIC, "partition_indexes": [0]}]}
    walk.ask(9, 7, fetched | {"require_stable": True}, name="OffsetFetch", retry={88})
    produce("late", epoch, 4)
    produce("late, v11", epoch, 4, version=11)
    walk.ask(28, 5, txn_commit(fields(epoch), group), name="TxnOffsetCommit v5 late")
    walk.ask(28, 4, txn_commit(fields(epoch), group), name="TxnOffsetCommit v4 late")
    epoch += 1
    produce("next, wrong sequence", epoch, 4)
    produce("next", epoch, 0)
    end("abort", epoch, commit=False)
    end("abort again", epoch, commit=False)
    await_stable(walk, "tx2", 8)
    for isolation in (0, 1):
        walk.ask(1, 11, fetch_body("tx2", 0, isolation=isolation), name=f"Fetch {isolation}")
    walk.ask(61, 0, {"topics": [{"name": "tx2", "partition_indexes": [0, 1]}]})
    # The version of the request decides if the epoch stays.
    epoch += 1
    produce("for v4", epoch, 0)
    end("v4", epoch, commit=True, version=4)
    end("v4 again", epoch, commit=True, version=4)
    end("v5 then", epoch, commit=True)
    walk.ask(24, 3, add(fields(epoch), "tx2"), retry={51})
    produce("v11", epoch, 2, version=11)
    end("v5 after AddPartitionsToTxn", epoch, commit=True)
    end("v5 after AddPartitionsToTxn again", epoch, commit=True)
    described("in the end")


@case
def a_producer_of_version_2_is_fenced(walk: Walk) -> None:
    walk.topic("tx2-fenced", 2)
    for name, timeout in (("tx2-fenced", 60_000), ("tx2-late", 1000)):
        made = walk.quietly(22, 5, init(name, timeout=timeout))
        producer = made["producer_id"], made["producer_epoch"]
        mine = {"transactional_id": name, "producer_id": producer[0], "producer_epoch": producer[1]}
        raw = at(START_MS, b"a", producer=(*producer, 0), transactional=True)
        body = produce_body("tx2-fenced", raw, transactional_id=name)
        walk.ask(0, 12, body, name=f"Produce {name}")
        walk.ask(65, 0, {"transactional_ids": [name]})
        if timeout == 1000:
            deadline = time.monotonic() + 30
            asked = {"transactional_ids": [name]}
            while walk.quietly(65, 0, asked)["transaction_states"][0]["transaction_state"] in (
                "Ongoing", "PrepareAbort",
            ):  # fmt: skip
                assert time.monotonic() < deadline
                time.sleep(0.02)
        else:
            walk.ask(22, 5, init(name), retry={51}, name="InitProducerId of a successor")
        for partition in (0, 1):
            raw = at(START_MS, b"b", producer=(*producer, 1 - partition), transactional=True)
            body = produce_body("tx2-fenced", raw, transactional_id=name, partition=partition)
            walk.ask(0, 12, body, name=f"Produce {name} {partition} fenced")
        walk.ask(28, 5, txn_commit(mine, "tx2-g"), name=f"TxnOffsetCommit {name} fenced")
        for version in (4, 5):
            for committed in (True, False):
                asked = mine | {"committed": committed}
                walk.ask(26, version, asked, name=f"EndTxn v{version} {name} fenced", retry={51})
        again = init(name, producer=producer, timeout=timeout)
        walk.ask(22, 5, again, name=f"InitProducerId {name} again", retry={51})


def await_stable(walk: Walk, topic: str, offset: int) -> None:
    """Wait until the last stable offset is the end: a broker writes markers after its answer."""
    row = {"partition_index": 0, "timestamp": -1}
    topics = [{"name": topic, "partitions": [row]}]
    asked = {"replica_id": -1, "isolation_level": 1, "topics": topics}
    deadline = time.monotonic() + 10
    while walk.quietly(2, 9, asked)["topics"][0]["partitions"][0]["offset"] != offset:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@case
def markers(walk: Walk) -> None:
    walk.topic("marked")
    producer_id, _ = walk.producer(None)
    for name, topic, number, epoch in (
        ("a higher epoch", "marked", 0, 3), ("an older epoch", "marked", 0, 1),
        ("unknown partition", "marked", 7, 3), ("unknown topic", "never-made", 0, 3),
    ):  # fmt: skip
        row = {"producer_id": producer_id, "producer_epoch": epoch, "transaction_result": True}
        row |= {"coordinator_epoch": 0, "topics": [{"name": topic, "partition_indexes": [number]}]}
        walk.ask(27, 1, {"markers": [row]}, name=f"WriteTxnMarkers {name}")
    walk.ask(1, 11, fetch_body("marked", 0))
    walk.ask(61, 0, {"topics": [{"name": "marked", "partition_indexes": [0]}]})
    for version in (0, 1, 2):
        name = f"marked-{version}"
        open_id, epoch = walk.producer(name)
        raw = at(START_MS, b"a", producer=(open_id, epoch, 0), transactional=True)
        walk.ask(0, 12, produce_body("marked", raw, transactional_id=name))
        for newer in (0, 0, 1, 1):
            row = {"producer_id": open_id, "producer_epoch": epoch + newer}
            row |= {"transaction_result": False, "transaction_version": version}
            row |= {
                "coordinator_epoch": 0,
                "topics": [{"name": "marked", "partition_indexes": [0]}],
            }
            walk.ask(27, 2, {"markers": [row]}, name=f"WriteTxnMarkers {version} {newer}")


@case
def transactions_described(walk: Walk) -> None:
    walk.ask(65, 0, {"transactional_ids": ["never-was", ""]})
    walk.producer("listing-empty")
    mine = in_transaction(walk, "listing-open")
    only = lambda row: row["transactional_id"].startswith("listing-")  # noqa: E731
    walk.ask(66, 0, {"state_filters": ["zz"]}, only=only)
    walk.ask(66, 0, {"state_filters": ["Empty"]}, only=only)
    walk.ask(66, 0, {"state_filters": ["empty"]}, only=only)
    walk.ask(66, 0, {"producer_id_filters": [mine["producer_id"]]}, only=only)
    walk.ask(66, 1, {"duration_filter": 100_000_000}, only=only)
    walk.ask(66, 1, {"duration_filter": -1}, only=only)
    walk.ask(66, 2, {"duration_filter": -1, "transactional_id_pattern": "listing-o.*"}, only=only)
    walk.ask(66, 2, {"duration_filter": -1, "transactional_id_pattern": "("}, only=only)
    walk.ask(66, 2, {"duration_filter": -1, "transactional_id_pattern": ""}, only=only)


# ---- administration ----


@case
def delete_records(walk: Walk) -> None:
    walk.topic("dr")
    walk.topic("dr-compact", cleanup_policy="compact")
    walk.produce("dr", b"a", b"b", b"c")
    for name, topic, number, offset in (
        ("beyond the end", "dr", 0, 9), ("-5", "dr", 0, -5), ("1", "dr", 0, 1),
        ("below the start", "dr", 0, 0), ("all", "dr", 0, -1), ("compacted", "dr-compact", 0, 0),
        ("unknown", "never-made", 0, 0), ("unknown partition", "dr", 7, 0),
        ("internal", "__consumer_offsets", 0, 0),
    ):  # fmt: skip
        rows = [{"name": topic, "partitions": [{"partition_index": number, "offset": offset}]}]
        walk.ask(21, 2, {"topics": rows, "timeout_ms": 10_000}, name=f"DeleteRecords {name}")


@case
def create_partitions(walk: Walk) -> None:
    walk.topic("cp", 2)

    def asked(count: int, assignments: Any = None, *, topic: str = "cp") -> dict[str, Any]:
        row = {"name": topic, "count": count, "assignments": assignments}
        return {"topics": [row], "timeout_ms": 10_000, "validate_only": False}

    for count in (2, 1, 0, -1):
        walk.ask(37, 3, asked(count), name=f"CreatePartitions {count}")
    one = {"broker_ids": [1]}
    walk.ask(37, 3, asked(4, [one]), name="CreatePartitions assignments short")
    walk.ask(37, 3, asked(3, [{"broker_ids": [9]}]), name="CreatePartitions node 9")
    walk.ask(37, 3, asked(3, []), name="CreatePartitions no assignments")
    twice = asked(3)
    walk.ask(37, 3, twice | {"topics": twice["topics"] * 2}, name="CreatePartitions twice")
    walk.ask(37, 3, asked(3, topic="never-made"), name="CreatePartitions unknown")
    walk.ask(37, 3, asked(3) | {"validate_only": True}, name="CreatePartitions validated")
    walk.ask(37, 3, asked(3, [one]), name="CreatePartitions 3")


@case
def describe_configs(walk: Walk) -> None:
    for kind, name in (
        (2, "never-made"), (2, "a b"), (2, ""), (4, "9"), (4, "x"), (99, "x"), (0, "x"),
    ):  # fmt: skip
        row = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        walk.ask(32, 4, {"resources": [row]}, name=f"DescribeConfigs {kind} {name}")
    row = {"resource_type": 4, "resource_name": "", "configuration_keys": None}
    # A broker has a default for the cluster.
    walk.ask(32, 4, {"resources": [row]}, we={"configs": (..., ABSENT)})
    row = {"resource_type": 2, "resource_name": TOPIC, "configuration_keys": []}
    walk.ask(32, 4, {"resources": [row]}, name="DescribeConfigs no keys")


@case
def alter_configs(walk: Walk) -> None:
    walk.topic("ac")

    def ask(name: str, *settings: tuple[str, int, str | None], topic: str = "ac", kind: int = 2,
            **more: Any) -> None:  # fmt: skip
        rows = [{"name": key, "config_operation": operation, "value": value}
                for key, operation, value in settings]  # fmt: skip
        row = {"resource_type": kind, "resource_name": topic, "configs": rows}
        body = {"resources": [row], "validate_only": False}
        walk.ask(44, 1, body, name=f"IncrementalAlterConfigs {name}", **more)
        old = [{"name": key, "value": value} for key, operation, value in settings]
        if not any(operation for _, operation, _ in settings):
            body = {"resources": [row | {"configs": old}], "validate_only": True}
            walk.ask(33, 2, body, name=f"AlterConfigs {name}", **more)

    ask("unknown", ("no.such", 0, "1"))
    ask("bad value", ("retention.ms", 0, "x"))
    ask("append to a number", ("retention.ms", 2, "1"))
    ask("twice", ("retention.ms", 0, "1000000"), ("retention.ms", 0, "2000000"))
    ask("null", ("retention.ms", 0, None))
    ask("unknown topic", ("retention.ms", 0, "1000000"), topic="never-made")
    ask("bad topic", ("retention.ms", 0, "1000000"), topic="a b")
    ask("operation 9", ("retention.ms", 9, "1000000"), we={"error_code": (-1, 42)})
    ask("type 99", ("retention.ms", 0, "1000000"), kind=99)
    ask("append", ("cleanup.policy", 2, "compact"))
    ask("append again", ("cleanup.policy", 2, "compact"))
    ask("append nothing known", ("cleanup.policy", 2, "zz"))
    ask("subtract", ("cleanup.policy", 3, "delete"))
    ask("subtract what is not there", ("cleanup.policy", 3, "zz"))
    ask("delete", ("cleanup.policy", 1, None))
    ask("delete unknown", ("no.such", 1, None))
    ask("nothing")
    row = {"resource_type": 2, "resource_name": "ac", "configuration_keys": ["cleanup.policy"]}
    walk.ask(32, 4, {"resources": [row]})


@case
def delete_topics(walk: Walk) -> None:
    known = walk.topic("dt")

    def ask(name: str, *rows: tuple[str | None, bytes]) -> None:
        topics = [{"name": topic, "topic_id": id_bytes} for topic, id_bytes in rows]
        body = {"topics": topics, "timeout_ms": 10_000}
        walk.ask(20, 6, body, name=f"DeleteTopics {name}")

    none = bytes(16)
    ask("name and id", ("dt", known))
    ask("neither", (None, none))
    ask("twice", ("dt", none), ("dt", none))
    ask("by name and by id", ("dt", none), (None, known))
    ask("unknown id", (None, UNKNOWN_ID))
    ask("unknown name", ("never-made", none))
    ask("bad name", ("a b", none))
    for version in (1, 5):
        names = {"topic_names": ["dt", "dt", "never-made"], "timeout_ms": 10_000}
        walk.ask(20, version, names, name=f"DeleteTopics v{version}")
    walk.ask(20, 5, {"topic_names": ["dt"], "timeout_ms": 10_000}, name="DeleteTopics at last")


@case
def log_dirs(walk: Walk) -> None:
    walk.topic("ld")
    walk.produce("ld", b"a", b"b")
    walk.ask(35, 4, {"topics": [{"topic": "ld", "partitions": [0, 7]}]})
    walk.ask(35, 4, {"topics": []})
    walk.ask(35, 4, {"topics": [{"topic": "never-made", "partitions": [0]}]})
    rows = [{"name": "ld", "partitions": [0]}, {"name": "never-made", "partitions": [0]}]
    walk.ask(34, 2, {"dirs": [{"path": "/nowhere", "topics": rows}]})
    walk.ask(34, 2, {"dirs": [{"path": "relative", "topics": rows}]})


@case
def leaders(walk: Walk) -> None:
    rows = [{"topic": TOPIC, "partitions": [0]}, {"topic": "never-made", "partitions": [0]}]
    for kind in (0, 1):
        body = {"election_type": kind, "topic_partitions": rows, "timeout_ms": 10_000}
        walk.ask(43, 2, body, name=f"ElectLeaders {kind}")
    body = {"election_type": 9, "topic_partitions": rows, "timeout_ms": 10_000}
    walk.ask(43, 2, body, name="ElectLeaders 9")
    for version in (0, 1):
        for name, number, nodes in (
            ("here", 0, [1]), ("nowhere", 0, []), ("twice", 0, [1, 1]), ("there", 0, [2]),
            ("cancel", 0, None), ("unknown", 7, [1]), ("cancel unknown", 7, None),
        ):  # fmt: skip
            parts = [{"partition_index": number, "replicas": nodes}]
            body = {"topics": [{"name": TOPIC, "partitions": parts}], "timeout_ms": 10_000}
            walk.ask(45, version, body, name=f"AlterPartitionReassignments {name}")
    asked = [{"name": TOPIC, "partition_indexes": [0]}, {"name": "no", "partition_indexes": [0]}]
    walk.ask(46, 0, {"topics": asked, "timeout_ms": 10_000})


@pytest.mark.parametrize("walk", CASES, ids=lambda walk: walk.__name__)
def test_walk(sides: Sides, walk: Callable[[Walk], None]) -> None:
    compare(sides, walk)


# ---- random walks ----


class Wanderer:
    """Random requests about two topics, two groups and two transactional ids.

    The requests depend on the seed, and on ids that the side has given.  A group has one member at
    a time, so that no join waits for another one.
    """

    def __init__(self, walk: Walk, seed: int, prefix: str) -> None:
        self.walk = walk
        self.chance = random.Random(seed)
        self.prefix = prefix
        self.members: dict[str, str] = {}
        self.producers: dict[str, tuple[int, int]] = {}
        self.fetcher = Fetcher(walk, 11)

    def step(self) -> None:
        self.chance.choice(
            [
                self.create, self.grow, self.trim, self.alter, self.produce, self.produce,
                self.fetch, self.fetch_in_session, self.fetch_in_session, self.offsets,
                self.join, self.join, self.beat, self.sync, self.leave,
                self.commit, self.commit, self.committed, self.describe, self.delete_group,
                self.init, self.add, self.add, self.produce_in, self.produce_in, self.add_offsets,
                self.commit_in, self.end, self.end,
            ]
        )()  # fmt: skip

    def topic(self) -> str:
        return f"{self.prefix}-{self.chance.choice('aab')}"

    def group(self) -> str:
        return f"{self.prefix}-{self.chance.choice('gh')}"

    def transaction(self) -> str:
        return f"{self.prefix}-{self.chance.choice('xy')}"

    # ---- topics ----

    def create(self) -> None:
        name, count = self.topic(), self.chance.choice([-1, 0, 1, 2])
        policy = self.chance.choice(["delete", "compact", "none"])
        configs = [{"name": "cleanup.policy", "value": policy}] * self.chance.randrange(2)
        made = self.walk.ask(19, 7, new_topic(name, num_partitions=count, configs=configs))
        if made["topics"][0]["error_code"] == 0:
            self.walk.await_topic(name, made["topics"][0]["num_partitions"])

    def grow(self) -> None:
        name, count = self.topic(), self.chance.randrange(4)
        row = {"name": name, "count": count, "assignments": None}
        body = {"topics": [row], "timeout_ms": 10_000, "validate_only": False}
        if self.walk.ask(37, 3, body)["results"][0]["error_code"] == 0:
            self.walk.await_topic(name, count)

    def trim(self) -> None:
        row = {"partition_index": self.chance.randrange(2), "offset": self.chance.randrange(-1, 5)}
        rows = [{"name": self.topic(), "partitions": [row]}]
        self.walk.ask(21, 2, {"topics": rows, "timeout_ms": 10_000})

    def alter(self) -> None:
        name = self.chance.choice(["retention.ms", "cleanup.policy", "segment.ms", "no.such"])
        value = self.chance.choice(["1000000", "compact", "delete", "-1", None])
        # Not SUBTRACT: a broker allows an empty cleanup.policy.
        setting = {"name": name, "value": value, "config_operation": self.chance.randrange(3)}
        row = {"resource_type": 2, "resource_name": self.topic(), "configs": [setting]}
        self.walk.ask(44, 1, {"resources": [row], "validate_only": self.chance.random() < 0.8})

    # ---- records ----

    def batch(self, name: str, *, transactional: bool) -> bytes:
        producer_id, epoch = self.producers.get(name, (1 << 40, 0))
        producer = producer_id, max(0, epoch + self.chance.choice([0, 0, 0, 0, -1, 1])), 0
        # A broker remembers the lowest sequence that it refused in a transaction.
        sequence = 0
        if not transactional:
            producer = (1 << 41), self.chance.randrange(2), 0
            sequence = self.chance.choice([0, 0, 2, 4])
        return at(START_MS, b"a", b"b", key=b"k", transactional=transactional,
                  producer=(*producer[:2], sequence))  # fmt: skip

    def produce(self) -> None:
        raw = at(START_MS, b"a", b"b", key=self.chance.choice([b"k", None]))
        if self.chance.random() < 0.3:
            raw = self.batch(self.transaction(), transactional=False)
        version, topic = self.chance.randrange(3, 14), self.topic()
        body = produce_body(topic, raw, partition=self.chance.randrange(2))
        self.walk.ask(0, version, by_id(body, self.walk.id_of(topic)))

    def fetch(self) -> None:
        body = fetch_body(self.topic(), self.chance.randrange(-1, 6),
                          partition=self.chance.randrange(2),
                          isolation=self.chance.randrange(2))  # fmt: skip
        self.walk.ask(1, self.chance.randrange(4, 13), body)

    def fetch_in_session(self) -> None:
        rows = {(self.topic(), self.chance.randrange(2)): self.chance.randrange(-1, 6)
                for _ in range(self.chance.randrange(3))}  # fmt: skip
        fetcher, asked = self.fetcher, [(*key, offset) for key, offset in rows.items()]
        if fetcher.id == 0:
            fetcher.full("full", *asked)
            return
        gone = ((self.topic(), self.chance.randrange(2)),) * self.chance.randrange(2)
        fetcher.id = fetcher.next("next", *asked, forget=gone)["session_id"]

    def offsets(self) -> None:
        # Transactions are in partition 0.  A broker finds markers by time, too.
        number = self.chance.randrange(2)
        times = [-3, START_MS, START_MS + 1] * number
        when = self.chance.choice([-1, -2, -4, *times])
        row = {"partition_index": number, "timestamp": when}
        topics = [{"name": self.topic(), "partitions": [row]}]
        isolation = self.chance.randrange(2)
        body = {"replica_id": -1, "isolation_level": isolation, "topics": topics}
        self.walk.ask(2, self.chance.randrange(2, 12), body)

    # ---- groups ----

    def member(self, group: str) -> str:
        return self.chance.choice([self.members.get(group, ""), self.members.get(group, ""), "m"])

    def join(self) -> None:
        group, version = self.group(), self.chance.randrange(10)
        kind = self.chance.choice(["consumer", "consumer", "connect"])
        body = join(group, self.topic(), member=self.members.get(group, ""), kind=kind)
        made = self.walk.ask(11, version, body)
        if made["error_code"] in (0, 79):
            self.members[group] = made["member_id"]

    def beat(self) -> None:
        group = self.group()
        generation, member = self.chance.randrange(4), self.member(group)
        body = {"group_id": group, "generation_id": generation, "member_id": member}
        self.walk.ask(12, self.chance.randrange(5), body)

    def sync(self) -> None:
        group = self.group()
        named = {"protocol_type": "consumer", "protocol_name": "range"}
        body = sync(group, self.member(group), self.chance.randrange(4), **named)
        self.walk.ask(14, self.chance.randrange(6), body)

    def leave(self) -> None:
        group = self.group()
        member = self.member(group)
        body = {"group_id": group, "member_id": member, "members": [{"member_id": member}]}
        self.walk.ask(13, self.chance.randrange(6), body)
        if self.members.get(group) == member:
            del self.members[group]

    def commit(self) -> None:
        group = self.group()
        topic = self.topic()
        body = commit(group, topic, self.chance.randrange(9),
                      member=self.chance.choice(["", self.member(group)]),
                      generation=self.chance.randrange(-1, 3))  # fmt: skip
        self.walk.ask(8, self.chance.randrange(2, 11), by_id(body, self.walk.id_of(topic)))

    def committed(self) -> None:
        topic = self.topic()
        row = {"name": topic, "partition_indexes": [0, 1], "topic_id": self.walk.id_of(topic)}
        rows = [row]
        group = {"group_id": self.group(), "topics": self.chance.choice([rows, None])}
        stable = {"require_stable": self.chance.random() < 0.5}
        if self.chance.random() < 0.5:
            self.walk.ask(9, self.chance.choice([8, 9, 10]), stable | {"groups": [group]})
        else:
            self.walk.ask(9, 7, group | stable)

    def describe(self) -> None:
        self.walk.ask(15, self.chance.randrange(7), {"groups": [self.group()]})

    def delete_group(self) -> None:
        self.walk.ask(42, 2, {"groups_names": [self.group()]})

    # ---- transactions ----

    def mine(self) -> dict[str, Any]:
        name = self.transaction()
        producer_id, epoch = self.producers.get(name, (1 << 40, 0))
        epoch += self.chance.choice([0, 0, 0, 0, 1, -1])
        return {"transactional_id": name, "producer_id": producer_id, "producer_epoch": epoch}

    def init(self) -> None:
        name = self.transaction()
        producer = self.producers.get(name, (-1, -1))
        given = self.chance.choice([producer, (-1, -1)])
        version = self.chance.choice([3, 4, 5])
        made = self.walk.ask(22, version, init(name, producer=given), retry={51})
        if made["error_code"] == 0:
            self.producers[name] = made["producer_id"], made["producer_epoch"]

    def add(self) -> None:
        topics = {self.topic() for _ in range(2)}
        self.walk.ask(24, self.chance.randrange(4), add(self.mine(), *sorted(topics)), retry={51})

    def produce_in(self) -> None:
        name = self.transaction()
        raw = self.batch(name, transactional=True)
        version = self.chance.randrange(3, 13)
        body = produce_body(self.topic(), raw, transactional_id=name)
        self.walk.ask(0, version, body, retry={51})

    def add_offsets(self) -> None:
        body = self.mine() | {"group_id": self.group()}
        self.walk.ask(25, self.chance.randrange(4), body, retry={51})

    def commit_in(self) -> None:
        group = self.group()
        body = txn_commit(self.mine(), group, member_id=self.member(group),
                          generation_id=self.chance.randrange(-1, 3))  # fmt: skip
        self.walk.ask(28, self.chance.randrange(6), body, retry={51})

    def end(self) -> None:
        mine = self.mine()
        body = mine | {"committed": self.chance.random() < 0.5}
        version = self.chance.randrange(6)
        ended = self.walk.ask(26, version, body, retry={51})
        if version == 5 and ended["error_code"] == 0:
            self.producers[mine["transactional_id"]] = (
                ended["producer_id"], ended["producer_epoch"],
            )  # fmt: skip
        asked = {"transactional_ids": [mine["transactional_id"]]}
        deadline = time.monotonic() + 10
        while "Prepare" in self.walk.quietly(65, 0, asked)["transaction_states"][0].get(
            "transaction_state", ""
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(sized(5, 50, 1000)))
def test_random_walk(sides: Sides, seed: int) -> None:
    def wander(walk: Walk, prefix: str) -> None:
        walk.topic(TOPIC, 2)
        walk.topic(f"{prefix}-a", 1 + seed % 2)
        wanderer = Wanderer(walk, seed, prefix)
        for _ in range(50):
            wanderer.step()

    # Kafka removes a group that holds nothing at a moment of its own.  A difference counts if the
    # same walk, with other names, shows one each time.
    for attempt in range(3):
        found = compared(sides, functools.partial(wander, prefix=f"random-{seed}-{attempt}"))
        if not found:
            return
    raise AssertionError("\n" + "\n".join(found))
