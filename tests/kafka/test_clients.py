"""Real clients on the listener: confluent-kafka, kafka-python, aiokafka, and logstore's own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import logstore
from logstore import Store
from logstore.kafka.server import KafkaServer

confluent_kafka = pytest.importorskip("confluent_kafka")
kafka = pytest.importorskip("kafka")
aiokafka = pytest.importorskip("aiokafka")

from tests.kafka.clients import (  # noqa: E402
    CLIENTS,
    START_MS,
    WIRE,
    Client,
    Member,
    Sent,
    client,
    has_codec,
    read,
    wait_until,
)  # fmt: skip

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
REFUSED = (
    confluent_kafka.KafkaException, kafka.errors.KafkaError, aiokafka.errors.KafkaError,
    logstore.LogStoreError,
)  # fmt: skip

wire = pytest.mark.parametrize("name", WIRE)


@pytest.fixture
def made(name: str, server: KafkaServer) -> Iterator[Client]:
    with client(name, server) as each:
        yield each


def rows(count: int = 20) -> list[Sent]:
    """Records with every kind of key, value and header."""
    plain = [
        Sent(b"value %d" % n * 20, b"key %d" % (n % 3), timestamp=START_MS + n)
        for n in range(count)
    ]
    odd = [
        Sent(None, b"tombstone"),
        Sent(b"", b""),
        Sent(b"no key"),
        Sent(b"headers", headers=(("a", b"1"), ("a", b"2"), ("empty", b""))),
        Sent(bytes(range(256)), "ключ".encode(), (("имя", "знач".encode()),), START_MS - 5),
    ]
    return plain + odd


def values(got: list[Any]) -> list[bytes | None]:
    return [each.value for each in got]


def produced(by: Client, topic: str, sent: list[Sent], **options: Any) -> None:
    with contextlib.closing(by.producer(**options)) as producer:
        for each in sent:
            producer.send(topic, each)
        producer.flush()


# ---- records ----


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CLIENTS)
def test_records_of_one_client_are_the_records_of_every_other(
    server: KafkaServer, store: Store, made: Client, name: str, codec: str
) -> None:
    if not has_codec(name, codec):
        pytest.skip(f"{name} has no {codec} here")
    store.create_topic("t")
    sent = rows()
    if name == "confluent-kafka":  # the others refuse these
        sent += [Sent(None, None), Sent(b"x", headers=(("null", None),))]
    produced(made, "t", sent, compression=codec)
    assert store["t"][0].end_offset == len(sent)
    for other in CLIENTS:
        if not has_codec(other, codec):
            continue
        with client(other, server) as reader, contextlib.closing(reader.consumer()) as consumer:
            consumer.assign(("t", 0), "start")
            got = read(consumer, len(sent))
        assert [each.sent for each in got] == sent, other
        assert [each.offset for each in got] == list(range(len(sent)))


@wire
@pytest.mark.parametrize("acks", [0, 1, -1])
def test_acks(store: Store, made: Client, acks: int) -> None:
    store.create_topic("t")
    produced(made, "t", rows(), acks=acks)
    wait_until(lambda: store["t"][0].end_offset == len(rows()), "not in the log")


@wire
def test_an_idempotent_producer(store: Store, made: Client) -> None:
    store.create_topic("t", partitions=3)
    with contextlib.closing(made.producer(idempotence=True)) as producer:
        for number in range(300):
            producer.send("t", Sent(b"%d" % number), number % 3)
        producer.flush()
    for partition in store["t"]:
        assert [record.value for record in partition] == [
            b"%d" % number for number in range(partition.number, 300, 3)
        ]
        assert partition.parts.reader.producers(), "its batches are numbered"


@wire
def test_a_topic_is_made_by_its_first_record(store: Store, made: Client) -> None:
    produced(made, "new", [Sent(b"a")])
    assert [record.value for record in store["new"][0]] == [b"a"]


@wire
def test_large_records(store: Store, made: Client) -> None:
    store.create_topic("t")
    large = Sent(b"x" * 1_000_000)
    produced(made, "t", [large])
    with contextlib.closing(made.consumer()) as consumer:
        consumer.assign(("t", 0), "start")
        assert [each.sent for each in read(consumer, 1)] == [large]
    store.create_topic("small", config={"max.message.bytes": 10_000})
    with contextlib.closing(made.producer(request_max_bytes=1 << 21)) as producer:
        producer.send("small", Sent(b"x" * 20_000))
        with pytest.raises(REFUSED, match=r"(?i)size|large"):
            producer.flush()
        producer.send("small", Sent(b"fine"))
        producer.flush()
    assert [record.value for record in store["small"][0]] == [b"fine"]


@wire
def test_where_a_consumer_starts(store: Store, made: Client) -> None:
    store.create_topic("t")
    produced(made, "t", [Sent(b"%d" % n, timestamp=START_MS + 1000 * n) for n in range(10)])
    store["t"][0].trim(2)
    with contextlib.closing(made.consumer()) as consumer:
        consumer.assign(("t", 0), "start")
        assert values(read(consumer, 8)) == [b"%d" % n for n in range(2, 10)]
        consumer.assign(("t", 0), 7)
        assert values(read(consumer, 3)) == [b"7", b"8", b"9"]
        assert consumer.offset_at(("t", 0), START_MS + 4500) == 5
        assert consumer.offset_at(("t", 0), START_MS + 90_000) is None
        consumer.assign(("t", 0), "end")
        assert consumer.poll(0.5) == []
        store["t"][0].append(b"later")
        assert values(read(consumer, 1)) == [b"later"]


@wire
@pytest.mark.parametrize(("start", "expected"), [("earliest", [b"2", b"3"]), ("latest", [])])
def test_an_offset_out_of_range_is_reset(
    store: Store, made: Client, start: str, expected: list[bytes]
) -> None:
    store.create_topic("t")
    store["t"][0].extend([b"0", b"1", b"2", b"3"])
    store["t"][0].trim(2)
    with contextlib.closing(made.consumer(start=start)) as consumer:
        consumer.assign(("t", 0), 0)
        assert values(read(consumer, len(expected))) == expected


# ---- groups ----


KINDS = [(name, assignor) for name, kind in CLIENTS.items() for assignor in kind.assignors]


def balanced(members: list[Member], partitions: int, topic: str = "t") -> bool:
    """Whether the members own every partition once, and none has two more than another."""
    owned = [place for member in members for place in list(member.places)]
    counts = [len(member.places) for member in members]
    return (
        len(owned) == partitions
        and set(owned) == {(topic, number) for number in range(partitions)}
        and max(counts) - min(counts) <= 1
    )


@pytest.mark.parametrize(("name", "assignor"), KINDS)
def test_members_come_and_go(store: Store, made: Client, assignor: str) -> None:
    topic = store.create_topic("t", partitions=4)

    def member() -> Member:
        return Member(lambda: made.consumer("t", group="g", assignor=assignor))

    with member() as first:
        wait_until(lambda: balanced([first], 4), "one member has everything")
        with member() as second:
            wait_until(lambda: balanced([first, second], 4), "two members share")
            for partition in topic:
                partition.extend([b"%d" % n for n in range(10)])
            wait_until(
                lambda: (
                    {(each.partition, each.offset) for each in first.got + second.got}
                    == set(itertools.product(range(4), range(10)))
                ),
                "every record is read",
            )
        wait_until(lambda: balanced([first], 4), "the other has left")
        for partition in topic:
            partition.append(b"more")
        wait_until(
            lambda: (
                {each.partition for each in first.got if each.value == b"more"} == set(range(4))
            ),
            "the last member reads all",
        )
    assert logstore.Groups(store).describe("g").members == ()
    with contextlib.closing(made.consumer("t", group="g", assignor=assignor)) as again:
        wait_until(lambda: bool(again.poll(0.05)) or len(again.assignment()) == 4, "not assigned")
        for number in range(4):
            assert again.committed(("t", number)) == 11


@wire
def test_eight_members(store: Store, made: Client) -> None:
    topic = store.create_topic("t", partitions=16)
    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(
                Member(lambda: made.consumer("t", group="g", assignor="roundrobin"))
            )
            for _ in range(8)
        ]
        wait_until(lambda: balanced(members, 16), "eight members share")
        for partition in topic:
            partition.append(b"x")
        wait_until(
            lambda: {each.partition for member in members for each in member.got} == set(range(16)),
            "every record is read",
        )


@wire
def test_a_static_member_keeps_its_partitions(store: Store, made: Client) -> None:
    store.create_topic("t", partitions=4)

    def static(number: int) -> Member:
        return Member(lambda: made.consumer("t", group="g", instance=f"i{number}"))

    with static(1) as stays, static(2) as leaves:
        wait_until(lambda: balanced([stays, leaves], 4), "two members share")
        before, generation = set(leaves.places), logstore.Groups(store).describe("g").generation
        leaves.leave()
        assert len(logstore.Groups(store).describe("g").members) == 2, "it has not left"
        with static(2) as back:
            wait_until(lambda: back.places == before, "it has its partitions again")
            assert logstore.Groups(store).describe("g").generation == generation, (
                "without a rebalance"
            )
            assert len(logstore.Groups(store).describe("g").members) == 2


@pytest.mark.parametrize("first", ["client", "ours"])
@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
@wire
def test_a_client_and_our_consumer_are_members_of_one_group(
    server: KafkaServer, store: Store, made: Client, assignor: str, first: str
) -> None:
    if assignor not in made.assignors:
        assignor = "sticky"
    topic = store.create_topic("t", partitions=4)
    with client("in process", server) as ours, contextlib.ExitStack() as stack:
        members: list[Member] = []
        for each in (made, ours) if first == "client" else (ours, made):
            member = Member(lambda each=each: each.consumer("t", group="g", assignor=assignor))
            members.append(stack.enter_context(member))
            wait_until(lambda: balanced(members, 4), f"{len(members)} members share")
        for partition in topic:
            partition.append(b"x")
        wait_until(
            lambda: {each.partition for member in members for each in member.got} == set(range(4)),
            "every record is read",
        )


def test_members_of_every_client(server: KafkaServer, store: Store) -> None:
    topic = store.create_topic("t", partitions=8)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(name, server)) for name in CLIENTS]
        members = [
            stack.enter_context(Member(lambda each=each: each.consumer("t", group="g")))
            for each in clients
        ]
        wait_until(lambda: balanced(members, 8), "all members share")
        for partition in topic:
            partition.extend([b"x", b"y"])
        wait_until(
            lambda: (
                {(each.partition, each.offset) for member in members for each in member.got}
                == set(itertools.product(range(8), range(2)))
            ),
            "every record is read",
        )


@wire
def test_commits_are_seen_on_both_sides(store: Store, made: Client) -> None:
    store.create_topic("t")
    store["t"][0].extend([b"0", b"1", b"2"])
    with contextlib.closing(made.consumer("t", group="g")) as consumer:
        assert values(read(consumer, 3)) == [b"0", b"1", b"2"]
        assert consumer.committed(("t", 0)) is None
        consumer.commit()
        assert consumer.committed(("t", 0)) == 3
    with logstore.Consumer(store, "t", group_id="g", timeout=5, auto_commit=False) as ours:
        store["t"][0].append(b"3")
        record = next(iter(ours))
        assert record.value == b"3"
        ours.commit({("t", 0): 2})
    with contextlib.closing(made.consumer("t", group="g")) as consumer:
        assert values(read(consumer, 2)) == [b"2", b"3"]


# ---- transactions ----


@pytest.mark.parametrize("name", CLIENTS)
def test_transactions(server: KafkaServer, store: Store, made: Client) -> None:
    store.create_topic("t", partitions=2)
    with contextlib.closing(made.producer(transactional_id="id")) as producer:
        for number, ending in enumerate(("commit", "abort", "commit", "abort", "abort", "commit")):
            producer.begin()
            for partition in range(2):
                producer.send("t", Sent(b"%s %d" % (ending.encode(), number)), partition)
            producer.flush()
            getattr(producer, ending)()
    expected = [b"commit 0", b"commit 2", b"commit 5"]
    for other in CLIENTS:
        with (
            client(other, server) as reader,
            contextlib.closing(reader.consumer(isolation="read_committed")) as consumer,
        ):
            for partition in range(2):
                consumer.assign(("t", partition), "start")
                assert values(read(consumer, 3)) == expected, other
        with client(other, server) as reader, contextlib.closing(reader.consumer()) as consumer:
            consumer.assign(("t", 0), "start")
            assert len(read(consumer, 6)) == 6, other


@pytest.mark.parametrize("name", CLIENTS)
def test_an_open_transaction_is_not_read(server: KafkaServer, store: Store, made: Client) -> None:
    store.create_topic("t")
    with contextlib.closing(made.producer(transactional_id="id")) as producer:
        producer.begin()
        producer.send("t", Sent(b"open"))
        producer.flush()
        wait_until(lambda: store["t"][0].end_offset == 1, "not in the log")
        with contextlib.ExitStack() as stack:
            consumers = []
            for other in CLIENTS:
                reader = stack.enter_context(client(other, server))
                consumer = reader.consumer(isolation="read_committed")
                consumers.append(stack.enter_context(contextlib.closing(consumer)))
                consumer.assign(("t", 0), "start")
                assert consumer.poll(0.3) == [], other
            producer.commit()
            for consumer in consumers:
                assert values(read(consumer, 1)) == [b"open"]


@pytest.mark.parametrize("name", CLIENTS)
def test_consume_transform_produce(store: Store, made: Client) -> None:
    store.create_topic("in")
    store.create_topic("out")
    store["in"][0].extend([b"%d" % n for n in range(4)])
    with (
        contextlib.closing(made.producer(transactional_id="id")) as producer,
        contextlib.closing(made.consumer("in", group="g")) as consumer,
    ):
        got = read(consumer, 4)
        for ending in ("abort", "commit"):
            producer.begin()
            for each in got:
                producer.send("out", Sent(b"%s %s" % (ending.encode(), each.value)))
            producer.flush()
            producer.send_offsets({("in", 0): 4}, consumer)
            getattr(producer, ending)()
            expected = None if ending == "abort" else 4
            assert consumer.committed(("in", 0)) == expected
    with contextlib.closing(made.consumer(isolation="read_committed")) as consumer:
        consumer.assign(("out", 0), "start")
        assert values(read(consumer, 4)) == [b"commit %d" % n for n in range(4)]


@pytest.mark.parametrize("second", CLIENTS)
@pytest.mark.parametrize("name", CLIENTS)
def test_the_second_producer_of_an_id_fences_the_first(
    server: KafkaServer, store: Store, made: Client, second: str
) -> None:
    store.create_topic("t")
    zombie = made.producer(transactional_id="id")
    zombie.begin()
    zombie.send("t", Sent(b"zombie"))
    zombie.flush()
    with (
        client(second, server) as other,
        contextlib.closing(other.producer(transactional_id="id")) as producer,
    ):
        producer.begin()
        producer.send("t", Sent(b"new"))
        producer.flush()
        producer.commit()
        with pytest.raises(REFUSED):
            zombie.send("t", Sent(b"late"))
            zombie.flush()
            zombie.commit()
        producer.begin()
        producer.send("t", Sent(b"newer"))
        producer.flush()
        producer.commit()
    with contextlib.suppress(*REFUSED):
        zombie.close()
    reader = logstore.Consumer(store, "t", isolation="read_committed", timeout=0)
    with reader:
        assert [record.value for record in reader] == [b"new", b"newer"]


# ---- administration ----


def test_administration_by_confluent(server: KafkaServer, store: Store) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition, admin

    def result(futures: dict[Any, Any]) -> Any:
        [future] = futures.values()
        return future.result(20)

    client = admin.AdminClient({"bootstrap.servers": server.bootstrap_servers})
    result(client.create_topics([admin.NewTopic("t", 2, 1, config={"retention.ms": "1000"})]))
    with pytest.raises(confluent_kafka.KafkaException, match="exists"):
        result(client.create_topics([admin.NewTopic("t", 2, 1)]))
    result(client.create_partitions([admin.NewPartitions("t", 3)]))
    assert len(store["t"]) == 3
    listed = client.list_topics(timeout=10).topics
    assert sorted(listed["t"].partitions) == [0, 1, 2]
    resource = admin.ConfigResource(admin.ResourceType.TOPIC, "t")
    assert result(client.describe_configs([resource]))["retention.ms"].value == "1000"
    entry = admin.ConfigEntry(
        "retention.ms", "2000", incremental_operation=admin.AlterConfigOpType.SET
    )
    changed = admin.ConfigResource(admin.ResourceType.TOPIC, "t", incremental_configs=[entry])
    result(client.incremental_alter_configs([changed]))
    assert store["t"].config.retention_ms == 2000
    store["t"][0].extend([b"x"] * 5)
    deleted = result(client.delete_records([TopicPartition("t", 0, 3)]))
    assert deleted.low_watermark == store["t"][0].start_offset == 3
    spec = {TopicPartition("t", 0): admin.OffsetSpec.latest()}
    assert result(client.list_offsets(spec)).offset == 5
    assert client.describe_cluster().result(10).controller.id == store.identity.node_id
    logstore.Groups(store).commit("g", {("t", 0): 4})
    assert "g" in [group.group_id for group in client.list_consumer_groups().result(10).valid]
    wanted = ConsumerGroupTopicPartitions("g", [TopicPartition("t", 0, 5)])
    result(client.alter_consumer_group_offsets([wanted]))
    got = result(client.list_consumer_group_offsets([ConsumerGroupTopicPartitions("g")]))
    assert [each.offset for each in got.topic_partitions] == [5]
    assert result(client.describe_consumer_groups(["g"])).members == []
    result(client.delete_consumer_groups(["g"]))
    assert "g" not in logstore.Groups(store)
    result(client.delete_topics(["t"]))
    assert "t" not in store


def test_administration_by_kafka_python(server: KafkaServer, store: Store) -> None:
    client = kafka.KafkaAdminClient(bootstrap_servers=server.bootstrap_servers)
    with contextlib.closing(client):
        client.create_topics({"t": {"num_partitions": 2, "configs": {"retention.ms": "1000"}}})
        assert store["t"].config.retention_ms == 1000
        client.create_partitions({"t": 3})
        assert client.list_topics() == ["t"]
        [described] = client.describe_topics(["t"])
        assert len(described["partitions"]) == 3
        store["t"][0].extend([b"x"] * 5)
        client.delete_records({kafka.TopicPartition("t", 0): 3})
        assert store["t"][0].start_offset == 3
        logstore.Groups(store).commit("g", {("t", 0): 4})
        assert [group["group_id"] for group in client.list_groups()] == ["g"]
        client.delete_groups(["g"])
        assert "g" not in logstore.Groups(store)
        client.delete_topics(["t"])
        assert "t" not in store


def test_administration_by_aiokafka(server: KafkaServer, store: Store) -> None:
    import asyncio

    from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
    from aiokafka.admin.records_to_delete import RecordsToDelete

    async def administer() -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=server.bootstrap_servers)
        await client.start()
        try:
            await client.create_topics([NewTopic("t", 2, 1)])
            await client.create_partitions({"t": NewPartitions(3)})
            assert await client.list_topics() == ["t"]
            assert len(store["t"]) == 3
            settings = {"retention.ms": "1000"}
            await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, "t", settings)])
            assert store["t"].config.retention_ms == 1000
            store["t"][0].extend([b"x"] * 5)
            place = aiokafka.TopicPartition("t", 0)
            await client.delete_records({place: RecordsToDelete(before_offset=3)})
            assert store["t"][0].start_offset == 3
            logstore.Groups(store).commit("g", {("t", 0): 4})
            assert [group[0] for group in await client.list_consumer_groups()] == ["g"]
            offsets = await client.list_consumer_group_offsets("g")
            assert offsets[place].offset == 4
            await client.delete_topics(["t"])
            assert "t" not in store
        finally:
            await client.close()

    asyncio.run(administer())


@wire
def test_all_partitions_of_an_internal_topic_are_read(store: Store, made: Client) -> None:
    store.create_topic("t")
    logstore.Groups(store).commit("g", {("t", 0): 4})
    with contextlib.closing(made.consumer()) as consumer:
        for number in (0, 49):
            consumer.assign(("__consumer_offsets", number), "start")
            assert consumer.poll(0.5) == []
