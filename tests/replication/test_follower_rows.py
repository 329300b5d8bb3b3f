"""The rows of FollowerReplica and of Replica, one test or a few for each (F1 to F12)."""

from __future__ import annotations

from typing import Any

import pytest

from logstore.log.epochs import EpochEnd
from logstore.replication.machines.actions import (
    Action,
    Append,
    AskOffsets,
    BeginEpoch,
    Notify,
    Offline,
    RestartAt,
    Retry,
    SetHighWatermark,
    Sync,
    Trim,
    Truncate,
)
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.follower import Fetched, FollowerReplica, Offer
from logstore.replication.machines.image import Registration
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from logstore.replication.machines.replica import Replica
from logstore.testing.simulation.disk import SimulatedLog
from tests.replication.kit import KEY

VIEW = LeaderAndIsr(
    version=5, leader=1, leader_epoch=3, leader_broker_epoch=10, isr=(1, 2), min_isr=2
)
AR = Assignment((1, 2))


def following(*, end: int = 10, ack: int = 10, hw: int = 6, fsync: bool = True) -> FollowerReplica:
    follower = FollowerReplica(
        lambda ends: ends.end_offset, lambda: 2, start=0, end=end, ack=ack, hw=hw, fsync=fsync
    )
    follower.follow(VIEW)
    return follower


def asked(follower: FollowerReplica, token: int = 7) -> Offer:
    offer = follower.poll(token)
    assert offer is not None
    return offer


def test_f1_a_new_epoch_of_the_same_leader_forgets_the_fetch_under_way() -> None:
    follower = following()
    asked(follower)
    assert follower.follow(VIEW._replace(version=6, leader_epoch=4)) == []
    assert follower.fetched(7, Fetched(0, hw=9)) == []
    assert asked(follower, 8).leader_epoch == 4


def test_f1_a_new_version_of_the_same_epoch_forgets_nothing() -> None:
    follower = following()
    asked(follower)
    follower.follow(VIEW._replace(version=6, isr=(1,)))
    assert follower.fetched(7, Fetched(0, hw=9)) == [SetHighWatermark(9), Notify("hw")]


def test_f1_without_a_leader_it_waits() -> None:
    follower = following()
    follower.follow(VIEW._replace(version=6, leader=NO_LEADER, leader_epoch=4))
    assert follower.poll(8) is None


def test_f1_what_the_last_role_left_unsynced_is_synced_before_the_first_fetch() -> None:
    follower = FollowerReplica(lambda ends: 0, lambda: 2, start=0, end=10, ack=4, hw=4, fsync=True)
    assert follower.follow(VIEW) == [Sync(10)]
    assert follower.poll(7) is None
    follower.synced(10)
    assert asked(follower).offset == 10


def test_f2_the_fetch_offset_is_the_end_of_what_is_durable() -> None:
    assert asked(following()) == Offer(7, 1, 3, 10, 2, 0)


@pytest.mark.parametrize("token", [6, 8])
def test_f3_an_answer_to_another_question_changes_nothing(token: int) -> None:
    follower = following()
    asked(follower)
    for answer in (Fetched(0, 9, 0, None, b"raw"), Fetched(0, 9, 0, EpochEnd(1, 3)), Fetched(1)):
        assert follower.fetched(token, answer) == []
    assert follower.phase == "fetching"


def test_f3_records_are_appended_where_they_were_asked_for() -> None:
    follower = following()
    asked(follower)
    assert follower.fetched(7, Fetched(0, 12, 0, None, b"raw")) == [Append(b"raw", 10)]
    assert follower.fetched(7, Fetched(0, 12, 0, None, b"raw")) == []
    assert follower.poll(8) is None


def test_f4_a_diverging_answer_cuts_and_moves_no_watermark() -> None:
    follower = following()
    asked(follower)
    assert follower.fetched(7, Fetched(0, 10, 3, EpochEnd(1, 8))) == [Truncate(8)]
    assert (follower.hw, follower.start) == (6, 0)
    assert follower.truncated(8) == []
    assert follower.hw == 6
    assert asked(follower, 8).offset == 8


def test_f4_a_cut_is_asked_for_even_if_it_cuts_no_record() -> None:
    follower = following()
    asked(follower)
    assert follower.fetched(7, Fetched(0, 10, 3, EpochEnd(1, 12))) == [Truncate(10)]


def test_f4_committed_records_that_are_cut_are_counted() -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(0, 10, 3, EpochEnd(1, 4)))
    assert SetHighWatermark(4) in follower.truncated(4)
    assert follower.committed_cut == 2


def test_f5_errors() -> None:
    follower = following()
    offer = asked(follower)
    assert follower.fetched(7, Fetched(1)) == [AskOffsets(7, offer.leader, 3)]
    follower = following()
    asked(follower)
    assert follower.fetched(7, Fetched(74)) == []
    assert follower.phase == "idle"
    follower.follow(VIEW._replace(version=6, leader_epoch=4))
    assert follower.phase == "ready"
    for code in (6, 75, 3, 100, 2, 56):
        follower = following()
        asked(follower)
        assert follower.fetched(7, Fetched(code)) == [Retry(50)]
        assert follower.poll(8) is None
        follower.retry()
        assert follower.phase == "ready"


def test_f5_waits_double_up_to_the_backoff() -> None:
    follower = following()
    delays = []
    for token in range(8):
        asked(follower, token)
        (retry,) = follower.fetched(token, Fetched(6))
        assert isinstance(retry, Retry)
        delays.append(retry.delay_ms)
        follower.retry()
    assert delays == [50, 100, 200, 400, 800, 1000, 1000, 1000]


def test_f6_the_high_watermark_of_the_leader_is_shown_up_to_our_end_and_never_goes_down() -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(0, 20, 0, None, b"raw"))
    assert follower.appended(12) == [SetHighWatermark(12), Notify("hw"), Sync(12)]
    follower.synced(12)
    asked(follower, 8)
    assert follower.fetched(8, Fetched(0, 11)) == []
    assert follower.hw == 12


def test_f7_it_fetches_again_when_all_is_durable() -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(0, 10, 0, None, b"raw"))
    follower.appended(12)
    follower.synced(11)
    assert follower.poll(8) is None
    follower.synced(12)
    assert asked(follower, 8).offset == 12


@pytest.mark.parametrize(
    ("start", "end", "action"),
    [(15, 20, RestartAt(15)), (0, 8, Truncate(8)), (0, 20, Retry(50))],
)
def test_f8_out_of_range_asks_before_it_cuts(start: int, end: int, action: Action) -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(1))
    assert follower.offsets(6, 0, start, end) == []
    assert follower.offsets(7, 0, start, end) == [action]


def test_f8_a_restarted_log_moves_start_and_high_watermark() -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(1))
    follower.offsets(7, 0, 15, 20)
    assert SetHighWatermark(15) in follower.restarted(15)
    assert (follower.start, follower.end, follower.ack, follower.hw) == (15, 15, 15, 15)
    assert asked(follower, 8).offset == 15


def test_f9_the_leaders_start_is_followed_up_to_the_high_watermark() -> None:
    follower = following(hw=6)
    asked(follower)
    assert follower.fetched(7, Fetched(0, 6, 7)) == []
    asked(follower, 8)
    assert Trim(7) in follower.fetched(8, Fetched(0, 8, 7))


def test_f10_a_full_disk_waits_and_a_half_written_batch_ends_the_log() -> None:
    follower = following()
    asked(follower)
    follower.fetched(7, Fetched(0, 10, 0, None, b"raw"))
    assert follower.append_failed("full", written=False) == [Retry(50)]
    follower.retry()
    asked(follower, 8)
    follower.fetched(8, Fetched(0, 10, 0, None, b"raw"))
    assert follower.append_failed("torn", written=True) == [Offline("torn")]
    assert follower.follow(VIEW._replace(leader_epoch=9)) == []
    assert follower.poll(9) is None


def test_f11_three_invalid_answers_in_a_row_are_the_connections_fault() -> None:
    follower = following()
    for token in range(3):
        assert not follower.distrusts_connection
        asked(follower, token)
        follower.fetched(token, Fetched(0, 10, 0, None, b"raw"))
        assert isinstance(follower.append_failed("crc", written=False, invalid=True)[0], Retry)
        follower.retry()
    assert follower.distrusts_connection


def test_f11_a_log_that_ends_where_the_leaders_log_starts_inside_a_batch_begins_again() -> None:
    """The leader deleted all of its records, and knows no epoch in which the two differ."""
    follower = following(end=10)
    asked(follower)
    follower.fetched(7, Fetched(0, 12, 10, None, b"raw"))
    assert follower.append_failed("below", written=False, invalid=True) == [RestartAt(10)]


def test_f12_a_broken_connection_waits_and_asks_with_a_new_token() -> None:
    follower = following()
    asked(follower)
    assert follower.broken(6) == []
    assert follower.broken(7) == [Retry(50)]
    assert follower.fetched(7, Fetched(0, 9)) == []
    follower.retry()
    assert asked(follower, 8).token == 8


# ---- the role of a partition ----


def replica(me: int = 1, **log: Any) -> Replica:
    found = SimulatedLog("id")
    for name, value in log.items():
        setattr(found, name, value)
    nodes = {node: Registration(node, epoch=10) for node in (1, 2)}
    machine = Replica(KEY, me, found, nodes, hw=0, fsync=False)
    machine.broker_epoch = 10
    return machine


def test_a_node_leads_only_in_the_life_in_which_it_was_elected() -> None:
    machine = replica()
    machine.broker_epoch = 11
    machine.seen(VIEW, AR, 0, 0)
    assert machine.leader is None
    assert machine.follower is not None
    assert machine.follower.phase == "idle"
    elected = VIEW._replace(version=6, leader_epoch=4, leader_broker_epoch=11)
    assert BeginEpoch(4) in machine.seen(elected, AR, 0, 0)


def test_an_older_view_is_dropped() -> None:
    machine = replica()
    machine.seen(VIEW, AR, 0, 0)
    assert machine.seen(VIEW._replace(version=4, leader=2), AR, 0, 0) == []
    assert machine.leader is not None


def test_a_state_with_an_epoch_below_that_of_the_log_takes_the_partition_offline() -> None:
    machine = replica(promised_epoch=9)
    actions = machine.seen(VIEW, AR, 0, 0)
    assert isinstance(actions[0], Offline)
    assert "3" in actions[0].reason
    assert "9" in actions[0].reason


def test_a_lost_session_ends_both_roles_and_the_next_one_begins_again() -> None:
    machine = replica()
    machine.seen(VIEW, AR, 0, 0)
    assert Notify("role") in machine.session_lost()
    assert machine.leader is None
    machine.broker_epoch = 12
    elected = VIEW._replace(version=6, leader_epoch=4, leader_broker_epoch=12)
    machine.seen(elected, AR, 0, 0)
    assert machine.leader is not None


def test_a_log_that_failed_is_replaced_only_when_it_does_not_count() -> None:
    machine = replica(me=2)
    machine.seen(VIEW, AR, 0, 0)
    assert not machine.is_replaceable
    machine.fail("gone")
    assert not machine.is_replaceable
    machine.seen(VIEW._replace(version=6, isr=(1,), elr=(2,)), AR, 0, 0)
    assert not machine.is_replaceable
    machine.seen(VIEW._replace(version=7, isr=(1,), elr=(), leader=NO_LEADER), AR, 0, 0)
    assert not machine.is_replaceable
    machine.seen(VIEW._replace(version=8, isr=(1,), elr=()), AR, 0, 0)
    assert machine.is_replaceable


def test_a_replica_that_is_dropped_neither_leads_nor_fetches() -> None:
    machine = replica(me=2)
    machine.seen(VIEW, AR, 0, 0)
    assert machine.follower is not None
    assert machine.follower.phase == "ready"
    machine.leave()
    assert machine.follower.poll(1) is None
