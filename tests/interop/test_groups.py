"""Groups and committed offsets that logstore wrote, as Kafka's dumper and a real broker see them.

A broker makes the topics and commits an offset of its own; logstore opens the directory, reads what
it finds, runs groups of its own and leaves; the broker takes over again.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import logstore
from logstore import CommittedOffset, Consumer, Groups, Producer, TopicPartition
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS

from .kafka import Broker, dump_log, require_kafka

pytestmark = pytest.mark.interop

T = TopicPartition("orders", 0)
TIMEOUT = 180.0


class Left(NamedTuple):
    """The state that logstore left."""

    broker: Broker
    dump: list[tuple[Any, Any]]  # keys and payloads of the offsets topic, in order
    members: list[str]


def records_of(text: str) -> list[tuple[Any, Any]]:
    """(key, payload) of each record, as JSON, of what the decoder prints."""
    found = []
    for line in text.splitlines():
        match = re.search(r" key: (.*?) payload: ?(.*)$", line)
        if line.startswith("| offset:") and match:
            key, payload = match.groups()
            try:
                decoded = json.loads(key), (json.loads(payload) if "{" in payload else None)
            except json.JSONDecodeError as error:
                raise AssertionError(f"not JSON: {line}") from error
            found.append(decoded)
    return found


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    require_kafka()
    confluent = pytest.importorskip("confluent_kafka")
    broker = Broker(tmp_path_factory.mktemp("groups"))
    with broker:
        broker.create_topic("orders")
        theirs = confluent.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "theirs"})
        wanted = confluent.TopicPartition("orders", 0, 0, metadata="by librdkafka")
        retry(lambda: theirs.commit(offsets=[wanted], asynchronous=False))
        theirs.close()
    with logstore.open(broker.log_dir) as store:
        groups = Groups(store)
        # What a broker wrote is read; its one partition of the topic is taken as it is.
        assert store.topic_changes.declared_partitions(store[CONSUMER_OFFSETS]) == 1
        found = groups.committed("theirs")[T]
        # librdkafka's binding sends the zero at the end of a C string along.
        assert (found.offset, found.metadata.rstrip("\0")) == (0, "by librdkafka")
        for number in range(10):
            store["orders"].append(b"%d" % number)
        groups.commit("simple", {T: CommittedOffset(3, "by hand", 0)})
        groups.commit("gone", {T: 1})
        groups.delete("gone")
        with Consumer(store, "orders", group_id="done", timeout=0) as consumer:
            assert len(list(consumer)) == 10
        with (
            Producer(store, "copier") as producer,
            Consumer(store, "orders", group_id="exact", auto_commit=False) as consumer,
        ):
            for end, count in (("commit", 4), ("abort", 3)):
                consumer.poll(max_records=count)
                transaction = producer.transaction()
                transaction.commit_offsets(consumer)
                transaction.commit() if end == "commit" else transaction.abort()
        # These two are members when the store is closed, as after a crash.
        live = [
            Consumer(store, "orders", group_id="live", auto_commit=False, client_id="ours",
                     instance_id=instance)
            for instance in ("one", None)
        ]  # fmt: skip
        for consumer in live * 2:
            consumer.poll(timeout=0)
        live[0].commit({T: 7})
        members = [consumer.member_id for consumer in live]
    dump = dump_log([broker.partition_dir(CONSUMER_OFFSETS)], decode_offsets=True)
    with broker:
        yield Left(broker, records_of(dump), members)


def retry(act: Callable[[], Any]) -> Any:
    """A coordinator that has just come up answers only after a while."""
    import confluent_kafka

    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            return act()
        except confluent_kafka.KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def newest(left: Left, kind: str, **data: object) -> Any:
    """The last payload of a key of that type."""
    found = [
        payload
        for key, payload in left.dump
        if str(key["type"]) == kind and all(key["data"].get(k) == v for k, v in data.items())
    ]
    assert found, (kind, data, left.dump)
    return found[-1]


def test_the_dumper_decodes_offsets(left: Left) -> None:
    for group, offset, metadata in (("simple", 3, "by hand"), ("done", 10, ""), ("live", 7, "")):
        value = newest(left, "1", group=group, topic="orders", partition=0)
        assert str(value["version"]) == "3"
        assert (value["data"]["offset"], value["data"]["metadata"]) == (offset, metadata)
    assert newest(left, "1", group="gone") is None


def test_the_dumper_decodes_groups(left: Left) -> None:
    value = newest(left, "2", group="live")
    assert str(value["version"]) == "3"
    data = value["data"]
    assert data["protocolType"] == "consumer" and data["protocol"] == "cooperative-sticky"
    assert sorted(member["memberId"] for member in data["members"]) == sorted(left.members)
    assert {member["groupInstanceId"] for member in data["members"]} == {"one", None}
    assert {member["clientId"] for member in data["members"]} == {"ours"}
    empty = newest(left, "2", group="done")["data"]
    assert empty["members"] == [] and empty["generation"] == 2


def admin(left: Left) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": left.broker.bootstrap})


def test_a_broker_has_the_committed_offsets(left: Left) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka import TopicPartition as Theirs

    client = admin(left)
    for group, offset, metadata in (
        ("simple", 3, "by hand"),
        ("done", 10, None),
        ("exact", 4, None),
        ("live", 7, None),
        ("theirs", 0, "by librdkafka"),
    ):
        asked = ConsumerGroupTopicPartitions(group, [Theirs("orders", 0)])

        def look(asked: Any = asked, group: str = group) -> Any:
            return client.list_consumer_group_offsets([asked])[group].result(TIMEOUT)

        (found,) = retry(look).topic_partitions
        said = (found.metadata or "").rstrip("\0") or None
        assert (found.offset, said) == (offset, metadata), group


def test_a_broker_describes_the_groups(left: Left) -> None:
    from confluent_kafka import ConsumerGroupState

    client = admin(left)

    def describe(group: str) -> Any:
        return retry(lambda: client.describe_consumer_groups([group])[group].result(TIMEOUT))

    live = describe("live")
    assert live.state == ConsumerGroupState.STABLE
    assert live.partition_assignor == "cooperative-sticky"
    assert sorted(member.member_id for member in live.members) == sorted(left.members)
    held = [
        (tp.topic, tp.partition)
        for member in live.members
        for tp in member.assignment.topic_partitions
    ]
    assert held == [("orders", 0)]
    for group in ("done", "simple", "exact"):
        assert describe(group).state == ConsumerGroupState.EMPTY
    listed = retry(lambda: client.list_consumer_groups().result(TIMEOUT))
    names = {group.group_id for group in listed.valid}
    assert {"simple", "done", "exact", "live", "theirs"} <= names and "gone" not in names


def test_a_client_of_the_broker_goes_on_where_ours_was(left: Left) -> None:
    import confluent_kafka

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": left.broker.bootstrap,
            "group.id": "exact",
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    try:
        consumer.subscribe(["orders"])
        values: list[bytes] = []
        deadline = time.monotonic() + TIMEOUT
        while len(values) < 6 and time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                values.append(message.value())
    finally:
        consumer.close()
    assert values == [b"%d" % number for number in range(4, 10)]


def test_logstore_reads_what_the_broker_made_of_it(left: Left, tmp_path: Path) -> None:
    left.broker.stop()
    with logstore.open(left.broker.log_dir, readonly=True) as store:
        groups = Groups(store)
        assert groups.committed("exact")[T].offset == 10
        assert groups.committed("simple")[T].offset == 3
        assert groups.describe("exact").state == "Empty"
