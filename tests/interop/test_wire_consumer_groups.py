"""Groups of the consumer protocol (KIP-848): a real broker as the judge, and as the successor.

The broker has online migration disabled, as the listener has, and assigns without a pause.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore.kafka.server import KafkaServer

from .kafka import Broker, require_kafka
from .wire import Side, Walk, commit, differences, join

pytestmark = pytest.mark.interop

LISTENER = {
    "group.consumer.session.timeout.ms": 30_000,
    "group.consumer.heartbeat.interval.ms": 1_000,
    "group.consumer.max.size": 5,
    "group.consumer.assignment.interval.ms": 0,
}
BROKER = LISTENER | {
    "group.consumer.migration.policy": "disabled",
    "group.consumer.min.session.timeout.ms": 6_000,
    "group.consumer.min.heartbeat.interval.ms": 1_000,
    "group.consumer.min.assignment.interval.ms": 0,
    "offsets.topic.num.partitions": 50,
}
A, B, C = (str(uuid.UUID(int=number)) for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def no_file_stays_open() -> None:
    """Replace the check of each test: the store of the module opens files until its last test."""


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    require_kafka()
    broker = Broker(tmp_path_factory.mktemp("broker"), BROKER)
    broker.start()
    try:
        host, _, port = broker.bootstrap.partition(":")
        with (
            logstore.open(tmp_path_factory.mktemp("store"), durability="os") as store,
            KafkaServer(store, config=LISTENER) as server,
        ):
            both = Side((host, int(port))), Side(server.address)
            for side in both:
                side.await_coordinators()
            yield both
    finally:
        broker.kill()


class Members:
    """The heartbeats of members of one group, on one side."""

    def __init__(self, walk: Walk, group: str, topic: str = "four", partitions: int = 4) -> None:
        self.walk, self.group, self.topic = walk, group, topic
        self.id = walk.topic(topic, partitions)
        self.epochs: dict[str, int] = {}
        self.owned: dict[str, list[dict[str, Any]]] = {}

    def beat(self, member: str, epoch: int | None = None, *, version: int = 1, quiet: bool = False,
             **fields: Any) -> dict[str, Any]:  # fmt: skip
        """Send a heartbeat.  The answer is compared, except which partitions it names."""
        epoch = self.epochs.get(member, 0) if epoch is None else epoch
        body: dict[str, Any] = {
            "group_id": self.group, "member_id": member, "member_epoch": epoch,
            "instance_id": None, "rack_id": None, "rebalance_timeout_ms": -1,
            "subscribed_topic_names": None, "subscribed_topic_regex": None,
            "server_assignor": None, "topic_partitions": None,
        }  # fmt: skip
        if epoch == 0:
            body |= {"rebalance_timeout_ms": 5_000, "subscribed_topic_names": [self.topic]}
            body |= {"topic_partitions": []}
        answer = self.walk.quietly(68, version, body | fields)
        if answer["error_code"] == 0:
            self.epochs[member] = answer["member_epoch"]
            if answer["assignment"] is not None:
                self.owned[member] = answer["assignment"]["topic_partitions"]
        if not quiet:
            self.walk.note(f"{member[-1:]} {epoch} {sorted(fields)}", _counted(answer))
        return answer

    def report(self, member: str, **more: Any) -> dict[str, Any]:
        """Send a heartbeat with the partitions that the member owns."""
        return self.beat(member, topic_partitions=self.owned[member], **more)

    def owns(self, member: str) -> list[int]:
        return sorted(n for row in self.owned[member] for n in row["partitions"])

    def await_owned(self, wanted: int, *members: str) -> None:
        """Send quiet reports until the members own this many partitions together."""
        deadline = time.monotonic() + 20
        while sum(len(self.owns(member)) for member in members) != wanted:
            assert time.monotonic() < deadline, self.owned
            for member in members:
                self.report(member, quiet=True)
            time.sleep(0.05)

    def describe(self, version: int = 1) -> None:
        asked = {"group_ids": [self.group], "include_authorized_operations": False}
        group = self.walk.quietly(69, version, asked)["groups"][0]
        for name in ("assignment", "target_assignment"):
            each = [member.pop(name)["topic_partitions"] for member in group["members"]]
            group[name] = sorted(
                [row["topic_name"], len(row["partitions"])] for rows in each for row in rows
            )
        self.walk.note("describe", group)

    def commit(self, member: str, epoch: int, *numbers: int, version: int = 9) -> None:
        body = commit(self.group, self.topic, 7)
        body |= {"member_id": member, "generation_id_or_member_epoch": epoch}
        [row] = body["topics"]
        row["partitions"] = [row["partitions"][0] | {"partition_index": n} for n in numbers]
        self.walk.ask(8, version, body, name=f"commit {member[-1:]} {epoch}")

    def fetch(self, member: str | None, epoch: int) -> None:
        asked = {"group_id": self.group, "member_id": member, "member_epoch": epoch}
        topics = [{"name": self.topic, "partition_indexes": [0]}]
        self.walk.ask(9, 9, {"groups": [asked | {"topics": topics}], "require_stable": False})


def _counted(answer: dict[str, Any]) -> dict[str, Any]:
    """Which of the free partitions a member gets is not compared; how many are."""
    given = answer["assignment"]
    if given is None:
        return answer
    return answer | {"assignment": sum(len(r["partitions"]) for r in given["topic_partitions"])}


def compare(sides: tuple[Side, Side], walk: Callable[[Walk], object]) -> None:
    with Walk(sides[0]) as kafka, Walk(sides[1]) as ours:
        walk(kafka)
        walk(ours)
        found = list(differences(kafka, ours))
    assert not found, "\n" + "\n".join(found)


def test_requests_that_are_refused(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "refused")
        for epoch in (3, -1, -3):
            group.beat(A, epoch)
        group.beat(A, -2)
        group.beat(A, -2, instance_id="i")
        group.beat("", 0)
        for wrong in (
            {"rebalance_timeout_ms": -1}, {"topic_partitions": None}, {"instance_id": ""},
            {"subscribed_topic_names": None}, {"rack_id": ""}, {"server_assignor": "nope"},
            {"subscribed_topic_names": None, "subscribed_topic_regex": "("}, {"group_id": ""},
        ):  # fmt: skip
            group.beat(A, 0, **wrong)
        group.describe()

    compare(sides, walk)


def test_two_members_share_and_one_leaves(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "two")
        group.beat(A, 0)
        group.beat(A, 0)
        group.beat(A)
        group.beat(A, 1)
        group.beat(A, 9)
        group.beat(B, 1)
        group.beat(B, 0)
        group.describe()
        group.beat(B)
        group.beat(A)
        group.describe(0)
        group.beat(A)
        group.report(A)
        group.beat(B)
        group.describe()
        group.report(B)
        group.beat(A, 2, topic_partitions=group.owned[A])
        group.beat(A, rebalance_timeout_ms=5_000, subscribed_topic_names=["four"],
                   topic_partitions=group.owned[A])  # fmt: skip
        group.beat(B, -1)
        group.describe()
        group.report(A)
        group.beat(B, -1)
        group.beat(A, subscribed_topic_names=["none"])
        group.beat(A, topic_partitions=[])
        group.describe()
        group.beat(A, -1)
        group.describe()
        group.beat(C, 0, server_assignor="range")
        group.describe()

    compare(sides, walk)


def test_static_members(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "static")
        group.beat(A, 0, instance_id="i")
        group.beat(A, 0, instance_id="i")
        group.beat(B, 0, instance_id="i")
        group.beat(B, 2, instance_id="i")
        group.beat(A, instance_id="j")
        group.beat(A)
        group.beat(A, -2, instance_id="i")
        group.describe()
        group.beat(A, 2, instance_id="i")
        group.beat(B, 0, instance_id="i")
        group.describe()
        group.beat(A, 2, instance_id="i")
        group.beat(B, -2, instance_id="i")
        group.beat(C, 0, instance_id="i", subscribed_topic_names=["none"])
        group.describe()
        group.beat(C, -1, instance_id="i")
        group.beat(C, -1, instance_id="i")
        group.describe()

    compare(sides, walk)


def test_offsets_and_member_epochs(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "offsets")
        group.beat(A, 0)
        for member, epoch in ((A, 2), (A, 1), (A, 3), ("", -1), (B, 2), (A, -1)):
            group.commit(member, epoch, 0)
            group.fetch(member, epoch)
        group.commit(A, 2, 0, version=8)
        group.fetch(None, -1)
        group.beat(B, 0)
        group.beat(A)
        group.report(A)
        group.beat(B)
        mine, theirs = group.owns(A)[0], group.owns(B)[0]
        group.walk.note("epochs", {"epochs": sorted(group.epochs.items())})
        for epoch, numbers in ((2, [mine]), (2, [theirs]), (2, [mine, theirs]), (3, [theirs])):
            walk.quietly(8, 9, commit("warm", "four", 1))
            body = commit("offsets", "four", 7)
            body |= {"member_id": A, "generation_id_or_member_epoch": epoch}
            [row] = body["topics"]
            row["partitions"] = [row["partitions"][0] | {"partition_index": n} for n in numbers]
            rows = walk.quietly(8, 9, body)["topics"][0]["partitions"]
            walk.note(f"commit {epoch}", {"codes": [each["error_code"] for each in rows]})
        asked = {"name": "four", "partitions": [{"partition_index": 0}]}
        walk.ask(47, 0, {"group_id": "offsets", "topics": [asked]})
        walk.ask(42, 2, {"groups_names": ["offsets"]})
        for member in (A, B):
            group.beat(member, -1)
        group.commit("", -1, 0)
        group.commit(A, 3, 0)
        walk.ask(42, 2, {"groups_names": ["offsets"]})
        group.describe()
        group.beat(A, 0)
        group.fetch(A, 2)

    compare(sides, walk)


def test_a_group_has_one_protocol_and_changes_it_when_empty(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "mixed")
        walk.quietly(8, 8, commit("mixed", "four", 3))
        group.describe()
        group.beat(A, 0)
        walk.ask(11, 5, join("mixed", "four"))
        walk.ask(12, 4, {"group_id": "mixed", "generation_id": 2, "member_id": A})
        for version in (5, 6):
            walk.ask(15, version, {"groups": ["mixed"]})
        listed = {"states_filter": ["stable"], "types_filter": ["Consumer"]}
        walk.ask(16, 5, listed, only=lambda row: row["group_id"] == "mixed")
        group.fetch(A, 2)
        one = [{"member_id": A, "group_instance_id": None}]
        walk.ask(13, 4, {"group_id": "mixed", "members": one})
        group.describe()
        member, generation = walk.joined("mixed", "four")
        walk.note("joined", {"generation": generation})
        group.describe()
        group.beat(A, 0)
        group.beat(A, 2)
        one = [{"member_id": member, "group_instance_id": None}]
        walk.quietly(13, 4, {"group_id": "mixed", "members": one})
        group.beat(A, 0)
        group.describe()
        group.fetch(A, 2)

    compare(sides, walk)


def test_a_group_is_full(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "full")
        for number in range(6):
            group.beat(str(uuid.UUID(int=number + 10)), 0)
        group.describe()

    compare(sides, walk)


def test_partitions_and_topics_that_appear_and_vanish(sides: tuple[Side, Side]) -> None:
    def walk(walk: Walk) -> None:
        group = Members(walk, "topics", "growing", 2)
        group.beat(A, 0)
        group.beat(B, 0)
        group.await_owned(2, A, B)
        more = {"name": "growing", "count": 5, "assignments": None}
        walk.quietly(37, 3, {"topics": [more], "timeout_ms": 9_000, "validate_only": False})
        group.await_owned(5, A, B)
        group.describe()
        group.beat(A, subscribed_topic_names=[], subscribed_topic_regex="grow.*", quiet=True)
        group.await_owned(5, A, B)
        walk.topic("growing.too", 3)
        group.await_owned(8, A, B)
        walk.quietly(20, 4, {"topic_names": ["growing"], "timeout_ms": 9_000})
        group.await_owned(3, A, B)
        walk.note("all of the other topic", {"owned": [len(group.owns(A)), len(group.owns(B))]})

    compare(sides, walk)


def test_a_broker_and_the_listener_take_over_each_others_groups(tmp_path: Path) -> None:
    """The members keep their ids, epochs and partitions; each change of sides begins an epoch."""
    require_kafka()
    broker = Broker(tmp_path, BROKER)
    epochs: dict[str, int] = {}
    owned: dict[str, list[dict[str, Any]]] = {}

    def continue_on(address: tuple[str, int], *, first: bool = False) -> None:
        side = Side(address)
        side.await_coordinators()
        with Walk(side) as walk:
            group = Members(walk, "moves")
            group.epochs.update(epochs)
            group.owned.update(owned)
            held = {member: group.owns(member) for member in owned}
            if first:
                group.beat(A, 0)
                group.beat(B, 0, instance_id="i")
                group.await_owned(4, A, B)
            else:
                fetched = walk.quietly(9, 8, {"groups": [{"group_id": "moves", "topics": None}]})
                [topic] = fetched["groups"][0]["topics"]
                assert [row["committed_offset"] for row in topic["partitions"]] == [7]
            for _ in range(3):
                for member in (A, B):
                    answer = group.report(member)
                    assert answer["error_code"] == 0, answer
            if not first:
                assert {member: group.owns(member) for member in owned} == held
                assert set(group.epochs.values()) == {max(epochs.values()) + 1}
            group.commit(A, group.epochs[A], group.owns(A)[0])
            assert not any(
                row["error_code"]
                for topic in walk.steps[-1].answer["topics"]
                for row in topic["partitions"]
            )
            epochs.update(group.epochs)
            owned.update(group.owned)

    def on_broker(*, first: bool = False) -> None:
        with broker:
            host, _, port = broker.bootstrap.partition(":")
            continue_on((host, int(port)), first=first)

    def on_listener() -> None:
        with (
            logstore.open(broker.log_dir) as store,
            KafkaServer(store, config=LISTENER) as server,
        ):
            continue_on(server.address)

    on_broker(first=True)
    on_listener()
    on_broker()
    on_listener()
