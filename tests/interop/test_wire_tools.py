"""The same commands of Kafka's tools on a real broker and on the listener, and their outputs.

The outputs are equal except for addresses, ids, times and the text of an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest

from logstore import Store
from logstore.kafka.server import KafkaServer

from .kafka import Broker, require_kafka
from .tools import (
    CLUSTER,
    CONFIGS,
    CONSOLE_CONSUMER,
    GROUPS,
    PACKAGE,
    TOPICS,
    TRANSACTIONS,
    Tools,
)

pytestmark = [pytest.mark.interop, pytest.mark.campaign, pytest.mark.slow]

Command = tuple[str, ...]
OFFSETS = PACKAGE + "GetOffsetShell"
DELETE_RECORDS = PACKAGE + "DeleteRecordsCommand"
REASSIGN = PACKAGE + "reassign.ReassignPartitionsCommand"
ELECT = PACKAGE + "LeaderElectionCommand"
PRODUCER = PACKAGE + "ConsoleProducer"
RESET = PACKAGE + "StreamsResetter"


def topics(_: Path) -> Iterator[Command]:
    settings = ("--partitions", "3", "--config", "retention.ms=100000000")
    yield TOPICS, "--create", "--topic", "t", *settings
    yield TOPICS, "--create", "--topic", "t"
    yield TOPICS, "--create", "--topic", "t", "--if-not-exists"
    yield TOPICS, "--create", "--topic", "bad name"
    yield TOPICS, "--create", "--topic", "x", "--replication-factor", "3"
    yield TOPICS, "--create", "--topic", "x", "--config", "no.such=1"
    yield TOPICS, "--list"
    yield TOPICS, "--describe", "--topic", "t"
    yield TOPICS, "--describe", "--topic", "t", "--under-replicated-partitions"
    yield TOPICS, "--describe", "--topic", "t", "--unavailable-partitions"
    yield TOPICS, "--describe", "--topic", "t", "--topics-with-overrides"
    yield TOPICS, "--describe", "--topic", "never"
    yield TOPICS, "--alter", "--topic", "t", "--partitions", "4"
    yield TOPICS, "--alter", "--topic", "t", "--partitions", "2"
    yield TOPICS, "--delete", "--topic", "never"
    entity = ("--entity-type", "topics", "--entity-name", "t")
    many = "segment.bytes=2000000,cleanup.policy=[compact,delete]"
    yield CONFIGS, "--alter", *entity, "--add-config", many
    yield CONFIGS, "--describe", *entity
    yield CONFIGS, "--alter", *entity, "--delete-config", "segment.bytes,cleanup.policy"
    yield CONFIGS, "--alter", *entity, "--add-config", "segment.bytes=no"
    yield CONFIGS, "--alter", *entity, "--add-config", "no.such=1"
    yield CONFIGS, "--describe", *entity


def records(folder: Path) -> Iterator[Command]:
    yield TOPICS, "--create", "--topic", "r", "--partitions", "2"
    parsed = ("parse.key=true", "parse.headers=true", "null.marker=NULL")
    properties = [word for each in parsed for word in ("--reader-property", each)]
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        rows = "".join(f"h:{n},i:2\tkey\t{codec} {n}\n" for n in range(3)) + "NULL\tkey\tNULL\n"
        yield PRODUCER, "--topic", "r", *properties, "--compression-codec", codec, f"<{rows}"
    shown = ("print.key=true", "print.headers=true", "print.offset=true", "print.partition=true")
    formatted = [word for each in shown for word in ("--formatter-property", each)]
    wanted = ("--from-beginning", "--max-messages", "20", "--group", "g")
    yield CONSOLE_CONSUMER, "--topic", "r", *wanted, *formatted
    alone = ("--partition", "0", "--offset", "earliest", "--timeout-ms", "1500")
    yield CONSOLE_CONSUMER, "--topic", "r", *alone
    yield CONSOLE_CONSUMER, "--topic", "r", *alone, "--isolation-level", "read_committed"
    for when in ("-1", "-2", "-4", "-5", "1000", "latest", "earliest"):
        yield OFFSETS, "--topic", "r", "--time", when
    yield OFFSETS, "--topic-partitions", "r:1-3"
    yield OFFSETS, "--topic-partitions", "never"
    yield from groups(folder)
    for offset in (1, 100_000, -1):
        path = folder / f"delete{offset}"
        partitions = [{"topic": "r", "partition": 0, "offset": offset}]
        path.write_text(json.dumps({"version": 1, "partitions": partitions}))
        yield DELETE_RECORDS, "--offset-json-file", str(path)
    yield RESET, "--application-id", "app", "--input-topics", "r"
    yield RESET, "--application-id", "app", "--input-topics", "never"


def groups(folder: Path) -> Iterator[Command]:
    yield GROUPS, "--list"
    yield GROUPS, "--list", "--state"
    yield GROUPS, "--describe", "--group", "g"
    for shown in ("--state", "--members", "--offsets"):
        yield GROUPS, "--describe", "--group", "g", shown
    reset = ("--reset-offsets", "--group", "g", "--topic", "r")
    for how in (
        ("--to-earliest",), ("--to-latest",), ("--shift-by", "-1"), ("--shift-by", "-100"),
        ("--to-offset", "1"), ("--to-offset", "1000"), ("--by-duration", "P1D"),
        ("--to-datetime", "2020-01-01T00:00:00.000"), ("--to-current",),
    ):  # fmt: skip
        yield GROUPS, *reset, *how, "--dry-run"
        yield GROUPS, *reset, *how, "--execute"
    yield GROUPS, *reset, "--to-earliest", "--export", "--dry-run"
    (folder / "reset.csv").write_text("r,0,1\n")
    one = ("--reset-offsets", "--group", "g")
    yield GROUPS, *one, "--from-file", str(folder / "reset.csv"), "--execute"
    yield GROUPS, "--describe", "--group", "g"
    yield GROUPS, "--delete-offsets", "--group", "g", "--topic", "r:0"
    yield GROUPS, "--delete-offsets", "--group", "g", "--topic", "never"
    yield GROUPS, "--describe", "--group", "g"
    yield GROUPS, "--delete", "--group", "g"
    yield GROUPS, "--delete", "--group", "g"
    yield GROUPS, "--describe", "--group", "never"
    yield PACKAGE + "GroupsCommand", "--list"


def node(folder: Path) -> Iterator[Command]:
    yield TOPICS, "--create", "--topic", "n", "--partitions", "2"
    yield PACKAGE + "LogDirsCommand", "--describe", "--topic-list", "n"
    yield PACKAGE + "LogDirsCommand", "--describe", "--topic-list", "never"
    yield ELECT, "--election-type", "preferred", "--topic", "n", "--partition", "0"
    yield ELECT, "--election-type", "unclean", "--topic", "n", "--partition", "0"
    yield ELECT, "--election-type", "preferred", "--topic", "never", "--partition", "0"
    yield REASSIGN, "--list"
    for name, replica in (("same", 1), ("other", 7)):
        partitions = [{"topic": "n", "partition": 0, "replicas": [replica]}]
        (folder / name).write_text(json.dumps({"version": 1, "partitions": partitions}))
    for action in ("--execute", "--verify", "--cancel"):
        yield REASSIGN, action, "--reassignment-json-file", str(folder / "same")
    yield REASSIGN, "--execute", "--reassignment-json-file", str(folder / "other")
    (folder / "move").write_text(json.dumps({"version": 1, "topics": [{"topic": "n"}]}))
    moved = ("--topics-to-move-json-file", str(folder / "move"), "--broker-list", "1")
    yield REASSIGN, "--generate", *moved
    yield CLUSTER, "cluster-id"
    yield CLUSTER, "list-endpoints"
    latency = ("--num-records", "20", "--producer-acks", "1", "--record-size", "20")
    yield PACKAGE + "EndToEndLatency", "--topic", "n", *latency


def transactions(_: Path) -> Iterator[Command]:
    yield TOPICS, "--create", "--topic", "x"
    yield "open a transaction", "x"
    yield TRANSACTIONS, "list"
    yield TRANSACTIONS, "describe", "--transactional-id", "id"
    yield TRANSACTIONS, "describe", "--transactional-id", "never"
    yield TRANSACTIONS, "describe-producers", "--topic", "x", "--partition", "0"
    yield TRANSACTIONS, "find-hanging", "--topic", "x", "--partition", "0"
    yield TRANSACTIONS, "find-hanging", "--broker-id", "1"
    alone = ("--partition", "0", "--offset", "earliest", "--timeout-ms", "1500")
    yield CONSOLE_CONSUMER, "--topic", "x", *alone, "--isolation-level", "read_committed"
    place = ("--topic", "x", "--partition", "0")
    yield TRANSACTIONS, "abort", *place, "--start-offset", "7"
    yield TRANSACTIONS, "abort", *place, "--start-offset", "0"
    yield OFFSETS, "--topic", "x"
    yield TRANSACTIONS, "describe-producers", *place


def opened(address: str, topic: str) -> confluent_kafka.Producer:
    """Begin a transaction with one record in it."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": address, "transactional.id": "id", "log_level": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    assert producer.flush(30) == 0
    return producer


def normal(text: str, address: str) -> list[str]:
    """Return the lines of an output without the values that differ by right."""
    text = text.replace(address.partition(":")[2], "PORT")
    for pattern, word in (
        (r"^\s*at \S+\(.*\)$", ""),  # of a stack trace
        (r"(Exception: ).*", r"\1..."),  # the text of an error
        (r"(topic command : ).*", r"\1..."),
        (r'"logDirs?":"[^"]*"|"log_dirs":\["[^"]*"\]', "DIRECTORY"),
        (r"min\.insync\.replicas=1,?", ""),  # a feature of 4.3 sets it for each topic
        (r" synonyms=\{.*\}", ""),  # a broker names its own defaults
        (r"\b[0-9a-zA-Z_-]{22}\b", "ID"),
        (r"\b1[6-9]\d{11}\b", "TIME"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*", "TIME"),
        (r"\d+\.\d+|th = \d+", "DURATION"),
        (r"[ \t]+", " "),
    ):
        text = re.sub(pattern, word, text, flags=re.M)
    return [line.strip() for line in text.splitlines() if line.strip()]


def masked(command: Command, lines: list[str]) -> list[str]:
    """Mask the producer ids and durations of kafka-transactions; sort rows that have no order."""
    if command[0] == TRANSACTIONS:
        lines = [re.sub(r"(?<= )\d{1,15}(?= )|^\d+(?= 0 )", "N", line) for line in lines]
    if command[0] in (TRANSACTIONS, GROUPS, OFFSETS) or "--list" in command:
        lines = sorted(lines)
    if "LogDirsCommand" in command[0] or command[0] == REASSIGN:
        lines = ["".join(sorted(line)) if line.startswith("{") else line for line in lines]
    return lines


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    require_kafka()
    with Broker(tmp_path_factory.mktemp("broker"), {"num.partitions": 1}) as started:
        yield started


@pytest.mark.parametrize("walk", [topics, records, node, transactions])
def test_the_output_of_a_tool_is_that_of_a_broker(
    tools: Tools, broker: Broker, store: Store, tmp_path: Path,
    walk: Callable[[Path], Iterator[Command]],
) -> None:  # fmt: skip
    def outputs(address: str) -> list[tuple[Command, int, list[str]]]:
        found, producers = [], []
        for command in walk(tmp_path):
            if command[0] == "open a transaction":
                producers.append(opened(address, command[1]))
                continue
            given = command[-1][1:] if command[-1].startswith("<") else ""
            words = command[:-1] if given else command
            status, output = tools.ask(address, *words, stdin=given)
            found.append((command, status, masked(command, normal(output, address))))
        return found

    with KafkaServer(store) as server:
        for theirs, ours in zip(
            outputs(broker.bootstrap), outputs(server.bootstrap_servers), strict=True
        ):
            assert ours == theirs, " ".join(theirs[0])
