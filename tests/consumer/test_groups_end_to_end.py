"""Producers and groups in threads, with members that join, leave and crash; the history is checked.

Eight producers write; three groups of four members read, commit and change hands.  Nothing here
depends on speed: members end after so many polls, and the test ends when every group
has committed everything.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

import logstore
from logstore import Consumer, Groups, Producer, RebalanceError, Store, TopicPartition
from logstore.testing.history import assert_clean
from logstore.testing.operations import (
    Assign,
    Commit,
    Poll,
    Recorder,
    Send,
    Snapshot,
    reads_of,
)
from tests.kit import wait_until

PRODUCERS, GROUPS, MEMBERS, PARTITIONS, LIVES = 8, 3, 4, 8, 4
DEADLINE = 600.0  # far beyond any machine: only a hang gets there


def produce(store: Store, recorder: Recorder, number: int, count: int) -> None:
    name = f"producer-{number}"
    chance = random.Random(number)
    with Producer(store) as producer:
        for first in range(0, count, 100):
            wanted = [
                (chance.randrange(PARTITIONS), b"%d/%d" % (number, n))
                for n in range(first, min(first + 100, count))
            ]
            wanted.sort(key=lambda each: each[0])
            pending = recorder.invoke(name)
            futures = [producer.send("t", value, partition=p) for p, value in wanted]
            producer.flush()
            for (p, value), future in zip(wanted, futures, strict=True):
                pending.add(Send(("t", p), value, future.result().offset))
            pending.ok()


class Member:
    """One place in a group, taken by one consumer after the other."""

    def __init__(self, store: Store, recorder: Recorder, group: str, number: int, polls: int,
                 over: threading.Event) -> None:  # fmt: skip
        self.store, self.recorder, self.group, self.polls = store, recorder, group, polls
        self.over = over
        self.chance = random.Random(f"{group}/{number}")
        self.name = f"{group}/{number}"
        self.error: BaseException | None = None
        self.seen: set[tuple[int, int]] = set()

    def run(self) -> None:
        try:
            for life in range(LIVES):
                self.live(f"{self.name}.{life}", last=life == LIVES - 1)
        except BaseException as error:  # noqa: BLE001  the test raises it
            self.error = error

    def live(self, name: str, *, last: bool) -> None:
        consumer = Consumer(
            self.store, "t", group_id=self.group, client_id=name, auto_commit=False, timeout=0.05,
            session_timeout=3.0, heartbeat_interval=0.3,
        )  # fmt: skip
        held: tuple[int, frozenset[TopicPartition]] = (-1, frozenset())
        polls = self.chance.randint(1, self.polls)
        while not self.over.is_set() and (last or polls > 0):
            polls -= 1
            records = consumer.poll(max_records=self.chance.randint(1, 400))
            now = (consumer.generation, frozenset(consumer.assignment()))
            if now != held:
                self.recorder.done(name, Assign(
                    name, frozenset(map(tuple, now[1])), self.group,
                    None if now[0] < 0 else now[0], frozenset(map(tuple, now[1] & held[1])),
                ))  # fmt: skip
                held = now
            if not records:
                continue
            self.recorder.done(name, Poll(name, reads_of(records)))
            self.seen.update((record.partition, record.offset) for record in records)
            if last or self.chance.random() < 0.5:
                self.commit(consumer, name)
        if last or self.chance.random() < 0.5:
            self.commit(consumer, name)
            consumer.close()
        # Otherwise it crashes: the consumer is dropped without close().

    def commit(self, consumer: Consumer, name: str) -> None:
        positions = consumer.positions()
        pending = self.recorder.invoke(
            name, Commit(self.group, tuple((tuple(tp), at) for tp, at in positions.items()), name)
        )
        try:
            consumer.commit(positions)
        except RebalanceError:
            pending.fail()
        else:
            pending.ok()


def run_all(path: Path, count: int, polls: int) -> None:
    recorder, over = Recorder(), threading.Event()
    with logstore.open(path, durability="os") as store:
        store.create_topic("t", partitions=PARTITIONS)
        members = [
            Member(store, recorder, f"g{g}", m, polls, over)
            for g in range(GROUPS)
            for m in range(MEMBERS)
        ]
        threads = [threading.Thread(target=member.run) for member in members]
        threads += [
            threading.Thread(target=produce, args=(store, recorder, n, count))
            for n in range(PRODUCERS)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads[len(members) :]:
                thread.join(DEADLINE)
            ends = {TopicPartition("t", log.number): log.end_offset for log in store["t"]}
            assert sum(ends.values()) == PRODUCERS * count
            wait_until(lambda: all(
                {tp: c.offset for tp, c in Groups(store).committed(f"g{g}").items()} == ends
                for g in range(GROUPS)
            ) or any(member.error for member in members), patience=DEADLINE)  # fmt: skip
        finally:
            over.set()
            for thread in threads:
                thread.join(DEADLINE)
        for member in members:
            if member.error is not None:
                raise member.error
        for log in store["t"]:
            recorder.done("checker", Snapshot(("t", log.number), reads_of(log.scan())))
        for g in range(GROUPS):
            description = Groups(store).describe(f"g{g}")
            assert all(change.reason for change in description.history)
            assert description.generation > 1  # they did come and go
            seen = set().union(*(m.seen for m in members if m.group == f"g{g}"))
            assert len(seen) == PRODUCERS * count
    assert_clean(recorder.history(), caught_up=True)


def test_groups_lose_nothing_while_members_come_go_and_crash(tmp_path: Path) -> None:
    run_all(tmp_path / "s", count=2_500, polls=12)


@pytest.mark.slow
def test_groups_lose_nothing_of_a_million_records(tmp_path: Path) -> None:
    run_all(tmp_path / "s", count=125_000, polls=60)
