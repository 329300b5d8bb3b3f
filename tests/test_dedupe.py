"""A record that is sent with an id is sent once: within the window, over crashes, by anyone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import logstore
from logstore import (
    ConcurrentTransactionsError,
    ConfigError,
    ManualClock,
    Position,
    Producer,
    Store,
)
from logstore.transactions.dedupe import HEADER

WINDOW_MS, COUNT = 1_000, 4


def values(store: Store, topic: str = "t") -> list[bytes | None]:
    return [record.value for log in store[topic] for record in log]


def test_the_same_id_is_answered_with_the_first_place(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t", partitions=3)
        store.create_topic("other")
        with Producer(store) as one, Producer(store) as two:
            first = one.append("t", b"v", dedupe_id="order-7", headers=[("h", b"x")])
            assert one.append("t", b"again", dedupe_id="order-7") == first
            assert two.append("t", b"again", key=b"elsewhere", dedupe_id=b"order-7") == first
            told: list[Position] = []
            pending = one.send("t", b"w", dedupe_id="order-8")
            repeat = two.send("t", b"w", dedupe_id="order-8",
                              callback=lambda d: told.append(d.result(0)))  # fmt: skip
            assert repeat.result(60) == pending.result(60) == told[0]
            assert one.append("other", b"v", dedupe_id="order-7").topic == "other"
        record = store["t"][first.partition][first.offset]
        assert record.headers == (("h", b"x"), (HEADER, b"order-7"))
    assert len(values_after(tmp_path)) == 2
    with logstore.open(tmp_path) as store, Producer(store) as producer:
        assert producer.append("t", b"after", dedupe_id="order-7") == first


def values_after(path: Path) -> list[bytes | None]:
    with logstore.open(path, readonly=True) as store:
        return values(store)


def test_bad_ids_and_other_windows_are_refused(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t")
        with Producer(store) as producer, Producer(store, dedupe_window=5) as other:
            for wrong in ("", b"", 7):
                with pytest.raises(TypeError, match="dedupe id"):
                    producer.append("t", b"v", dedupe_id=wrong)  # type: ignore[arg-type]
            producer.append("t", b"v", dedupe_id="a")
            with pytest.raises(ConfigError, match=r"is 120\.0 s and 100000 ids"):
                other.send("t", b"v", dedupe_id="a")
        with pytest.raises(ConfigError):
            Producer(store, dedupe_records=0)


def test_an_id_whose_record_failed_may_be_sent_again(tmp_path: Path, monkeypatch: Any) -> None:
    with logstore.open(tmp_path) as store:
        log = store.create_topic("t")[0]
        real = type(log).write_produced
        broken = True

        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            if broken:
                raise logstore.InvalidRecordError("no")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(type(log), "write_produced", write)
        with Producer(store, linger=600.0) as producer:
            with pytest.raises(logstore.InvalidRecordError):
                producer.append("t", b"v", dedupe_id="a")
            with pytest.raises(logstore.InvalidRecordError):
                producer.flush()
            broken = False
            assert producer.append("t", b"v", dedupe_id="a").offset == 0


def test_what_was_aborted_was_not_sent(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        store.create_topic("t")
        with Producer(store, "x") as producer, Producer(store) as other:
            tx = producer.transaction()
            place = tx.append("t", b"1")
            sent = tx.send("t", b"2", dedupe_id="a")
            assert tx.send("t", b"3", dedupe_id="a").result(60) == sent.result(60)
            assert place.offset == 0
            with pytest.raises(ConcurrentTransactionsError, match="ask again"):
                other.send("t", b"4", dedupe_id="a")
            tx.abort()
            first = other.append("t", b"5", dedupe_id="a")
            with producer.transaction() as tx:
                kept = tx.send("t", b"6", dedupe_id="b")
            assert other.append("t", b"7", dedupe_id="b") == kept.result(0)
            with producer.transaction() as tx:
                tx.append("t", b"8", dedupe_id="c")
                tx.abort()
        before = len(values(store))
    with logstore.open(tmp_path, durability="os") as store, Producer(store) as other:
        assert other.append("t", b"x", dedupe_id="a") == first
        assert other.append("t", b"x", dedupe_id="b") == kept.result(0)
        assert len(values(store)) == before
        assert other.append("t", b"9", dedupe_id="c").offset > first.offset


class DedupeMachine(RuleBasedStateMachine):
    """The window against a list of all that was ever sent, over closes and kills."""

    @initialize()
    def open_first(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.sent: list[list[tuple[bytes, int, Position]]] = [[], []]  # by partition, in order
        self.count = 0
        self.open()
        self.store.create_topic("t", partitions=2)

    def open(self) -> None:
        self.store = logstore.open(self.path, durability="os", clock=self.clock)
        self.producer = Producer(
            self.store, linger=600.0, dedupe_window=WINDOW_MS / 1000, dedupe_records=COUNT
        )

    def expected(self, name: bytes) -> Position | None:
        """The newest record of an id, if it is within the window."""
        found = None
        for sent in self.sent:
            for each, timestamp, position in sent[-COUNT:]:
                if each == name and timestamp >= self.clock.now_ms - WINDOW_MS:
                    found = position
        return found

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]), number=st.integers(0, 1),
          wait=st.booleans(), age=st.sampled_from([None, 0, 500, 2_000]))  # fmt: skip
    def send(self, name: bytes, number: int, wait: bool, age: int | None) -> None:
        expected = self.expected(name)
        timestamp = None if age is None else self.clock.now_ms - age
        delivery = self.producer.send("t", b"%d" % self.count, partition=number, dedupe_id=name,
                                      timestamp=timestamp)  # fmt: skip
        if expected is not None:
            assert delivery.result(60) == expected
            return
        position = Position("t", number, len(self.sent[number]))
        stamp = self.clock.now_ms if timestamp is None else timestamp
        self.sent[number].append((name, stamp, position))
        self.count += 1
        if wait:
            assert delivery.result(60) == position

    @rule(ms=st.integers(1, 700))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule()
    def close(self) -> None:
        self.producer.close()
        self.store.close()
        self.open()

    @precondition(lambda self: self.count)
    @rule()
    def kill(self) -> None:
        self.producer.flush()
        self.store._companions.clear()
        self.store._closed = True
        self.store._drop()
        self.open()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.producer.close()
            found = [log.end_offset for log in self.store["t"]]
            self.store.close()
            shutil.rmtree(self.path)
            assert found == [len(sent) for sent in self.sent]


DedupeMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TestDedupe = DedupeMachine.TestCase
