"""The rows of LeaderReplica, one test or a few for each (L1 to L18)."""

from __future__ import annotations

import pytest

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.actions import (
    Answer,
    BeginEpoch,
    Notify,
    Offline,
    Retry,
    SetHighWatermark,
    Sync,
)
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.image import broker_path, epoch_path, state_path, topic_path
from logstore.replication.metadata import Check, Commit, Committed, Refused, Set, Unknown
from tests.replication.kit import KEY, Leading


def commits(actions: list[object]) -> list[Commit]:
    return [action for action in actions if isinstance(action, Commit)]


def test_begin_notes_the_epoch_first_and_syncs_what_the_last_role_left() -> None:
    leading = Leading(end=10, fsync=True)
    assert leading.begun[0] == BeginEpoch(3)
    assert Notify("role") in leading.begun
    leading = Leading(end=10, fsync=True)
    leading.machine.ack = 4
    assert Sync(10) in leading.machine.begin(now=0)


def test_l1_acks_all_is_refused_while_the_in_sync_set_is_too_small() -> None:
    leading = Leading(isr=(1,))
    assert leading.machine.admit(-1) == 19
    assert leading.machine.admit(1) == 0
    assert Leading().machine.admit(-1) == 0


def test_l2_a_batch_waits_for_its_followers_and_a_duplicate_waits_like_the_first() -> None:
    leading = Leading(end=10, hw=10)
    first = leading.machine.appended("a", 11, -1, now=0)
    again = leading.machine.appended("b", 11, -1, now=0)
    assert not any(isinstance(action, Answer) for action in first + again)
    leading.fetch(2, 11)
    _, actions = leading.fetch(3, 11)
    assert [a for a in actions if isinstance(a, Answer)] == [Answer("a", 0), Answer("b", 0)]


def test_l2_acks_0_is_answered_at_once_and_acks_1_after_the_sync() -> None:
    leading = Leading(fsync=True)
    assert Answer("a", 0) in leading.machine.appended("a", 11, 0, now=0)
    actions = leading.machine.appended("b", 12, 1, now=0)
    assert Sync(12) in actions
    assert Answer("b", 0) not in actions
    assert Answer("b", 0) in leading.machine.synced(12, now=0)


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"epoch": 2}, 74),
        ({"epoch": 4}, 75),
        ({"node": 4, "broker_epoch": 40}, 75),
        ({"broker_epoch": 19}, 6),
        ({"offset": 11}, 1),
    ],
)
def test_l5_fetches_are_fenced(asked: dict[str, int], code: int) -> None:
    leading = Leading()
    verdict, actions = leading.fetch(**{"node": 2, "offset": 10, **asked})
    assert (verdict.code, actions) == (code, [])
    assert leading.machine.progress_of(2).end == -1  # type: ignore[union-attr]


def test_l5_a_diverging_fetch_counts_nothing() -> None:
    leading = Leading()
    verdict, actions = leading.fetch(2, 8, last_epoch=0)
    assert verdict.diverging == EpochEnd(0, 4)
    assert actions == []
    assert leading.machine.progress_of(2).end == -1  # type: ignore[union-attr]


def test_l5_below_the_start_is_out_of_range() -> None:
    leading = Leading()
    assert leading.machine.trimmed(5) == [Notify("start")]
    assert leading.fetch(2, 4)[0].code == 1


def test_l6_a_fetch_that_waited_counts_nothing() -> None:
    leading = Leading()
    leading.fetch(2, 9, now=1)
    leading.machine.judge_fetch(2, 20, 3, 10, -1)
    assert leading.machine.progress_of(2).end == 9  # type: ignore[union-attr]


def test_l7_a_follower_joins_with_the_write_first_and_three_checks() -> None:
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    _, actions = leading.fetch(3, 10)
    (commit,) = commits(actions)
    first, *checks = commit.ops
    assert isinstance(first, Set)
    assert (first.path, first.version) == (state_path(KEY), 5)
    assert checks == [
        Check(topic_path("t"), 7),
        Check(epoch_path(3), 30),
        Check(broker_path(3), 0),
    ]


@pytest.mark.parametrize(
    ("offset", "flags", "hw"),
    [
        (9, {}, 9),  # below the start of the epoch
        (10, {"lossy": True}, 9),
        (10, {"unwilling": True}, 9),
        (10, {"offline": frozenset([KEY])}, 9),
        (10, {"epoch": 31}, 9),
    ],
)
def test_l7_nobody_joins_who_may_miss_records(
    offset: int, flags: dict[str, object], hw: int
) -> None:
    leading = Leading(isr=(1, 2), hw=hw)
    leading.nodes[3] = leading.nodes[3]._replace(**flags)  # type: ignore[arg-type]
    _, actions = leading.fetch(3, offset, broker_epoch=30)
    assert commits(actions) == []


def test_l7_one_proposal_at_a_time() -> None:
    leading = Leading(isr=(1,), min_isr=1)
    assert len(commits(leading.fetch(2, 10)[1])) == 1
    assert commits(leading.fetch(3, 10)[1]) == []


def test_l8_a_late_member_is_proposed_to_leave_and_counts_until_then() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11, now=1500)
    (commit,) = commits(leading.machine.tick(1500))
    assert isinstance(commit.ops[0], Set)
    assert b'"isr":[1,2]' in commit.ops[0].data
    assert leading.machine.hw == 10
    assert leading.machine.maximal_isr == {1, 2, 3}


def test_l8_a_follower_at_the_end_is_never_late() -> None:
    leading = Leading()
    for node in (2, 3):
        leading.fetch(node, 10, now=0)
    assert leading.machine.tick(1_000_000) == []


def test_a_leader_is_deserted_if_no_member_in_sync_has_fetched_lately() -> None:
    leading = Leading()
    lag = leading.machine.lag_ms
    assert leading.machine.is_deserted(0)  # nobody has fetched in this epoch
    leading.fetch(2, 10, now=100)
    assert not leading.machine.is_deserted(100 + lag)
    assert leading.machine.is_deserted(101 + lag)
    leading.fetch(3, 10, now=200)
    assert not leading.machine.is_deserted(101 + lag)
    assert not Leading(isr=(1,), min_isr=1).machine.is_deserted(1_000_000)  # nobody else is in sync


def test_l9_an_applied_write_counts_only_when_its_state_is_seen() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11, now=1500)
    (commit,) = commits(leading.machine.tick(1500))
    assert leading.machine.altered(commit.tag, Committed((6,)), 1500) == []
    assert leading.machine.is_changing
    view = leading.machine.view.without([3])._replace(version=6)
    actions = leading.machine.seen(view, Assignment((1, 2, 3)), 7, 1500)
    assert SetHighWatermark(11) in actions
    assert Answer("a", 0) in actions
    assert not leading.machine.is_changing


def test_l9_a_conflict_keeps_the_proposal_until_a_newer_state() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11, now=1500)
    (commit,) = commits(leading.machine.tick(1500))
    assert leading.machine.altered(commit.tag, Refused(0, "version"), 1500) == []
    assert leading.machine.is_changing


def test_l10_a_failed_check_ends_the_proposal() -> None:
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    (commit,) = commits(leading.fetch(3, 10)[1])
    leading.machine.altered(commit.tag, Refused(2, "version"), 0)
    assert not leading.machine.is_changing


def test_a_lost_answer_is_asked_for_again_with_the_same_write() -> None:
    leading = Leading(isr=(1, 2))
    leading.fetch(2, 10)
    (commit,) = commits(leading.fetch(3, 10)[1])
    assert isinstance(leading.machine.altered(commit.tag, Unknown(), 0)[0], Retry)
    assert leading.machine.is_changing
    assert leading.machine.retry(0) == [commit]


def test_l11_an_older_state_changes_nothing() -> None:
    leading = Leading()
    older = leading.machine.view._replace(version=4, isr=(1,))
    leading.machine.seen(older, Assignment((1, 2, 3)), 7, 0)
    assert leading.machine.view.isr == (1, 2, 3)


def test_l11_a_member_counts_although_its_assignment_is_gone_until_the_state_is_seen() -> None:
    """The tree changes both in one write; a mirror may show the assignment first."""
    leading = Leading(isr=(1, 3))
    leading.machine.appended("a", 11, -1, now=0)
    actions = leading.machine.seen(leading.machine.view, Assignment((1, 2)), 8, 0)
    assert SetHighWatermark(11) not in actions
    assert leading.machine.hw == 10


def test_l11_progress_is_kept_for_replicas_that_are_added() -> None:
    leading = Leading()
    leading.machine.seen(leading.machine.view, Assignment((1, 2, 3, 4), (4,)), 8, 0)
    leading.nodes[4] = leading.nodes[3]._replace(id=4, epoch=40)
    assert leading.fetch(4, 10)[0].code == 0


def test_l12_the_end_of_an_epoch_leaves_every_wait_indeterminate() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    assert Answer("a", 20) in leading.machine.resign()
    assert Notify("role") in leading.machine.resign()


def test_l13_a_failed_log_leaves_every_wait_indeterminate() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    assert leading.machine.failed("gone") == [Answer("a", 20), Offline("gone")]


def test_l14_a_time_out_answers_once() -> None:
    leading = Leading()
    leading.machine.appended("a", 11, -1, now=0)
    assert leading.machine.timed_out("a") == [Answer("a", 7)]
    assert leading.machine.timed_out("a") == []
    leading.fetch(2, 11)
    assert Answer("a", 0) not in leading.fetch(3, 11)[1]


def test_l17_the_end_is_not_known_before_the_epoch_is_settled() -> None:
    leading = Leading(end=10, hw=6)
    assert not leading.machine.is_settled
    leading.fetch(2, 10)
    leading.fetch(3, 10)
    assert leading.machine.is_settled


def test_l18_the_low_watermark_is_the_least_start_of_the_live_replicas() -> None:
    leading = Leading()
    leading.machine.trimmed(6)
    assert leading.machine.low_watermark() == -1
    for node in (2, 3):
        leading.machine.follower_fetch(node, node * 10, 3, 10, -1, 5 + node % 2, 0)
    assert leading.machine.low_watermark() == 5
    del leading.nodes[2]
    assert leading.machine.low_watermark() == 6


def test_advance_waits_for_a_follower_out_of_the_set_that_was_caught_up_lately() -> None:
    """Without this it could never join while records are appended all the time."""
    leading = Leading(isr=(1, 2), end=10, hw=10)
    leading.nodes[3] = leading.nodes[3]._replace(unwilling=True)
    leading.fetch(3, 10, now=0)
    leading.machine.appended("a", 11, -1, now=0)
    leading.fetch(2, 11, now=10)
    assert leading.machine.hw == 11  # it cannot join, so it does not count
    leading.nodes[3] = leading.nodes[3]._replace(unwilling=False)
    leading.machine.appended("b", 12, -1, now=20)
    leading.fetch(2, 12, now=30)
    assert leading.machine.hw == 11
    leading.fetch(3, 12, now=40)
    assert leading.machine.hw == 12


def test_a_restart_of_the_leader_is_not_in_the_way_of_steady_appends() -> None:
    """Caught up at the last fetch: it has now what was the end then."""
    leading = Leading()
    end = 10
    for turn in range(1, 50):
        for node in (2, 3):
            leading.fetch(node, end, now=turn * 400)
        end += 1
        leading.machine.appended(turn, end, -1, now=turn * 400 + 1)
        assert leading.machine.tick(turn * 400 + 399) == []
