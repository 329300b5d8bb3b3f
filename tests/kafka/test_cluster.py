"""Three nodes with listeners on one metadata tree: what clients of a cluster see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from logstore.kafka.clustering.served_node import ServedNode
from logstore.kafka.metrics import metrics_text
from logstore.kafka.protocol.errors import ErrorCode
from logstore.opening import open_member
from logstore.replication.embedded import EmbeddedMetadata, EmbeddedTree
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kit import wait_until

PRODUCE, FETCH, LIST_OFFSETS, METADATA, FIND_COORDINATOR = 0, 1, 2, 3, 10
CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS, INIT_PRODUCER_ID, CREATE_PARTITIONS = (
    19,
    20,
    21,
    22,
    37,
)
ELECT_LEADERS, ALTER_REASSIGNMENTS, LIST_REASSIGNMENTS, DESCRIBE_CLUSTER = 43, 45, 46, 60
NODES = (1, 2, 3)


class Nodes:
    """The nodes of a cluster, by id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = EmbeddedTree(None)
        self.up: dict[int, ServedNode] = {}
        self.ports: dict[int, int] = {}

    def start(self, number: int) -> None:
        node = ServedNode(
            open_member(self.path / str(number), durability="os"),
            node_id=number,
            metadata=self.tree.session,
            listen=f"127.0.0.1:{self.ports.get(number, 0)}",
            node_config={"replica.lag.time.max.ms": 2000, "replica.fetch.wait.max.ms": 100},
        )
        self.up[number] = node.start()
        self.ports[number] = node.server.address[1]

    def kill(self, number: int) -> None:
        """End a node as kill -9 does; its session ends at once."""
        self.up.pop(number).kill()

    def peer(self, number: int) -> Peer:
        return Peer(self.up[number].server.address)

    @property
    def any(self) -> ServedNode:
        return next(iter(self.up.values()))

    @property
    def servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    def create(self, name: str, partitions: int = 1, factor: int = 3, **settings: str) -> None:
        answer = self.ask(CREATE_TOPICS, 7, create_body(name, partitions, factor, **settings))
        assert answer["topics"][0]["error_code"] == 0, answer
        for number in range(partitions):
            wait_until(lambda at=number: self.is_led(name, at), f"that {name}-{number} is led")

    def is_led(self, topic: str, number: int) -> bool:
        """Whether the leader has learnt that it leads; clients ask again until then."""
        node = self.up.get(self.leader(topic, number))
        return node is not None and (topic, number) in node.node.leads()

    def ask(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        with Peer(self.any.server.address) as peer:
            return peer.ask(key, version, body)

    def leader(self, topic: str, number: int = 0) -> int:
        state = self.any.node.image.states[topic, number]
        return state.leader

    def follower(self, topic: str) -> int:
        return next(node for node in self.up if node != self.leader(topic))

    def in_sync(self, topic: str, number: int = 0) -> set[int]:
        return set(self.any.node.image.states[topic, number].isr)


def create_body(name: str, partitions: int, factor: int, **settings: str) -> dict[str, Any]:
    configs = [{"name": key.replace("_", "."), "value": each} for key, each in settings.items()]
    topic = {"name": name, "num_partitions": partitions, "replication_factor": factor}
    return {
        "topics": [topic | {"assignments": [], "configs": configs}],
        "timeout_ms": 20_000,
        "validate_only": False,
    }


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    try:
        for number in NODES:
            made.start(number)
        yield made
    finally:
        for node in made.up.values():
            node.kill()
        made.tree.close()


def produced(answer: dict[str, Any]) -> tuple[int, int]:
    row = answer["responses"][0]["partition_responses"][0]
    return row["error_code"], row["base_offset"]


def test_metadata_names_the_nodes_and_the_leaders(nodes: Nodes) -> None:
    nodes.create("t", 3)
    with nodes.peer(1) as first, nodes.peer(2) as second:
        body = {"topics": [{"name": "t", "topic_id": bytes(16)}]}
        answers = [peer.ask(METADATA, 12, body) for peer in (first, second)]
    for answer in answers:
        assert [each["node_id"] for each in answer["brokers"]] == [1, 2, 3]
        assert [each["port"] for each in answer["brokers"]] == list(nodes.ports.values())
        rows = answer["topics"][0]["partitions"]
        assert sorted(each["leader_id"] for each in rows) == [1, 2, 3]
        assert all(sorted(each["isr_nodes"]) == [1, 2, 3] for each in rows)
    assert answers[0]["controller_id"] == answers[1]["controller_id"] in NODES


def test_only_the_leader_takes_records_and_shows_them(nodes: Nodes) -> None:
    nodes.create("t")
    other = nodes.follower("t")
    with nodes.peer(nodes.leader("t")) as leader, nodes.peer(other) as follower:
        refused = follower.ask(PRODUCE, 9, produce_body("t", batch(b"no")))
        assert produced(refused) == (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
        assert produced(leader.ask(PRODUCE, 9, produce_body("t", batch(b"yes")))) == (0, 0)
        row = follower.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"][0]
        assert row["error_code"] == ErrorCode.NOT_LEADER_OR_FOLLOWER
        row = leader.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"][0]
        assert (row["error_code"], row["high_watermark"]) == (0, 1)


def test_a_topic_of_other_nodes_is_known_and_not_led(nodes: Nodes) -> None:
    nodes.create("t", 1, 1)
    elsewhere = nodes.follower("t")
    assert "t" not in nodes.up[elsewhere].node.store
    with nodes.peer(elsewhere) as peer:
        answer = peer.ask(PRODUCE, 9, produce_body("t", batch(b"no")))
        assert produced(answer)[0] == ErrorCode.NOT_LEADER_OR_FOLLOWER
        row = peer.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"][0]
        assert row["error_code"] == ErrorCode.NOT_LEADER_OR_FOLLOWER
        row = peer.ask(FETCH, 11, fetch_body("u", 0))["responses"][0]["partitions"][0]
        assert row["error_code"] == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_acks_all_needs_the_minimum_in_sync(nodes: Nodes) -> None:
    nodes.create("t", min_insync_replicas="3")
    leader = nodes.leader("t")
    nodes.kill(nodes.follower("t"))
    wait_until(lambda: len(nodes.in_sync("t")) == 2, "that the dead node leaves the in-sync set")
    with nodes.peer(leader) as peer:
        refused = peer.ask(PRODUCE, 9, produce_body("t", batch(b"no")))
        assert produced(refused) == (ErrorCode.NOT_ENOUGH_REPLICAS, -1)
        body = produce_body("t", batch(b"yes")) | {"acks": 1}
        assert produced(peer.ask(PRODUCE, 9, body)) == (0, 0)
        row = peer.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"][0]
        assert (row["high_watermark"], row["records"]) == (0, b""), "nothing is committed"


def test_topics_are_refused_that_the_nodes_cannot_hold(nodes: Nodes) -> None:
    codes = {}
    for name, factor in (("four", 4), ("zero", 0), ("one", 1)):
        answer = nodes.ask(CREATE_TOPICS, 7, create_body(name, 1, factor))
        codes[name] = answer["topics"][0]["error_code"]
    refused = ErrorCode.INVALID_REPLICATION_FACTOR
    assert codes == {"four": refused, "zero": refused, "one": 0}


def test_a_topic_grows_and_is_deleted_everywhere(nodes: Nodes) -> None:
    nodes.create("t", 1)
    more = {"name": "t", "count": 3, "assignments": None}
    body = {"topics": [more], "timeout_ms": 20_000, "validate_only": False}
    assert nodes.ask(CREATE_PARTITIONS, 3, body)["results"][0]["error_code"] == 0
    wait_until(lambda: all(len(each.node.store["t"]) == 3 for each in nodes.up.values()))
    body = {"topics": [{"name": "t", "topic_id": bytes(16)}], "timeout_ms": 20_000}
    assert nodes.ask(DELETE_TOPICS, 6, body)["responses"][0]["error_code"] == 0
    wait_until(lambda: all("t" not in each.node.store for each in nodes.up.values()))
    nodes.create("t", 2)


def test_the_preferred_leader_is_elected_on_demand(nodes: Nodes) -> None:
    nodes.create("t")
    preferred = nodes.leader("t")
    nodes.kill(preferred)
    wait_until(lambda: nodes.leader("t") not in (preferred, -1), "another leader")
    nodes.start(preferred)
    wait_until(lambda: nodes.in_sync("t") == {1, 2, 3}, "that the node is in sync again")
    body = {
        "election_type": 0,
        "topic_partitions": [{"topic": "t", "partitions": [0, 7]}],
        "timeout_ms": 20_000,
    }
    rows = nodes.ask(ELECT_LEADERS, 2, body)["replica_election_results"][0]["partition_result"]
    codes = [row["error_code"] for row in rows]
    assert codes == [0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    assert nodes.leader("t") == preferred
    rows = nodes.ask(ELECT_LEADERS, 2, body)["replica_election_results"][0]["partition_result"]
    assert rows[0]["error_code"] == ErrorCode.ELECTION_NOT_NEEDED


def test_replicas_are_moved(nodes: Nodes) -> None:
    nodes.create("t", 1, 1)
    source = nodes.leader("t")
    target = nodes.follower("t")
    with nodes.peer(source) as peer:
        for value in (b"a", b"b", b"c"):
            assert produced(peer.ask(PRODUCE, 9, produce_body("t", batch(value))))[0] == 0
    row = {"partition_index": 0, "replicas": [target]}
    body = {"timeout_ms": 20_000, "topics": [{"name": "t", "partitions": [row]}]}
    answer = nodes.ask(ALTER_REASSIGNMENTS, 0, body)
    assert answer["responses"][0]["partitions"][0]["error_code"] == 0
    wait_until(lambda: nodes.leader("t") == target, "that the target leads")
    wait_until(lambda: not nodes.any.node.image.topics["t"].partitions[0].moving)
    listed = nodes.ask(LIST_REASSIGNMENTS, 0, {"timeout_ms": 1000, "topics": None})
    assert listed["topics"] == []
    with nodes.peer(target) as peer:
        row = peer.ask(FETCH, 11, fetch_body("t", 0))["responses"][0]["partitions"][0]
        assert row["high_watermark"] == 3
    row = {"partition_index": 0, "replicas": [9]}
    body = {"timeout_ms": 20_000, "topics": [{"name": "t", "partitions": [row]}]}
    answer = nodes.ask(ALTER_REASSIGNMENTS, 0, body)
    code = answer["responses"][0]["partitions"][0]["error_code"]
    assert code == ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_a_replica_id_that_is_no_node_gets_nothing(nodes: Nodes) -> None:
    nodes.create("t")
    with nodes.peer(nodes.leader("t")) as peer:
        body = fetch_body("t", 0) | {"replica_id": 9}
        answer = peer.ask(FETCH, 11, body)
        codes = {answer["error_code"]} | {
            row["error_code"] for topic in answer["responses"] for row in topic["partitions"]
        }
        assert ErrorCode.NOT_LEADER_OR_FOLLOWER in codes
        assert not any(
            row["records"] for topic in answer["responses"] for row in topic["partitions"]
        )


def test_producer_ids_differ_between_nodes(nodes: Nodes) -> None:
    body = {"transactional_id": None, "transaction_timeout_ms": 1000}
    body |= {"producer_id": -1, "producer_epoch": -1}
    ids = []
    for _ in range(3):
        for number in NODES:
            with nodes.peer(number) as peer:
                ids.append(peer.ask(INIT_PRODUCER_ID, 4, body)["producer_id"])
    assert len(set(ids)) == len(ids) == 9


def test_a_real_client_fails_over(nodes: Nodes) -> None:
    nodes.create("t", 2, min_insync_replicas="2")
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": nodes.servers, "enable.idempotence": True})

    def send(values: range) -> None:
        for number in values:
            producer.produce(
                "t", b"%d" % number, partition=number % 2,
                on_delivery=lambda error, _: errors.append(error),
            )  # fmt: skip
        assert producer.flush(40) == 0

    send(range(1000))
    nodes.kill(nodes.leader("t"))
    send(range(1000, 2000))
    assert len(errors) == 2000
    assert not any(errors)
    assert sorted(read(nodes, "t", 2)) == list(range(2000))


def read(nodes: Nodes, topic: str, partitions: int) -> list[int]:
    """Return the committed values of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": nodes.servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
    found: list[int] = []
    ended: set[int] = set()

    def look() -> bool:
        for message in consumer.consume(500, 0.2):
            if message.error():
                ended.add(message.partition())
            else:
                found.append(int(message.value()))
        return len(ended) == partitions

    try:
        wait_until(look, "the ends of all partitions")
    finally:
        consumer.close()
    return found


def test_a_transactional_copy_survives_its_coordinators_and_leaders(nodes: Nodes) -> None:
    """Each input is in the output once, although a node dies inside of a transaction."""
    for name in ("source", "target"):
        nodes.create(name, 2, min_insync_replicas="2")
    feed = Producer({"bootstrap.servers": nodes.servers, "enable.idempotence": True})
    for number in range(600):
        feed.produce("source", b"%d" % number, partition=number % 2)
    assert feed.flush(30) == 0
    copied = copy(nodes, 600, die_at=2, back_at=4)
    assert copied == 600
    assert sorted(read(nodes, "target", 2)) == list(range(600))


def copy(nodes: Nodes, total: int, *, die_at: int, back_at: int) -> int:
    """Copy records in transactions of at most 100; kill and start a node on the way."""
    common = {"bootstrap.servers": nodes.servers, "log_level": 0}
    consumer = Consumer(
        common | {"group.id": "copy", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )
    consumer.subscribe(["source"])
    producer = Producer(common | {"transactional.id": "copy"})
    producer.init_transactions(60)
    done, rounds, dead = 0, 0, 0

    def transact(messages: list[Any]) -> None:
        nonlocal dead
        producer.begin_transaction()
        for each in messages:
            producer.produce("target", each.value(), partition=each.partition())
        position = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata(), 60)
        if rounds == die_at:
            dead = nodes.leader("target")
            nodes.kill(dead)
        producer.commit_transaction(60)

    def step() -> bool:
        nonlocal done, rounds, dead
        messages = [each for each in consumer.consume(100, 1.0) if not each.error()]
        if messages:
            rounds += 1
            transact(messages)
            done += len(messages)
        if dead and rounds == back_at:
            nodes.start(dead)
            dead = 0
        return done >= total

    try:
        wait_until(step, "that all is copied", patience=90)
    finally:
        consumer.close()
    return done


def test_a_groups_offsets_move_with_their_coordinator(nodes: Nodes) -> None:
    nodes.create("t")
    common = {"bootstrap.servers": nodes.servers, "group.id": "g", "log_level": 0}

    def with_consumer(act: Callable[[Consumer], Any]) -> Any:
        consumer = Consumer(common)
        try:
            return act(consumer)
        finally:
            consumer.close()

    place = TopicPartition("t", 0, 41)
    with_consumer(lambda each: each.commit(offsets=[place], asynchronous=False))
    admin = AdminClient({"bootstrap.servers": nodes.servers})
    described = admin.describe_consumer_groups(["g"])["g"].result(20)
    nodes.kill(described.coordinator.id)
    found = with_consumer(lambda each: each.committed([TopicPartition("t", 0)], timeout=40))
    assert [each.offset for each in found] == [41]


def test_a_new_topic_has_no_offsets_of_a_deleted_one(nodes: Nodes) -> None:
    nodes.create("t")
    nodes.create("kept")
    consumer = Consumer({"bootstrap.servers": nodes.servers, "group.id": "g", "log_level": 0})
    try:
        places = [TopicPartition("t", 0, 41), TopicPartition("kept", 0, 42)]
        consumer.commit(offsets=places, asynchronous=False)
        answer = nodes.ask(DELETE_TOPICS, 5, {"topic_names": ["t"], "timeout_ms": 20_000})
        assert answer["responses"][0]["error_code"] == 0

        def committed() -> list[int]:
            found = consumer.committed([TopicPartition(n, 0) for n in ("t", "kept")], timeout=40)
            return [each.offset for each in found]

        wait_until(lambda: committed() == [OFFSET_INVALID, 42], "that the offset is forgotten")
        nodes.create("t")
        assert committed() == [OFFSET_INVALID, 42]
        # That topics are deleted is news only once: a later commit stays.
        consumer.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
        nodes.create("u")
        nodes.ask(DELETE_TOPICS, 5, {"topic_names": ["u"], "timeout_ms": 20_000})
        wait_until(lambda: all("u" not in each.node.image.topics for each in nodes.up.values()))
        assert committed() == [1, 42]
    finally:
        consumer.close()


# ---- the throttle, as kafka-reassign-partitions sets and deletes it ----

RATE, REPLICAS = "leader.replication.throttled.rate", "leader.replication.throttled.replicas"
BROKER, TOPIC = 4, 2
SET, DELETE, APPEND = 0, 1, 2


def altered(peer: Peer, kind: int, owner: str, *changes: tuple[str, int, str | None]) -> Any:
    """The code and the text of IncrementalAlterConfigs."""
    configs = [{"name": name, "config_operation": operation, "value": value}
               for name, operation, value in changes]  # fmt: skip
    row = {"resource_type": kind, "resource_name": owner, "configs": configs}
    (answer,) = peer.ask(44, 1, {"resources": [row], "validate_only": False})["responses"]
    return answer["error_code"], answer["error_message"]


def described(peer: Peer, kind: int, owner: str) -> dict[str, tuple[str, int]]:
    """The settings of the throttle that DescribeConfigs shows, with their source."""
    row = {"resource_type": kind, "resource_name": owner, "configuration_keys": None}
    (answer,) = peer.ask(32, 4, {"resources": [row], "include_synonyms": True})["results"]
    assert answer["error_code"] == 0
    return {each["name"]: (each["value"], each["config_source"])
            for each in answer["configs"] if "throttled" in each["name"]}  # fmt: skip


def test_kafkas_tools_set_and_delete_a_throttle(nodes: Nodes) -> None:
    nodes.create("t")
    log_dirs = "replica.alter.log.dirs.io.max.bytes.per.second"
    with nodes.peer(2) as peer:
        assert altered(peer, BROKER, "2", (RATE, SET, "1000")) == (0, None)
        assert altered(peer, BROKER, "", (RATE, SET, "5000")) == (0, None)
        assert altered(peer, TOPIC, "t", (REPLICAS, SET, "0:1")) == (0, None)
        assert altered(peer, TOPIC, "t", (REPLICAS, APPEND, "0:2")) == (0, None)
        assert described(peer, BROKER, "2") == {RATE: ("1000", 2)}
        assert described(peer, BROKER, "") == {RATE: ("5000", 3)}
        assert described(peer, TOPIC, "t") == {REPLICAS: ("0:1,0:2", 1)}
        throttle = nodes.up[2].node._sending
        assert throttle.binds(("t", 0))
        assert throttle.room() == 1000
        wait_until(lambda: nodes.up[3].node._sending.room() == 5000, "the rate of all nodes")
        assert not nodes.up[3].node._sending.binds(("t", 0))
        deleted = altered(peer, BROKER, "2", (RATE, DELETE, None), (log_dirs, DELETE, None))
        assert deleted == (0, None)
        assert altered(peer, BROKER, "", (RATE, DELETE, None)) == (0, None)
        assert altered(peer, TOPIC, "t", (REPLICAS, DELETE, None)) == (0, None)
        assert described(peer, BROKER, "2") == described(peer, TOPIC, "t") == {}
        assert not throttle.binds(("t", 0))


def test_a_throttle_that_is_not_valid_is_refused_with_its_form(nodes: Nodes) -> None:
    nodes.create("t")
    invalid = ErrorCode.INVALID_CONFIG
    with nodes.peer(1) as peer:
        code, text = altered(peer, BROKER, "1", (RATE, SET, "0"))
        assert (code, "from 1 on, not '0'" in text) == (invalid, True)
        code, text = altered(peer, BROKER, "1", ("log.dirs", SET, "x"))
        assert (code, f"{RATE} and follower" in text) == (invalid, True)
        code, text = altered(peer, TOPIC, "t", (REPLICAS, SET, "1"))
        assert (code, "such as 0:1,0:2, not '1'" in text) == (invalid, True)
        assert described(peer, BROKER, "1") == described(peer, TOPIC, "t") == {}


def test_a_leader_that_is_cut_off_has_its_clients_ask_others(nodes: Nodes) -> None:
    """A client that knows the leaders from this node alone would keep producing to it for ever."""
    nodes.create("t")
    leader = nodes.leader("t")
    node = nodes.up[leader].node
    node.config = node.config.with_settings({"zookeeper.session.timeout.ms": 500})
    session = node.membership.session
    assert isinstance(session, EmbeddedMetadata)
    with nodes.peer(leader) as peer:
        peer.ask(METADATA, 12, {"topics": [{"name": "t", "topic_id": bytes(16)}]})
        session.commit = lambda ops, done: None  # type: ignore[method-assign]  # nothing arrives
        session.state = "suspended"
        wait_until(lambda: node._cut_since is not None)
        assert not node._is_in_doubt(), "its followers fetch: it leads"
        for other in NODES:
            if other != leader:
                nodes.kill(other)

        def is_closed() -> bool:
            try:
                peer.ask(METADATA, 12, {"topics": [{"name": "t", "topic_id": bytes(16)}]})
            except (ConnectionError, EOFError):
                return True
            return False

        wait_until(is_closed, "that the connection is closed")
    session.state = "connected"
    wait_until(lambda: node._cut_since is None)
    with nodes.peer(leader) as peer:
        peer.ask(METADATA, 12, {"topics": [{"name": "t", "topic_id": bytes(16)}]})


def test_the_page_for_prometheus_has_the_metrics_of_replication(nodes: Nodes) -> None:
    nodes.create("t")
    leader = nodes.up[nodes.leader("t")].server
    text = metrics_text(leader.metrics())
    name = "logstore_kafka_replication_leader_count"
    assert f"# HELP {name} partitions that this node leads\n# TYPE {name} gauge\n" in text
    assert "\nlogstore_kafka_replication_isr_shrinks_total " in text
    assert leader.metrics()["replication_partition_count"] >= 1


def test_a_dead_node_is_fenced_for_who_describes_the_cluster(nodes: Nodes) -> None:
    body = {"include_fenced_brokers": False}

    def listed(**options: bool) -> dict[int, bool]:
        rows = nodes.ask(DESCRIBE_CLUSTER, 2, body | options)["brokers"]
        return {row["broker_id"]: row["is_fenced"] for row in rows}

    assert listed() == {1: False, 2: False, 3: False}
    nodes.kill(3)
    wait_until(lambda: listed() == {1: False, 2: False})
    assert listed(include_fenced_brokers=True) == {1: False, 2: False, 3: True}


def delete_body(topic: str, offset: int, timeout_ms: int = 20_000) -> dict[str, Any]:
    row = {"partition_index": 0, "offset": offset}
    return {"topics": [{"name": topic, "partitions": [row]}], "timeout_ms": timeout_ms}


def test_delete_records_is_answered_when_all_live_replicas_have_done_it(nodes: Nodes) -> None:
    nodes.create("t")
    leader = nodes.leader("t")
    with nodes.peer(leader) as peer:
        answer = peer.ask(PRODUCE, 9, produce_body("t", batch(*(b"%d" % i for i in range(10)))))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
        wait_until(lambda: nodes.up[leader].node.store["t"][0].high_watermark == 10)
        (row,) = peer.ask(DELETE_RECORDS, 2, delete_body("t", 7))["topics"][0]["partitions"]
        assert (row["error_code"], row["low_watermark"]) == (0, 7)
        starts = {each.node.store["t"][0].start_offset for each in nodes.up.values()}
        assert starts == {7}
        # A replica that is dead is not waited for.
        nodes.kill(next(number for number in NODES if number != leader))
        wait_until(lambda: len(nodes.up[leader].node.image.nodes) == 2)
        (row,) = peer.ask(DELETE_RECORDS, 2, delete_body("t", -1))["topics"][0]["partitions"]
        assert (row["error_code"], row["low_watermark"]) == (0, 10)


def test_delete_records_with_a_replica_that_is_late(nodes: Nodes) -> None:
    nodes.create("t")
    leader = nodes.leader("t")
    with nodes.peer(leader) as peer:
        peer.ask(PRODUCE, 9, produce_body("t", batch(*(b"%d" % i for i in range(10)))))
        wait_until(lambda: nodes.up[leader].node.store["t"][0].high_watermark == 10)
        late = next(number for number in NODES if number != leader)
        replica = nodes.up[late].node.replica(("t", 0))
        assert replica is not None
        with replica.lock:  # it can do nothing
            found = peer.ask(DELETE_RECORDS, 2, delete_body("t", 7, 300))
            (row,) = found["topics"][0]["partitions"]
            assert row["error_code"] == ErrorCode.REQUEST_TIMED_OUT
            assert row["low_watermark"] < 7
        # The leader has deleted them; the other follows.
        wait_until(lambda: nodes.up[late].node.store["t"][0].start_offset == 7)
        (row,) = peer.ask(DELETE_RECORDS, 2, delete_body("t", 7))["topics"][0]["partitions"]
        assert (row["error_code"], row["low_watermark"]) == (0, 7)
