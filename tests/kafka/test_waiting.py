"""Waiting and Syncs: fetches that wait for records, appends that wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from logstore import Partition, Store
from logstore.kafka import syncs as syncs_module
from logstore.kafka.syncs import Syncs
from logstore.kafka.waiting import FORGET_SECONDS, Waiting, Watch


class Timer:
    """A call that the test makes when its time has come."""

    def __init__(self, seconds: float, call: Callable[[], object]) -> None:
        self.seconds = seconds
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """Keeps timers, and is a LoopCalls as well: nothing happens until the test asks for it."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []
        self.calls: list[Callable[[], object]] = []

    def call_later(self, seconds: float, call: Callable[..., object], *given: Any) -> Timer:
        self.timers.append(Timer(seconds, lambda: call(*given)))
        return self.timers[-1]

    def put(self, call: Callable[[], object]) -> None:
        self.calls.append(call)

    def run(self) -> int:
        calls, self.calls = self.calls, []
        for call in calls:
            call()
        return len(calls)

    def pass_seconds(self, seconds: float) -> None:
        due = [timer for timer in self.timers if timer.seconds <= seconds]
        self.timers = [timer for timer in self.timers if timer not in due]
        for timer in due:
            if not timer.cancelled:
                timer.call()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def logs(store: Store) -> list[Partition]:
    topic = store.create_topic("t", partitions=2)
    return [topic[0], topic[1]]


@pytest.fixture
def waiting(loop: Loop) -> Waiting:
    return Waiting(loop, loop)  # type: ignore[arg-type]


def test_an_append_ends_the_wait_that_has_enough(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    ended: list[str] = []
    waiting.wait(logs, 5, lambda: logs[0].end_offset >= 2, lambda: ended.append("two"))
    waiting.wait(logs[1:], 5, lambda: bool(logs[1].end_offset), lambda: ended.append("b"))
    assert waiting.count == 2
    logs[0].append(b"x")
    assert loop.run() == 1
    assert ended == []
    logs[0].extend([b"x", b"y"])
    logs[0].append(b"z")
    assert len(loop.calls) == 1, "many appends are one wake-up"
    loop.run()
    assert ended == ["two"]
    logs[1].append(b"x")
    loop.run()
    assert ended == ["two", "b"]
    assert waiting.count == 0
    assert all(timer.cancelled for timer in loop.timers if timer.seconds == 5)


def test_records_that_came_before_the_wait_are_seen(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    ended: list[bool] = []
    waiting.wait(logs, 5, lambda: True, lambda: ended.append(True))
    assert ended == [True]
    assert waiting.count == 0


def test_the_time_is_up(waiting: Waiting, loop: Loop, logs: list[Partition]) -> None:
    ended: list[bool] = []
    waiting.wait(logs, 5, lambda: False, lambda: ended.append(True))
    loop.pass_seconds(4)
    assert ended == []
    loop.pass_seconds(5)
    assert ended == [True]
    logs[0].append(b"x")
    loop.run()
    assert ended == [True], "once"


def test_a_cancelled_wait_does_not_answer(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    ended: list[bool] = []
    wait = waiting.wait(logs, 5, lambda: bool(logs[0].end_offset), lambda: ended.append(True))
    waiting.cancel(wait)
    waiting.cancel(wait)
    logs[0].append(b"x")
    loop.run()
    loop.pass_seconds(5)
    assert ended == []
    assert waiting.count == 0


def test_a_partition_without_waits_is_forgotten_after_a_while(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    wait = waiting.wait(logs[:1], 5, lambda: False, lambda: None)
    waiting.cancel(wait)
    logs[0].append(b"x")
    assert loop.run() == 1, "the listener stays for the next fetch"
    loop.pass_seconds(FORGET_SECONDS)
    logs[0].append(b"x")
    assert loop.run() == 0


def test_a_fetch_that_fails_ends_alone(waiting: Waiting, loop: Loop, logs: list[Partition]) -> None:
    ended: list[str] = []

    def fails() -> bool:
        if logs[0].end_offset:
            raise OSError("cannot look")
        return False

    waiting.wait(logs, 5, fails, lambda: ended.append("failed"))
    waiting.wait(logs, 5, lambda: bool(logs[0].end_offset), lambda: ended.append("has records"))
    logs[0].append(b"x")
    loop.run()
    assert ended == ["failed", "has records"]


def test_a_wait_ends_once(waiting: Waiting, loop: Loop, logs: list[Partition]) -> None:
    ended: list[int] = []
    wait = waiting.wait(logs, 5, lambda: False, lambda: ended.append(1))
    waiting.end(wait)
    waiting.end(wait)
    waiting.end(None)
    loop.pass_seconds(5)
    assert ended == [1]
    assert waiting.count == 0


def test_many_short_waits_leave_one_timer(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    """A client that fetches 10,000 times a second must not leave a timer for each fetch."""
    for _ in range(100):
        waiting.wait(logs, 5, lambda: True, lambda: None)
    assert len([timer for timer in loop.timers if not timer.cancelled]) == 1
    loop.pass_seconds(FORGET_SECONDS)
    logs[0].append(b"x")
    assert loop.run() == 0
    waiting.cancel(waiting.wait(logs, 5, lambda: False, lambda: None))
    loop.pass_seconds(FORGET_SECONDS)
    logs[0].append(b"x")
    assert loop.run() == 0, "and is forgotten again"


def test_a_drain_ends_all_waits_and_those_that_follow(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    ended: list[int] = []
    for number in range(3):
        waiting.wait(logs, 5, lambda: False, lambda number=number: ended.append(number))
    waiting.end_all()
    assert ended == [0, 1, 2]
    waiting.wait(logs, 5, lambda: False, lambda: ended.append(3))
    assert ended == [0, 1, 2, 3]
    assert waiting.count == 0


# ---- Syncs ----


class Pool:
    """Keeps what is submitted until the test runs it."""

    made: ClassVar[list[Pool]] = []

    def __init__(self, *_: object) -> None:
        self.tasks: list[Callable[[], object]] = []
        Pool.made.append(self)

    def submit(self, call: Callable[..., object], *given: Any) -> None:
        self.tasks.append(lambda: call(*given))

    def shutdown(self, wait: bool) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    monkeypatch.setattr(syncs_module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(Pool, "made", [])
    return Pool.made


def test_appends_of_one_partition_share_an_fsync(
    loop: Loop, logs: list[Partition], pool: list[Pool]
) -> None:
    syncs = Syncs(loop)  # type: ignore[arg-type]
    done: list[tuple[str, BaseException | None]] = []
    for name in "abc":
        offset = logs[0].append(name.encode())
        syncs.add(
            logs[0],
            range(offset, offset + 1),
            lambda error, name=name: done.append((name, error)),
        )
    offset = logs[1].append(b"other")
    syncs.add(logs[1], range(offset, offset + 1), lambda error: done.append(("d", error)))
    assert len(pool[0].tasks) == 2, "one for each partition"
    for task in pool[0].tasks:
        task()
    assert done == [], "the loop's thread calls back"
    loop.run()
    assert done == [("a", None), ("b", None), ("c", None), ("d", None)]
    assert (syncs.count, syncs.appends) == (2, 4)
    assert logs[0].durable_offset == 3


def test_a_failed_fsync_fails_all_its_appends(
    loop: Loop, logs: list[Partition], pool: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError("no disk")

    def fails(_: range) -> None:
        raise error

    syncs = Syncs(loop)  # type: ignore[arg-type]
    got: list[BaseException | None] = []
    for number in range(2):
        logs[0].append(b"x")
        syncs.add(logs[0], range(number, number + 1), got.append)
    with monkeypatch.context() as patched:
        patched.setattr(
            type(logs[0].parts.appender), "make_durable", lambda _, offsets: fails(offsets)
        )
        pool[0].tasks.pop()()
    loop.run()
    assert got == [error, error]
    syncs.add(logs[0], range(1, 2), got.append)
    pool[0].tasks.pop()()
    loop.run()
    assert got[2] is None, "the next one is asked again"


def test_an_append_during_an_fsync_waits_for_the_next(
    loop: Loop, logs: list[Partition], pool: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(loop)  # type: ignore[arg-type]
    synced: list[range] = []
    done: list[int] = []

    def make_durable(_: object, offsets: range) -> None:
        synced.append(offsets)
        if len(synced) == 1:  # another request, while the first is synced
            syncs.add(logs[0], range(5, 6), lambda _: done.append(5))

    monkeypatch.setattr(type(logs[0].parts.appender), "make_durable", make_durable)
    syncs.add(logs[0], range(2), lambda _: done.append(0))
    pool[0].tasks.pop()()
    loop.run()
    assert synced == [range(2), range(5, 6)]
    assert done == [0, 5]
    assert not pool[0].tasks


# ---- Watch ----


def test_a_watch_notes_what_changed_and_asks_its_wait(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    watch, ended = Watch(), []
    for log in logs:
        waiting.watch(log, watch)
    watch.wait = waiting.wait((), 5, lambda: logs[1] in watch.changed, lambda: ended.append(1))
    logs[0].append(b"x")
    loop.run()
    assert (list(watch.changed), ended) == ([logs[0]], [])
    logs[1].append(b"x")
    waiting.wake()
    assert (list(watch.changed), ended) == (logs, [1])
    waiting.unwatch(logs[0], watch)
    logs[0].append(b"x")
    waiting.wake()
    assert list(watch.changed) == [logs[1]]


def test_many_partitions_are_forgotten_by_one_timer(
    waiting: Waiting, loop: Loop, logs: list[Partition]
) -> None:
    watch = Watch()
    waiting.watch(logs[1], watch)
    for _ in range(10):
        waiting.cancel(waiting.wait(logs, 5, lambda: False, lambda: None))
    assert sum(timer.seconds == FORGET_SECONDS for timer in loop.timers) == 1
    loop.pass_seconds(FORGET_SECONDS)
    loop.run()
    for log in logs:
        log.append(b"x")
    loop.run()
    assert list(watch.changed) == [logs[1]], "it is still watched"
    waiting.unwatch(logs[1], watch)
    loop.pass_seconds(FORGET_SECONDS)
    logs[1].append(b"x")
    assert loop.run() == 0
