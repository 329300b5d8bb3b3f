"""Kafka's own tools, its Java clients and kcat, on a listener of a store."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Store
from logstore.coordinators.transaction_state import TransactionState as S
from logstore.kafka.apis import APIS
from logstore.kafka.server import KafkaServer
from tests.kafka.test_transactions import states

from .kafka import VERSION
from .tools import (
    CONFIGS,
    CONSOLE_CONSUMER,
    GROUPS,
    JVM,
    PACKAGE,
    TIMEOUT,
    TOPICS,
    Tools,
    compiled,
)

pytestmark = pytest.mark.interop


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os") as opened:
        yield opened


@pytest.fixture
def server(store: Store) -> Iterator[KafkaServer]:
    with KafkaServer(store, config={"group.consumer.heartbeat.interval.ms": 200}) as started:
        yield started


# ---- the tools ----


def test_topics_and_configs(tools: Tools, server: KafkaServer, store: Store) -> None:
    settings = ("--partitions", "3", "--config", "retention.ms=1000")
    tools.run(server, TOPICS, "--create", "--topic", "t", *settings)
    assert len(store["t"]) == 3 and store["t"].config.retention_ms == 1000
    assert tools.run(server, TOPICS, "--list").split() == ["t"]
    described = tools.run(server, TOPICS, "--describe", "--topic", "t")
    assert "PartitionCount: 3" in described and "retention.ms=1000" in described
    tools.run(server, TOPICS, "--alter", "--topic", "t", "--partitions", "5")
    assert len(store["t"]) == 5
    status, output = tools.ask(server, TOPICS, "--create", "--topic", "t")
    assert status == 1 and "already exists" in output
    entity = ("--entity-type", "topics", "--entity-name", "t")
    tools.run(
        server,
        CONFIGS,
        "--alter",
        *entity,
        "--add-config",
        "segment.bytes=2000000",
    )
    assert store["t"].config.segment_bytes == 2_000_000
    assert "segment.bytes=2000000" in tools.run(server, CONFIGS, "--describe", *entity)
    tools.run(server, CONFIGS, "--alter", *entity, "--delete-config", "segment.bytes")
    assert store["t"].config.segment_bytes == 1 << 30
    broker = ("--entity-type", "brokers", "--entity-name", str(store.identity.node_id), "--all")
    assert "num.io.threads" in tools.run(server, CONFIGS, "--describe", *broker)
    tools.run(server, TOPICS, "--delete", "--topic", "t")
    assert "t" not in store


def test_console_producer_and_consumer(tools: Tools, server: KafkaServer, store: Store) -> None:
    printed = tools.run(
        server, PACKAGE + "ConsoleProducer", "--topic", "t", "--reader-property", "parse.key=true",
        "--reader-property", "parse.headers=true", stdin="h:1\tkey\tvalue\nh:2\tkey 2\tvalue 2\n",
    )  # fmt: skip
    assert [(r.key, r.value, r.headers) for r in store["t"][0]] == [
        (b"key", b"value", (("h", b"1"),)), (b"key 2", b"value 2", (("h", b"2"),)),
    ], printed  # fmt: skip
    printed = tools.run(
        server, CONSOLE_CONSUMER, "--topic", "t", "--from-beginning", "--max-messages", "2",
        "--group", "console", "--formatter-property", "print.key=true",
    )  # fmt: skip
    assert "key\tvalue\nkey 2\tvalue 2\n" in printed


def test_groups_and_offsets(tools: Tools, server: KafkaServer, store: Store) -> None:
    store.create_topic("t", partitions=2)
    store["t"][0].extend([b"x"] * 10)
    groups = logstore.Groups(store)
    groups.commit("g", {("t", 0): 4})
    assert "g" in tools.run(server, GROUPS, "--list").split()
    [row] = [
        line.split()
        for line in tools.run(server, GROUPS, "--describe", "--group", "g").splitlines()
        if line.startswith("g ")
    ]
    assert row[1:6] == ["t", "0", "4", "10", "6"]
    assert "Empty" in tools.run(server, GROUPS, "--describe", "--group", "g", "--state")
    reset = ("--reset-offsets", "--group", "g", "--topic", "t", "--execute")
    for how, expected in (
        (("--to-earliest",), 0), (("--to-latest",), 10), (("--shift-by", "-3"), 7),
        (("--to-offset", "5"), 5), (("--to-datetime", "2020-01-01T00:00:00.000"), 0),
    ):  # fmt: skip
        tools.run(server, GROUPS, *reset, *how)
        assert groups.committed("g")[logstore.TopicPartition("t", 0)].offset == expected
    tools.run(server, GROUPS, "--delete-offsets", "--group", "g", "--topic", "t")
    assert groups.committed("g") == {}
    groups.commit("g", {("t", 0): 4})
    tools.run(server, GROUPS, "--delete", "--group", "g")
    assert "g" not in groups
    assert "GroupIdNotFound" in tools.ask(server, GROUPS, "--describe", "--group", "nope")[1]


def test_a_group_with_members_is_described(tools: Tools, server: KafkaServer, store: Store) -> None:
    store.create_topic("t", partitions=2)
    consumer = logstore.Consumer(store, "t", group_id="g", client_id="ours", assignor="range")
    with consumer:
        while len(consumer.assignment()) < 2:
            consumer.poll(timeout=0.1)
        members = tools.run(server, GROUPS, "--describe", "--group", "g", "--members", "--verbose")
        assert "ours" in members and "t:0,1" in members
        assert "Stable" in tools.run(server, GROUPS, "--describe", "--group", "g", "--state")
        status, output = tools.ask(server, GROUPS, "--delete", "--group", "g")
        assert "not empty" in output.lower() or "NonEmpty" in output, (status, output)


def test_a_group_of_the_consumer_protocol_is_described(
    tools: Tools, server: KafkaServer, store: Store
) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    store.create_topic("t", partitions=2)
    store["t"][0].extend([b"x"] * 10)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": server.bootstrap_servers, "group.id": "g", "client.id": "new",
         "group.protocol": "consumer", "auto.offset.reset": "earliest"}
    )  # fmt: skip
    consumer.subscribe(["t"])
    deadline = time.monotonic() + TIMEOUT
    while len(consumer.assignment()) < 2:
        consumer.poll(0.1)
        assert time.monotonic() < deadline
    consumer.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 4)], asynchronous=False)
    describe = ("--describe", "--group", "g")
    [row] = [
        line.split()
        for line in tools.run(server, GROUPS, *describe).splitlines()
        if line.split()[:3] == ["g", "t", "0"]
    ]
    assert row[3:6] == ["4", "10", "6"]
    members = tools.run(server, GROUPS, *describe, "--members", "--verbose")
    assert "new" in members and "t:0,1" in members
    state = tools.run(server, GROUPS, *describe, "--state", "--verbose")
    assert "Stable" in state and "uniform" in state
    assert "Consumer" in tools.run(server, GROUPS, "--list", "--type")
    assert "g" in tools.run(server, GROUPS, "--list", "--type", "consumer").split()
    assert "not empty" in tools.ask(server, GROUPS, "--delete", "--group", "g")[1]
    consumer.close()
    tools.run(server, GROUPS, "--delete", "--group", "g")
    assert "g" not in logstore.Groups(store)


def test_tools_of_the_log(tools: Tools, server: KafkaServer, store: Store, tmp_path: Path) -> None:
    store.create_topic("t")
    store["t"][0].extend([logstore.Record(b"x", timestamp=1000 * n) for n in range(10)])
    offsets = PACKAGE + "GetOffsetShell"
    for when, expected in (("-1", 10), ("-2", 0), ("-3", 9), ("4500", 5)):
        printed = tools.run(server, offsets, "--topic", "t", "--time", when)
        assert printed.strip() == f"t:0:{expected}"
    asked = tmp_path / "delete.json"
    partitions = [{"topic": "t", "partition": 0, "offset": 3}]
    asked.write_text(json.dumps({"version": 1, "partitions": partitions}))
    printed = tools.run(server, PACKAGE + "DeleteRecordsCommand", "--offset-json-file", str(asked))
    assert "low_watermark: 3" in printed and store["t"][0].start_offset == 3
    printed = tools.run(server, PACKAGE + "LogDirsCommand", "--describe", "--topic-list", "t")
    [report] = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    [directory] = report["brokers"][0]["logDirs"]
    assert [each["partition"] for each in directory["partitions"]] == ["t-0"]
    versions = tools.run(server, PACKAGE + "BrokerApiVersionsCommand")
    assert "UNSUPPORTED" in versions
    assert f"Produce(0): 0 to {APIS[0].last}" in versions
    features = tools.run(server, PACKAGE + "FeatureCommand", "describe")
    assert re.search(r"transaction\.version\s.*FinalizedVersionLevel: 2\s", features)


def test_kafka_transactions(tools: Tools, server: KafkaServer, store: Store) -> None:
    store.create_topic("t")
    command = PACKAGE + "TransactionsCommand"
    with logstore.Producer(store, "id") as producer:
        transaction = producer.transaction()
        transaction.append("t", b"open")
        assert "Ongoing" in tools.run(server, command, "list")
        described = tools.run(server, command, "describe", "--transactional-id", "id")
        assert "Ongoing" in described and "t-0" in described
        place = ("--topic", "t", "--partition", "0")
        producers = tools.run(server, command, "describe-producers", *place)
        assert str(producer.producer_id) in producers
        tools.run(
            server,
            command,
            "find-hanging",
            "--broker-id",
            str(store.identity.node_id),
        )
        transaction.commit()
        assert "CompleteCommit" in tools.run(server, command, "list")


def test_verifiable_and_perf_tools(tools: Tools, server: KafkaServer, store: Store) -> None:
    tools.run(
        server,
        PACKAGE + "VerifiableProducer",
        "--topic",
        "v",
        "--max-messages",
        "100",
    )
    deadline = time.monotonic() + 20
    while store["v"][0].end_offset < 100:  # the tool ends before its records are acknowledged
        assert time.monotonic() < deadline
        time.sleep(0.02)
    printed = tools.run(
        server, PACKAGE + "VerifiableConsumer", "--topic", "v", "--group-id", "v",
        "--max-messages", "100", "--reset-policy", "earliest",
    )  # fmt: skip
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert sum(row["count"] for row in rows if row["name"] == "records_consumed") == 100
    tools.run(
        server, PACKAGE + "ProducerPerformance", "--topic", "p", "--num-records", "10000",
        "--record-size", "100", "--throughput", "-1",
    )  # fmt: skip
    assert store["p"][0].end_offset == 10_000
    printed = tools.run(
        server,
        PACKAGE + "ConsumerPerformance",
        "--topic",
        "p",
        "--num-records",
        "10000",
    )
    assert "10000" in printed


# ---- the Java clients ----


@pytest.mark.parametrize("version", ["3.9.1", "4.1.1", VERSION])
def test_java_clients(server: KafkaServer, store: Store, tmp_path: Path, version: str) -> None:
    class_path = compiled("Clients.java", version, tmp_path / "classes")
    store.create_topic("java", partitions=4)
    store.create_topic("in")
    store.create_topic("out")
    store.create_topic("late")
    store["in"][0].extend([b"%d" % number for number in range(10)])
    done = subprocess.run(
        ["java", *JVM, "-cp", class_path, "Clients", server.bootstrap_servers],
        capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # From 4.0 on, the client uses transaction version 2: each transaction has its own epoch, and
    # the producer can continue after a time-out.
    is_new = not version.startswith("3.")
    assert [line.replace("leaderEpoch=null, ", "") for line in done.stdout.splitlines()] == [
        "produced",
        "RangeAssignor 100 2 2",
        "CooperativeStickyAssignor 100 2 2",
        "uniform 100 2 2",  # of the consumer protocol (KIP-848), as the next one
        "range 100 2 2",
        "abort null",
        "commit OffsetAndMetadata{offset=10, metadata=''}",
        "abort OffsetAndMetadata{offset=10, metadata=''}",
        "commit OffsetAndMetadata{offset=10, metadata=''}",
        "fenced",
        "committed 20 10",
        "late",
        "then [after]" if is_new else "then fenced",
    ]
    used = {state.client_version for state in states(store) if state.state is not S.EMPTY}
    assert used == {2 if is_new else 0}
    late = [state.producer_epoch for state in states(store, "late")]
    assert len(set(late)) == (3 if is_new else 2), late
    records: list[Any] = [record for partition in store["java"] for record in partition]
    assert {record.value.decode() for record in records} == {
        f"{codec} {number}"
        for codec in ("none", "gzip", "snappy", "lz4", "zstd")
        for number in range(20)
    }
    assert all(record.headers == (("h", b"v"), ("null", None)) for record in records)
    assert {record.key for record in records if int(record.value.split()[1]) % 2 == 0} == {None}


# ---- kcat ----


def kcat(server: KafkaServer, *arguments: str, stdin: str = "") -> str:
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not installed")
    done = subprocess.run(
        ["kcat", "-b", server.bootstrap_servers, "-q", *arguments],
        input=stdin, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_kcat_produces_and_consumes(server: KafkaServer, store: Store, codec: str) -> None:
    store.create_topic("t")
    text = "".join(f"k{number}:{'value ' * 20}{number}\n" for number in range(50))
    kcat(server, "-P", "-t", "t", "-p", "0", "-K:", "-z", codec, "-H", "h=1", stdin=text)
    assert [record.key for record in store["t"][0]] == [b"k%d" % n for n in range(50)]
    [header] = {record.headers for record in store["t"][0]}
    assert header == (("h", b"1"),)
    batch = next(iter(store["t"][0].read_batches(0)))
    assert (batch[22] & 7 != 0) == (codec != "none"), "the batch is compressed"
    assert kcat(server, "-C", "-t", "t", "-o", "beginning", "-e", "-K:") == text
    assert kcat(server, "-C", "-t", "t", "-o", "-1", "-e", "-f", "%k %o") == "k49 49"


def test_kcat_shows_metadata_and_joins_a_group(server: KafkaServer, store: Store) -> None:
    store.create_topic("t", partitions=2)
    store["t"][0].extend([b"a", b"b"])
    shown = json.loads(kcat(server, "-L", "-J"))
    [topic] = [each for each in shown["topics"] if each["topic"] == "t"]
    assert len(topic["partitions"]) == 2
    assert shown["brokers"][0]["id"] == store.identity.node_id
    reset = ("-X", "auto.offset.reset=earliest")
    assert kcat(server, *reset, "-G", "g", "-c", "2", "t").split() == ["a", "b"]
