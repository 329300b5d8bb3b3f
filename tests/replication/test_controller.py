"""Controller: how a node becomes the controller, and how its writes are conditional."""

from __future__ import annotations

from typing import Any

from logstore.replication.machines.controller import Controller, Decided
from logstore.replication.machines.image import (
    CONTROLLER,
    CONTROLLER_EPOCH,
    REASSIGN,
    ClusterImage,
    broker_path,
    epoch_path,
    topic_path,
)
from logstore.replication.metadata import Check, Committed, Create, Delete, Refused, Set, Unknown
from tests.replication.kit import KEY
from tests.replication.test_decisions import image, state


def ours(found: ClusterImage, me: int = 1, incarnation: str = "a") -> ClusterImage:
    found.controller = {"brokerid": me, "logstore": {"incarnation": incarnation}}
    return found


def controlling(found: ClusterImage, epoch: int = 1) -> Controller:
    controller = Controller(1, "a")
    found.controller = None
    commit = controller.campaign(found, 0)
    assert commit is not None
    ours(found)
    found.controller_epoch, found.controller_epoch_version = epoch, epoch
    controller.campaigned(Committed((0, epoch)), found)
    assert controller.active
    return controller


def test_a_campaign_creates_the_path_and_raises_the_epoch_in_one_commit() -> None:
    found = image(state())
    found.controller_epoch, found.controller_epoch_version = 6, 3
    commit = Controller(1, "a").campaign(found, 0)
    assert commit is not None
    create, raised = commit.ops
    assert isinstance(create, Create)
    assert (create.path, create.ephemeral) == (CONTROLLER, True)
    assert raised == Set(CONTROLLER_EPOCH, b"7", 3)


def test_there_is_no_campaign_while_a_controller_exists() -> None:
    assert Controller(1, "a").campaign(ours(image(state()), me=2), 0) is None


def test_a_lost_answer_is_settled_by_the_tree() -> None:
    for me, won in ((1, True), (2, False)):
        found = image(state())
        controller = Controller(1, "a")
        controller.campaign(found, 0)
        ours(found, me)
        found.controller_epoch, found.controller_epoch_version = 1, 0
        controller.campaigned(Unknown(), found)
        assert controller.active is won


def test_an_earlier_life_of_this_node_is_another_controller() -> None:
    controller = Controller(1, "b")
    assert controller.campaign(ours(image(state())), 0) is None
    assert not controller.active


def test_every_write_checks_the_controller_epoch_first() -> None:
    found = image(state(), live=(2, 3), lossy={3})
    found.preferred = ({"partitions": []}, 4)
    controller = controlling(found, epoch=5)
    commits = controller.step(found)
    assert {commit.tag.subject for commit in commits} >= {KEY}  # type: ignore[attr-defined]
    assert all(commit.ops[0] == Check(CONTROLLER_EPOCH, 5) for commit in commits)


def test_a_refused_epoch_check_ends_the_controllership() -> None:
    found = image(state(), live=(2, 3))
    controller = controlling(found)
    (commit,) = controller.step(found)
    controller.decided(commit.tag, Refused(0, "version"), found)
    assert not controller.active
    assert controller.campaign(found, 0) is None  # /controller still names us: it is old


def test_an_outcome_of_an_earlier_time_as_the_controller_does_not_end_this_one() -> None:
    """A late refusal ended the second time, and left the cluster without a controller."""
    found = image(state(), live=(2, 3))
    controller = controlling(found, epoch=1)
    (late,) = controller.step(found)
    ours(found, me=2)
    controller.touched(None, found)
    assert not controller.active
    found.controller = None
    assert controller.campaign(found, 0) is not None
    ours(found)
    found.controller_epoch, found.controller_epoch_version = 2, 2
    controller.campaigned(Committed((0, 2)), found)
    (again,) = controller.step(found)
    controller.decided(late.tag, Refused(0, "version"), found)
    assert controller.active
    controller.decided(again.tag, Refused(0, "version"), found)
    assert not controller.active


def test_a_partition_is_decided_again_after_every_other_outcome() -> None:
    found = image(state(), live=(2, 3))
    controller = controlling(found)
    for outcome in (Unknown(), Refused(1, "version")):
        (commit,) = controller.step(found)
        assert controller.step(found) == []  # one write of a partition at a time
        controller.decided(commit.tag, outcome, found)


def test_a_controller_path_that_was_deleted_by_hand_moves_the_controllership() -> None:
    found = image(state())
    controller = controlling(found)
    found.controller = None
    controller.touched((), found)
    assert not controller.active
    assert controller.campaign(found, 0) is not None


def test_the_lossy_mark_is_cleared_after_every_partition_and_only_of_this_life() -> None:
    found = image(state(), lossy={3})
    controller = controlling(found)
    (commit,) = controller.step(found)
    assert commit.tag == Decided(KEY, "nodes [3] may miss committed records", 1)
    found.states[KEY] = state((1, 2))
    controller.decided(commit.tag, Committed((0, 0, 9)), found)
    (cleared,) = controller.step(found)
    assert cleared.ops[1] == Check(epoch_path(3), 1)
    written = cleared.ops[2]
    assert isinstance(written, Set)
    assert (written.path, written.version) == (broker_path(3), 0)
    assert b'"lossy":false' in written.data


def test_a_request_is_deleted_when_its_last_move_is_done() -> None:
    found = image(state(), wanted=[1, 2, 3])
    assert found.reassign is not None
    controller = controlling(found)
    (commit,) = controller.step(found)
    assert commit.ops[1] == Delete(REASSIGN, 0)


def test_two_moves_of_one_topic_wait_for_each_other() -> None:
    found = image(state(), wanted=[2, 3])
    topic = found.topics["t"]
    found.topics["t"] = topic.with_assignment(1, topic.partitions[0])
    found.states["t", 1] = state()
    rows: list[dict[str, Any]] = [
        {"topic": "t", "partition": number, "replicas": [2, 3]} for number in (0, 1)
    ]
    found.reassign = ({"partitions": rows}, 0)
    controller = controlling(found)
    commits = controller.step(found)
    written = [op.path for commit in commits for op in commit.ops if isinstance(op, Set)]
    assert written.count(topic_path("t")) == 1
