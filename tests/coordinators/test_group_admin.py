"""Groups seen from outside: committing without a consumer, describing, deleting, resetting."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    CommittedOffset,
    ConfigError,
    Groups,
    ReadOnlyError,
    RebalanceError,
    Record,
    Store,
    UnknownTopicError,
)
from logstore.clock import ManualClock
from logstore.coordinators.group_coordinator import GroupCoordinator
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_records import TopicPartition

START = 1_700_000_000_000


@pytest.fixture
def orders(make_store: Callable[..., Store]) -> Store:
    """Two partitions of ten records, one a minute; the first is trimmed to 2."""
    store = make_store(clock=ManualClock(START + 600_000))
    topic = store.create_topic("orders", partitions=2)
    for log in topic:
        log.extend([Record(b"%d" % n, timestamp=START + n * 60_000) for n in range(10)])
    topic[0].trim(2)
    return store


def join(store: Store, group: str) -> str:
    """A member that holds the group open; its id."""
    ids: list[str] = []
    GroupCoordinator.of(store).join(
        group,
        lambda reply: ids.append(reply.member_id),
        member_id="", instance_id=None, client_id="test", session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000, protocols=[("range", b"\x00\x00\x00\x00\x00\x01\x00\x06orders"
                                                 b"\xff\xff\xff\xff")], nudge=lambda: None,
    )  # fmt: skip
    return ids[0]


def test_offsets_are_committed_without_a_consumer(
    orders: Store, make_store: Callable[..., Store]
) -> None:
    groups = Groups(orders)
    assert groups.names() == [] and "nightly" not in groups
    assert groups.describe("nightly").state == "Dead"
    groups.commit("nightly", {("orders", 0): 4, ("orders", 1): CommittedOffset(5, "mine", 3)})
    groups.commit("nightly", {("orders", 0): 6}, metadata="run 7")
    assert list(groups) == ["nightly"] and "nightly" in groups
    assert groups.describe("nightly").state == "Empty"
    orders.close()
    store = make_store()
    found = Groups(store).committed("nightly")
    assert {tp: (c.offset, c.metadata) for tp, c in found.items()} == {
        ("orders", 0): (6, "run 7"),
        ("orders", 1): (5, "mine"),
    }


def test_what_does_not_exist_cannot_be_committed(orders: Store) -> None:
    groups = Groups(orders)
    with pytest.raises(UnknownTopicError, match="did you mean 'orders'"):
        groups.commit("g", {("order", 0): 1})
    with pytest.raises(IndexError, match="no partition 7"):
        groups.commit("g", {("orders", 0): 1, ("orders", 7): 1})
    with pytest.raises(ValueError, match="a group has a name"):
        groups.commit("", {("orders", 0): 1})
    assert groups.names() == []


def test_a_group_with_members_is_changed_by_its_members_only(orders: Store) -> None:
    groups = Groups(orders)
    groups.commit("g", {("orders", 0): 4})
    member = join(orders, "g")
    for refused in (
        lambda: groups.commit("g", {("orders", 0): 1}),
        lambda: groups.reset_offsets("g", to="earliest"),
        lambda: groups.delete("g"),
        lambda: groups.delete_offsets("g", [("orders", 0)]),
    ):
        with pytest.raises(RebalanceError, match=r"'g'.*first"):
            refused()
    assert groups.reset_offsets("g", to="earliest", dry_run=True)[0].after == 2
    assert groups.committed("g")[TopicPartition("orders", 0)].offset == 4
    with pytest.raises(RebalanceError, match="no member 'x'"):
        groups.remove_member("g", member_id="x")
    groups.remove_member("g", member_id=member, reason="by hand")
    assert (
        "by hand" in groups.history("g")[-2].reason or "by hand" in groups.history("g")[-1].reason
    )
    groups.delete_offsets("g", [("orders", 0)])
    assert groups.committed("g") == {}
    groups.delete("g")
    assert groups.names() == [] and groups.describe("g").state == "Dead"


ALL = [("orders", 0), ("orders", 1)]


@pytest.mark.parametrize(
    ("how", "after"),
    [
        ({"to": "earliest"}, [2, 0]),
        ({"to": "latest"}, [10, 10]),
        ({"to": "current"}, [4, 10]),
        ({"offset": 1}, [2, 1]),
        ({"offset": 99}, [10, 10]),
        ({"at": START + 180_000}, [3, 3]),
        ({"at": datetime.datetime.fromtimestamp((START + 1) / 1000, datetime.UTC)}, [2, 1]),
        ({"ago": datetime.timedelta(minutes=5)}, [5, 5]),
        ({"ago": 240.0}, [6, 6]),
        ({"ago": 0}, [10, 10]),
    ],
)
def test_the_ways_to_reset(orders: Store, how: dict[str, object], after: list[int]) -> None:
    groups = Groups(orders)
    groups.commit("g", {("orders", 0): 4})
    planned = groups.reset_offsets("g", ["orders"], **how, dry_run=True)  # type: ignore[arg-type]
    assert [each.after for each in planned] == after
    assert [each.before for each in planned] == [4, None]
    assert [(each.start, each.end) for each in planned] == [(2, 10), (0, 10)]
    assert len(groups.committed("g")) == 1
    assert groups.reset_offsets("g", ALL, **how) == planned  # type: ignore[arg-type]
    assert [groups.committed("g")[TopicPartition(*tp)].offset for tp in ALL] == after


@pytest.mark.parametrize(("by", "after"), [(3, 7), (-1, 3), (-100, 2), (100, 10)])
def test_shifting_stays_in_the_log(orders: Store, by: int, after: int) -> None:
    groups = Groups(orders)
    groups.commit("g", {("orders", 0): 4})
    (reset,) = groups.reset_offsets("g", shift=by)
    assert reset.after == groups.committed("g")[TopicPartition("orders", 0)].offset == after
    with pytest.raises(ConfigError, match="orders-1 has no committed offset"):
        groups.reset_offsets("g", "orders", shift=1)


def test_offsets_come_from_a_file(orders: Store, tmp_path: Path) -> None:
    groups = Groups(orders)
    plan = tmp_path / "plan.csv"
    plan.write_text('"orders",0,5\n\norders,1,7\n')
    assert [each.after for each in groups.reset_offsets("g", file=plan)] == [5, 7]
    plan.write_text("orders,0,5\norders,1\n")
    with pytest.raises(ConfigError, match="line 2"):
        groups.reset_offsets("g", file=plan)
    assert groups.committed("g")[TopicPartition("orders", 1)].offset == 7


def test_exactly_one_way_to_reset_is_given(orders: Store) -> None:
    groups = Groups(orders)
    with pytest.raises(ConfigError, match="not none"):
        groups.reset_offsets("g")
    with pytest.raises(ConfigError, match="not to and shift"):
        groups.reset_offsets("g", to="latest", shift=1)
    with pytest.raises(ConfigError, match="'middle'"):
        groups.reset_offsets("g", to="middle")


def test_lag_of_a_group_is_exact(orders: Store) -> None:
    groups = Groups(orders)
    groups.commit("g", {("orders", 0): 4, ("orders", 1): 10})
    behind, done = groups.lag("g").values()
    assert behind.records == 6 and behind.bytes > 0
    assert behind.seconds == 360.0  # the record at offset 4 is that old
    assert (done.records, done.bytes, done.seconds, done.catch_up_seconds) == (0, 0, 0.0, 0.0)


def test_offsets_expire_when_nobody_commits_for_a_week(orders: Store) -> None:
    clock = orders.clock
    assert isinstance(clock, ManualClock)
    groups = Groups(orders)
    groups.commit("old", {("orders", 0): 4})
    clock.advance(4 * 86_400_000)
    groups.commit("young", {("orders", 0): 4})
    groups.commit("old", {("orders", 1): 4})
    assert groups.expire_offsets() == {}
    clock.advance(3 * 86_400_000)
    assert groups.expire_offsets() == {"old": [("orders", 0)]}
    assert groups.names() == ["old", "young"]
    clock.advance(4 * 86_400_000)
    assert groups.expire_offsets() == {"old": [("orders", 1)], "young": [("orders", 0)]}
    assert groups.names() == []


def test_a_readonly_store_is_asked_and_not_changed(tmp_path: Path, orders: Store) -> None:
    Groups(orders).commit("g", {("orders", 0): 4})
    with logstore.open(orders.path, readonly=True) as reader:
        groups = Groups(reader)
        assert groups.names() == ["g"]
        assert groups.committed("g")[TopicPartition("orders", 0)].offset == 4
        assert groups.describe("g").state == "Empty"
        assert groups.describe("other").state == "Dead"
        assert groups.lag("g")[TopicPartition("orders", 0)].records == 6
        with pytest.raises(ReadOnlyError):
            groups.commit("g", {("orders", 0): 5})


@pytest.mark.parametrize(
    ("offsets", "error"),
    [
        ({("orders", -1): 1}, ValueError),
        ({("orders", True): 1}, TypeError),
        ({("orders", 0, 0): 1}, TypeError),
        ({"orders": 1}, TypeError),
        ({("orders", 0): None}, TypeError),
        ({("orders", 0): CommittedOffset(1, "\ud800")}, ConfigError),
        ({("orders", 0): CommittedOffset(1, None)}, TypeError),  # type: ignore[arg-type]
        (None, TypeError),
        ([("orders", 0)], TypeError),
    ],
)
def test_what_are_no_offsets_is_refused(
    orders: Store, offsets: Any, error: type[Exception]
) -> None:
    groups = Groups(orders)
    with pytest.raises(error):
        groups.commit("g", offsets)
    assert groups.names() == []


@pytest.mark.parametrize(
    ("name", "error"),
    [(None, TypeError), (b"g", TypeError), ("x" * 32_768, ConfigError), ("\ud800", ConfigError)],
)
def test_what_is_no_name_is_refused(orders: Store, name: Any, error: type[Exception]) -> None:
    groups = Groups(orders)
    for ask in (groups.describe, groups.history, groups.lag, groups.committed, groups.delete):
        with pytest.raises(error, match="a group's name"):
            ask(name)
    with pytest.raises(error, match="a group's name"):
        groups.commit(name, {("orders", 0): 1})
    with pytest.raises(error, match="a group's name"):
        OffsetBook.of(orders).commit_in_transaction(
            name, {("orders", 0): 1}, producer_id=1, producer_epoch=0
        )
    assert groups.names() == []


def test_a_span_that_is_none_is_refused(orders: Store) -> None:
    groups = Groups(orders)
    groups.commit("g", {("orders", 0): 4})
    for ago in (float("nan"), float("inf"), 1e300):
        with pytest.raises(ConfigError, match="ago is"):
            groups.reset_offsets("g", ago=ago)
    with pytest.raises(TypeError, match="ago is"):
        groups.reset_offsets("g", ago="1h")  # type: ignore[arg-type]
    assert groups.reset_offsets("g", ago=datetime.timedelta.max)[0].after == 2


def test_a_reset_of_a_group_that_does_not_exist_is_refused(store: Store) -> None:
    store.create_topic("orders")
    with pytest.raises(RebalanceError, match="no such group") as refused:
        Groups(store).reset_offsets("unknown", to="earliest")
    assert refused.value.code == "GROUP_ID_NOT_FOUND"
    (reset,) = Groups(store).reset_offsets("unknown", ["orders"], to="earliest")
    assert reset.after == 0
