"""The contents of the metadata tree: Kafka 3.9 reads what we write, and we read what it writes."""

from __future__ import annotations

import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.controller import Controller
from logstore.replication.machines.image import (
    CLUSTER_ID,
    CONTROLLER,
    CONTROLLER_EPOCH,
    PREFERRED,
    PRODUCER_IDS,
    REASSIGN,
    ROOTS,
    ClusterImage,
    Registration,
    TopicImage,
    as_json,
    broker_path,
    config_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.metadata import Create
from logstore.replication.zookeeper import ZooKeeperMetadata

from .tools import JAVA
from .zookeeper import Ensemble, ZooKeeperBroker, require_zookeeper, zookeeper_jar_directory

pytestmark = pytest.mark.interop

NOW_MS = 1_731_772_800_000
TOPIC_ID = "Kq3CUZFpQmSmT0YZb3x2Bw"


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of Layout.java and Kafka 3.9."""
    require_zookeeper()
    target = tmp_path_factory.mktemp("classes")
    path = f"{zookeeper_jar_directory()}/*"
    command = ["javac", "-nowarn", "-J-XX:TieredStopAtLevel=1", "-cp", path, "-d", str(target)]
    subprocess.run([*command, str(JAVA / "Layout.java")], check=True, timeout=120)
    return f"{target}:{path}"


def decoded_by_kafka(classes: str, tree: dict[str, bytes], version: int) -> dict[str, str]:
    lines = [f"{path} {version} ={b64encode(data).decode()}" for path, data in tree.items()]
    ended = subprocess.run(
        ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", classes, "Layout"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    answers = ended.stdout.splitlines()
    assert len(answers) == len(tree), ended.stderr
    return dict(zip(tree, answers, strict=True))


def test_kafka_reads_what_we_write(classes: str) -> None:
    controller = Controller(2, "life-1")
    campaign = controller.campaign(ClusterImage(), NOW_MS)
    assert campaign is not None
    created = {op.path: op.data for op in campaign.ops if isinstance(op, Create)}
    offline = frozenset({("t", 0)})
    moved = Assignment((1, 2, 3), adding=(3,), removing=(1,))
    wanted = {"topic": "t", "partition": 0, "replicas": [4, 5]}
    tree = {
        broker_path(2): Registration(
            2, 7, host="a.example", port=9092, rack="r1", lossy=True, offline=offline, lock=(1, 2)
        ).encode(NOW_MS),
        broker_path(3): Registration(3, 7, host="b.example", port=9093).encode(NOW_MS),
        topic_path("t"): TopicImage(0, TOPIC_ID, {0: moved, 1: Assignment((2,))}).encode(),
        state_path(("t", 0)): LeaderAndIsr(
            4, 1, 5, 9, (1, 2), min_isr=2, controller_epoch=7
        ).encode(),
        state_path(("t", 1)): LeaderAndIsr(4, -1, 5, -1, (), (2,), 1, 7, True, (2,)).encode(),
        CONTROLLER: created[CONTROLLER],
        CONTROLLER_EPOCH: created[CONTROLLER_EPOCH],
        CLUSTER_ID: as_json({"version": "1", "id": TOPIC_ID}),
        config_path("topics", "t"): as_json({"version": 1, "config": {"min.insync.replicas": "2"}}),
        REASSIGN: as_json({"version": 1, "partitions": [wanted]}),
        PREFERRED: as_json({"version": 1, "partitions": [{"topic": "t", "partition": 1}]}),
        PRODUCER_IDS: as_json({"version": 1, "broker": 1, "block_start": "0", "block_end": "999"}),
    }
    found = decoded_by_kafka(classes, tree, version=4)
    end = "ListenerName(PLAINTEXT),PLAINTEXT"
    assert found == {
        broker_path(2): f"BrokerInfo(2 : (EndPoint(a.example,9092,{end})) : r1 : Features{{}},5,-1)"
        " Some(r1)",
        broker_path(
            3
        ): f"BrokerInfo(3 : (EndPoint(b.example,9093,{end})) : null : Features{{}},5,-1) None",
        topic_path("t"): f"TopicIdReplicaAssignment(t,Some({TOPIC_ID}),Map("
        "t-0 -> ReplicaAssignment(replicas=1,2,3, addingReplicas=3, removingReplicas=1), "
        "t-1 -> ReplicaAssignment(replicas=2, addingReplicas=, removingReplicas=)))",
        state_path(("t", 0)): "Some((Leader:1,ISR:1,2,LeaderRecoveryState:RECOVERED,"
        "LeaderEpoch:5,ZkVersion:4,ControllerEpoch:7))",
        state_path(("t", 1)): "Some((Leader:-1,ISR:,LeaderRecoveryState:RECOVERING,"
        "LeaderEpoch:5,ZkVersion:4,ControllerEpoch:7))",
        CONTROLLER: "Some(2)",
        CONTROLLER_EPOCH: "1",
        CLUSTER_ID: TOPIC_ID,
        config_path("topics", "t"): "{min.insync.replicas=2}",
        REASSIGN: "Right(Map(t-0 -> Buffer(4, 5)))",
        PREFERRED: "Set(t-1)",
        PRODUCER_IDS: "ProducerIdsBlock(assignedBrokerId=1, firstProducerId=0, size=1000)",
    }


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperBroker]:
    require_zookeeper()
    directory = tmp_path_factory.mktemp("kafka39")
    with (
        Ensemble(directory / "zookeeper") as ensemble,
        ZooKeeperBroker(directory, f"{ensemble.connect}/kafka") as running,
    ):
        yield running


def test_we_read_what_a_kafka_broker_writes(broker: ZooKeeperBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    topics = [
        NewTopic("orders", num_partitions=3, replication_factor=1, config={"retention.ms": "5"}),
        NewTopic("plain", num_partitions=1, replication_factor=1),
    ]
    for made in admin.create_topics(topics).values():
        made.result(60)
    setting = ConfigEntry("log.retention.ms", "60000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[setting])
    for changed in admin.incremental_alter_configs([resource]).values():
        changed.result(60)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
    producer.produce("plain", b"x")
    assert producer.flush(60) == 0

    session = ZooKeeperMetadata(broker.connect, session_timeout_ms=10_000)
    session.start(ROOTS, lambda path: None, lambda state: None, timeout=60)
    try:
        image = ClusterImage()
        deadline = time.monotonic() + 30
        while len(image.states) < 4:  # the controller writes them after the topics
            assert time.monotonic() < deadline
            image.load(session)
            time.sleep(0.05)
        assert image.unreadable == {}
        assert len(image.cluster_id) == 22
        assert image.controller is not None
        assert image.controller["brokerid"] == 1
        assert image.controller_epoch == 1
        node = image.nodes[1]
        assert (node.host, node.port, node.rack) == ("127.0.0.1", broker.port, "rack-1")
        assert (node.lossy, node.unwilling, node.offline) == (False, False, frozenset())
        assert set(image.topics) == {"orders", "plain"}
        assert len(image.topics["orders"].topic_id) == 22
        assert image.topics["orders"].partitions == {n: Assignment((1,)) for n in range(3)}
        for key in (("orders", 0), ("orders", 1), ("orders", 2), ("plain", 0)):
            state = image.states[key]
            assert (state.leader, state.leader_epoch, state.isr) == (1, 0, (1,))
            assert (state.controller_epoch, state.elr, state.recovering) == (1, (), False)
        assert image.setting("orders", "retention.ms", "?") == "5"
        assert image.configs["brokers", "1"][0] == {"log.retention.ms": "60000"}
        assert image.producer_ids is not None
        assert image.producer_ids[0]["block_end"] == "999"
    finally:
        session.close()


def test_our_copy_of_a_kafka_tree_is_read_by_kafka(broker: ZooKeeperBroker, classes: str) -> None:
    """Decode each path of the broker and encode it again: Kafka reads the same from both."""
    session = ZooKeeperMetadata(broker.connect, session_timeout_ms=10_000)
    session.start(ROOTS, lambda path: None, lambda state: None, timeout=60)
    try:
        image = ClusterImage()
        image.load(session)
        ours = {
            **{broker_path(number): each.encode(NOW_MS) for number, each in image.nodes.items()},
            **{topic_path(name): each.encode() for name, each in image.topics.items()},
            **{state_path(key): each.encode() for key, each in image.states.items()},
        }
        theirs = {}
        for path in ours:
            found = session.read(path)
            assert found is not None
            theirs[path] = found[0]
    finally:
        session.close()
    assert len(ours) >= 3
    assert decoded_by_kafka(classes, ours, 0) == decoded_by_kafka(classes, theirs, 0)
