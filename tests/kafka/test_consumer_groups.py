"""Groups of the consumer protocol (KIP-848): librdkafka, restarts, and the views of a process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import Consumer, Groups, ManualClock, Store
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.offset_book import OffsetBook
from logstore.errors import RebalanceError
from logstore.kafka.server import KafkaServer

from .peer import Peer

confluent_kafka = pytest.importorskip("confluent_kafka")

SETTINGS = {
    "group.consumer.heartbeat.interval.ms": 50,
    "group.consumer.session.timeout.ms": 1_000,
    "auto.create.topics.enable": "false",
}
PATIENCE = 120.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os") as store:
        store.create_topic("t", 4)
        yield store


@pytest.fixture
def server(store: Store) -> Iterator[KafkaServer]:
    with KafkaServer(store, config=SETTINGS) as server:
        yield server


class Members:
    """Consumers of librdkafka that are polled in turn until a condition holds."""

    def __init__(self, server: KafkaServer) -> None:
        self.server = server
        self.made: dict[str, Any] = {}
        self.read: set[bytes] = set()

    def join(self, name: str, topics: str = "t", **settings: str) -> None:
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": self.server.bootstrap_servers, "group.id": "g",
             "group.protocol": "consumer", "client.id": name, "auto.offset.reset": "earliest",
             "enable.auto.commit": False, "topic.metadata.refresh.interval.ms": 200}
            | {key.replace("_", "."): value for key, value in settings.items()}
        )  # fmt: skip
        consumer.subscribe([topics])
        self.made[name] = consumer

    def leave(self, name: str) -> None:
        self.made.pop(name).close()

    def counts(self) -> dict[str, int]:
        """How many partitions each member reads; they are disjoint."""
        each = {name: consumer.assignment() for name, consumer in self.made.items()}
        everything = [(tp.topic, tp.partition) for held in each.values() for tp in held]
        assert len(everything) == len(set(everything))
        return {name: len(held) for name, held in each.items()}

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.counts()
            for consumer in self.made.values():
                message = consumer.poll(0.01)
                if message is not None and message.error() is None:
                    self.read.add(message.value())

    def await_counts(self, **wanted: int) -> None:
        self.until(lambda: self.counts() == wanted)

    def close(self) -> None:
        for name in list(self.made):
            self.leave(name)


@pytest.fixture
def members(server: KafkaServer) -> Iterator[Members]:
    members = Members(server)
    yield members
    members.close()


def state(store: Store) -> str:
    return Groups(store).describe("g").state


def test_members_join_read_commit_and_leave(members: Members, store: Store) -> None:
    for number in range(4):
        store["t"][number].append(b"%d" % number)
    members.join("a")
    members.await_counts(a=4)
    members.until(lambda: members.read == {b"0", b"1", b"2", b"3"})
    members.made["a"].commit(asynchronous=False)
    members.join("b")
    members.await_counts(a=2, b=2)
    members.join("c")
    members.until(lambda: sorted(members.counts().values()) == [1, 1, 2])
    members.until(lambda: state(store) == "Stable")
    described = Groups(store).describe("g")
    assert (described.group_type, described.protocol) == ("consumer", "uniform")
    assert sorted(len(member.assignment) for member in described.members) == [1, 1, 2]
    assert {member.topics for member in described.members} == {("t",)}
    members.leave("a")
    members.await_counts(b=2, c=2)
    assert {each.offset for each in Groups(store).committed("g").values()} == {1}
    with pytest.raises(RebalanceError):
        Groups(store).delete("g")
    members.close()
    assert state(store) == "Empty"
    Groups(store).delete("g")
    assert "g" not in Groups(store)


def test_new_partitions_and_new_topics_are_assigned(members: Members, store: Store) -> None:
    members.join("a", "^t.*")
    members.join("b")
    members.await_counts(a=2, b=2)
    store.topic_changes.grow(store["t"], 2)
    members.await_counts(a=3, b=3)
    store.create_topic("too", 2)  # only the expression matches it
    members.until(lambda: sum(members.counts().values()) == 8)
    assert {tp.topic for tp in members.made["b"].assignment()} == {"t"}
    store.delete_topic("t")
    members.await_counts(a=2, b=0)


def test_a_static_member_returns_to_its_partitions(members: Members, store: Store) -> None:
    members.join("a", group_instance_id="one")
    members.join("b")
    members.await_counts(a=2, b=2)
    members.until(lambda: state(store) == "Stable")
    epoch = Groups(store).describe("g").generation
    held = {tp.partition for tp in members.made["a"].assignment()}
    members.leave("a")
    members.join("a", group_instance_id="one")
    members.await_counts(a=2, b=2)
    assert {tp.partition for tp in members.made["a"].assignment()} == held
    assert Groups(store).describe("g").generation == epoch


KILLED = """
import confluent_kafka, sys
c = confluent_kafka.Consumer({"bootstrap.servers": sys.argv[1], "group.id": "g",
                              "group.protocol": "consumer"})
c.subscribe(["t"])
while not c.assignment():
    c.poll(0.05)
print("assigned", flush=True)
while True:
    c.poll(0.05)
"""


def test_a_member_that_is_killed_loses_its_partitions(members: Members) -> None:
    members.join("a")
    address = members.server.bootstrap_servers
    process = subprocess.Popen([sys.executable, "-c", KILLED, address], stdout=subprocess.PIPE)
    try:
        members.await_counts(a=2)
        assert process.stdout is not None
        assert process.stdout.readline() == b"assigned\n"
    finally:
        process.kill()
        process.communicate()
    members.await_counts(a=4)


# ---- without a client ----


def request(member: str, epoch: int, **fields: Any) -> dict[str, Any]:
    body = {
        "group_id": "g", "member_id": member, "member_epoch": epoch, "instance_id": None,
        "rack_id": None, "rebalance_timeout_ms": 5_000, "subscribed_topic_names": ["t"],
        "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": [],
    }  # fmt: skip
    return body | fields


def test_a_group_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = SETTINGS | {"group.consumer.session.timeout.ms": 60_000}
    path = tmp_path / "store"
    with logstore.open(path) as store:
        store.create_topic("t", 2)
        with KafkaServer(store, config=settings) as server, Peer(server.address) as peer:
            joined = peer.ask(68, 1, request("a", 0, server_assignor="range"))
            assert (joined["error_code"], joined["member_epoch"]) == (0, 2)
    with logstore.open(path, readonly=True) as store:
        described = Groups(store).describe("g")
        assert (described.state, described.generation, described.protocol) == ("Stable", 2, "range")
        assert [len(member.assignment) for member in described.members] == [2]
    with (
        logstore.open(path) as store,
        KafkaServer(store, config=settings) as server,
        Peer(server.address) as peer,
    ):
        again = peer.ask(68, 1, request("a", 2, topic_partitions=None))
        assert (again["error_code"], again["member_epoch"]) == (0, 2)
        assert GroupCoordinator.of(store).group_ids() == ["g"]


def test_members_of_a_process_and_of_the_consumer_protocol_do_not_mix(
    store: Store, server: KafkaServer
) -> None:
    with Peer(server.address) as peer:
        with Consumer(store, "t", group_id="g", auto_commit=False) as consumer:
            consumer.poll(timeout=0)
            assert peer.ask(68, 1, request("a", 0))["error_code"] == 69
            consumer.commit({("t", 0): 5})
        generation = Groups(store).describe("g").generation
        assert peer.ask(68, 1, request("a", 0, server_assignor="none"))["error_code"] == 112
        described = Groups(store).describe("g")
        assert (described.group_type, described.generation) == ("classic", generation)
        assert peer.ask(68, 1, request("a", 0))["error_code"] == 0
        assert Groups(store).committed("g")["t", 0].offset == 5
        with (
            Consumer(store, "t", group_id="g", auto_commit=False) as consumer,
            pytest.raises(RebalanceError),
        ):
            consumer.poll(timeout=1)
        Groups(store).remove_member("g", member_id="a")
        with Consumer(store, "t", group_id="g", auto_commit=False) as consumer:
            consumer.poll(timeout=0)
            described = Groups(store).describe("g")
            assert (described.group_type, len(described.members)) == ("classic", 1)
    assert Groups(store).committed("g")["t", 0].offset == 5


def test_the_listener_offers_the_feature(server: KafkaServer) -> None:
    with Peer(server.address) as peer:
        answer = peer.ask(18, 3, {"client_software_name": "peer", "client_software_version": "1"})
    finalized = {row["name"]: row["max_version_level"] for row in answer["finalized_features"]}
    assert finalized["group.version"] == 1


def test_a_write_that_fails_leaves_the_group_as_it_was(
    store: Store, server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Peer(server.address) as peer:
        assert peer.ask(68, 1, request("a", 0))["member_epoch"] == 2
        book = GroupCoordinator.of(store).book

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(book, "write_consumer_group", fail)
            assert peer.ask(68, 1, request("b", 0))["error_code"] != 0
        described = peer.ask(69, 1, {"group_ids": ["g"], "include_authorized_operations": False})
        [group] = described["groups"]
        assert (group["group_epoch"], len(group["members"])) == (2, 1)
        assert peer.ask(68, 1, request("b", 0))["member_epoch"] == 3


def test_a_session_that_ends_while_the_disk_fails_ends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with (
        logstore.open(tmp_path / "timed", durability="os", clock=clock) as store,
        KafkaServer(store, config=SETTINGS) as server,
        Peer(server.address) as peer,
    ):
        store.create_topic("t", 1)
        assert peer.ask(68, 1, request("a", 0))["member_epoch"] == 2
        groups = GroupCoordinator.of(store)

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(groups.book, "write_consumer_group", fail)
            clock.advance(1_100)
            groups.timers.run_due()
        assert len(Groups(store).describe("g").members) == 1
        clock.advance(1_100)
        groups.timers.run_due()
        assert Groups(store).describe("g").state == "Empty"


def test_offsets_of_topics_that_members_read_are_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    week = 8 * 86_400_000
    with (
        logstore.open(tmp_path / "timed", durability="os", clock=clock) as store,
        KafkaServer(store, config=SETTINGS) as server,
        Peer(server.address) as peer,
    ):
        groups = Groups(store)
        for topic in ("t", "other"):
            store.create_topic(topic, 1)
        groups.commit("g", {("t", 0): 0, ("other", 0): 0})
        peer.ask(68, 1, request("a", 0))
        assert groups.expire_offsets(clock.time_ms() + week) == {"g": [("other", 0)]}
        peer.ask(68, 1, request("a", -1))
        assert groups.expire_offsets(clock.time_ms() + week) == {"g": [("t", 0)]}
        assert "g" not in groups  # it has no members, and nothing is left of it
        assert OffsetBook.of(store).consumer_group("g") is None


def test_a_heartbeat_that_waited_for_a_deletion_is_refused(
    store: Store, server: KafkaServer
) -> None:
    groups = GroupCoordinator.of(store)
    with Peer(server.address) as peer:
        peer.ask(68, 1, request("a", 0))
        peer.ask(68, 1, request("a", -1))
        with groups.locked_room("g") as room:
            groups.delete_group("g")
            for act in (
                lambda: groups.consume(room, lambda machine, now: machine.rebalance()),
                lambda: room.check_commit("", -1, None, [], transactional=False, held=False),
            ):
                with pytest.raises(RebalanceError) as refused:
                    act()
                assert refused.value.code == "COORDINATOR_NOT_AVAILABLE"
        assert peer.ask(68, 1, request("a", 0))["member_epoch"] == 2
