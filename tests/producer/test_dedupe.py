"""A record with an id is appended once: within the window, after crashes, by any producer."""

from __future__ import annotations

import shutil
import tempfile
import weakref
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
    FencedError,
    ManualClock,
    Position,
    Producer,
    Transactions,
)
from logstore.format.batch import BatchHeader
from logstore.partition.appender import Appender
from logstore.partition.scan import Scan
from logstore.producer.dedupe import HEADER
from tests.kit import kill, topic_values, wait_until_freed

WINDOW_MS, COUNT = 1_000, 4


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
        return topic_values(store, "t")


def test_bad_ids_and_other_windows_are_refused(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t")
        with Producer(store) as producer, Producer(store, dedupe_window=5) as other:
            for wrong in ("", b"", 7):
                with pytest.raises(TypeError, match="dedupe id"):
                    producer.append("t", b"v", dedupe_id=wrong)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="dedupe id has to be Unicode text"):
                producer.append("t", b"v", dedupe_id="\ud800")
            producer.append("t", b"v", dedupe_id="a")
            with pytest.raises(ConfigError, match=r"is 120\.0 s and 100000 ids"):
                other.send("t", b"v", dedupe_id="a")
        with pytest.raises(ConfigError):
            Producer(store, dedupe_records=0)


def test_an_id_whose_record_failed_may_be_sent_again(tmp_path: Path, monkeypatch: Any) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t")
        real = Appender.write_produced
        broken = True

        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            if broken:
                raise logstore.InvalidRecordError("no")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Appender, "write_produced", write)
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
        before = len(topic_values(store, "t"))
    with logstore.open(tmp_path, durability="os") as store, Producer(store) as other:
        assert other.append("t", b"x", dedupe_id="a") == first
        assert other.append("t", b"x", dedupe_id="b") == kept.result(0)
        assert len(topic_values(store, "t")) == before
        assert other.append("t", b"9", dedupe_id="c").offset > first.offset


def test_an_id_whose_record_was_truncated_may_be_sent_again(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        log = store.create_topic("t")[0]
        with Producer(store) as producer, Producer(store, "x") as other:
            kept = producer.append("t", b"kept", dedupe_id="kept")
            producer.append("t", b"gone", dedupe_id="a")
            with other.transaction() as tx:
                tx.append("t", b"gone", dedupe_id="b")
        log.truncate(1)
        with Producer(store) as producer:
            producer.append("t", b"new")
            again = producer.append("t", b"again", dedupe_id="a")
            assert again.offset == 2
            assert producer.append("t", b"again", dedupe_id="b").offset == 3
            assert producer.append("t", b"again", dedupe_id="a") == again
            assert producer.append("t", b"again", dedupe_id="kept") == kept
        log.truncate(0)
        with Producer(store) as producer:
            assert producer.append("t", b"first", dedupe_id="kept").offset == 0
        assert topic_values(store, "t") == [b"first"]


def test_a_truncation_while_the_window_is_loaded_loads_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with logstore.open(tmp_path) as store, Producer(store) as producer:
        store.create_topic("t")
        for number in range(4):
            producer.append("t", b"%d" % number, dedupe_id=f"id-{number}")
            store["t"][0].roll()
    with logstore.open(tmp_path) as store, Producer(store) as producer:
        log = store["t"][0]
        cuts = [1]

        class Truncating:
            @staticmethod
            def parse(raw: bytes) -> BatchHeader:
                header = BatchHeader.parse(raw)
                if header.base_offset == 2 and cuts:
                    log.truncate(cuts.pop())
                return header

        monkeypatch.setattr("logstore.producer.dedupe.BatchHeader", Truncating)
        assert producer.append("t", b"3 again", dedupe_id="id-3").offset == 1
        assert producer.append("t", b"0 again", dedupe_id="id-0").offset == 0
        assert topic_values(store, "t") == [b"0", b"3 again"]
        assert not cuts


def test_a_record_whose_commit_was_truncated_does_not_count(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        log = store.create_topic("t")[0]
        with Producer(store, "x") as producer, Producer(store) as other:
            with producer.transaction() as tx:
                first = tx.append("t", b"1", dedupe_id="a")
            with producer.transaction() as tx:
                tx.append("t", b"2")
            assert other.append("t", b"3", dedupe_id="a") == first
            log.truncate(1)  # the record stays, its marker is truncated
            assert other.append("t", b"4", dedupe_id="a") != first


def test_what_was_deleted_may_be_sent_again_and_what_stays_may_not(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        log = store.create_topic("t")[0]
        with Producer(store) as producer:
            for name in ("a", "b"):
                producer.append("t", b"v", dedupe_id=name)
            log.trim(1)
            assert producer.append("t", b"v", dedupe_id="b").offset == 1
            assert producer.append("t", b"v", dedupe_id="a").offset == 2


@pytest.mark.parametrize("scans", [1, 2, 3])
@pytest.mark.parametrize("how", ["trim", "truncate"])
def test_records_that_are_deleted_while_the_window_is_read_do_not_count(
    tmp_path: Path, monkeypatch: Any, how: str, scans: int
) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        store.create_topic("t")
        with Producer(store) as producer:
            for name in ("a", "b", "c"):
                producer.append("t", name.encode(), dedupe_id=name)
    with logstore.open(tmp_path, durability="os") as store, Producer(store) as producer:
        log = store["t"][0]
        scan, left = log.scan, [scans]

        def change_before(*args: Any, **options: Any) -> Scan:
            left[0] -= 1
            if not left[0]:
                log.trim(2) if how == "trim" else log.truncate(1)
            return scan(*args, **options)

        monkeypatch.setattr(log, "scan", change_before)
        kept, gone = ("c", "a") if how == "trim" else ("a", "c")
        assert producer.append("t", b"v", dedupe_id=kept).offset == (2 if how == "trim" else 0)
        assert producer.append("t", b"v", dedupe_id=gone).offset == (3 if how == "trim" else 1)


@pytest.mark.parametrize("how", ["fenced", "timed out", "unwritten"])
def test_the_id_of_a_transaction_that_another_ended_may_be_sent_again(
    tmp_path: Path, how: str
) -> None:
    clock = ManualClock()
    with logstore.open(tmp_path, durability="os", clock=clock) as store:
        store.create_topic("t")
        old = Producer(store, "x", transaction_timeout=5, linger=600.0)
        tx = old.transaction()
        if how == "unwritten":
            tx.send("t", b"old", dedupe_id="a")
        else:
            tx.append("t", b"old", dedupe_id="a")
        with Producer(store) as plain, pytest.raises(ConcurrentTransactionsError):
            plain.append("t", b"other", dedupe_id="a")
        if how == "timed out":
            clock.advance(5_001)
            Transactions.of(store).run_due()
        with Producer(store, "x") as new:
            with new.transaction() as again:
                place = again.append("t", b"new", dedupe_id="a")
            with new.transaction() as again:
                assert again.append("t", b"newer", dedupe_id="a") == place
        with pytest.raises(FencedError):
            tx.commit()
        old.close()
        found = [r.value for r in store["t"][0].scan(isolation="read_committed")]
        assert found == [b"new"]


def test_a_closed_producer_that_used_an_id_is_freed(tmp_path: Path) -> None:
    with logstore.open(tmp_path, durability="os") as store:
        store.create_topic("t")
        plain, named = Producer(store), Producer(store, "x")
        kept = plain.send("t", b"v", dedupe_id="a")
        plain.flush()
        with named.transaction() as tx:
            tx.append("t", b"v", dedupe_id="b")
        plain.close()
        named.close()
        gone = [weakref.ref(plain), weakref.ref(named)]
        del plain, named, tx
        wait_until_freed(*gone)
        assert (kept.topic, kept.partition, kept.result(0).offset) == ("t", 0, 0)


def test_the_window_counts_by_the_time_of_appending(tmp_path: Path) -> None:
    clock = ManualClock()
    with logstore.open(tmp_path, durability="os", clock=clock) as store:
        store.create_topic("t")
        old = clock.now_ms - 3_600_000
        with Producer(store) as producer:
            first = producer.append("t", b"m", dedupe_id="job-1", timestamp=old)
            late = producer.append("t", b"m", dedupe_id="job-2", timestamp=clock.now_ms + 3_000_000)
            assert producer.append("t", b"m", dedupe_id="job-1", timestamp=old) == first
    for advance, known in ((60_000, True), (60_000, True), (1, False)):
        clock.advance(advance)
        store = logstore.open(tmp_path, durability="os", clock=clock)
        with store, Producer(store) as producer:
            for name, place in (("job-1", first), ("job-2", late)):
                again = producer.append("t", b"m", dedupe_id=name, timestamp=old)
                assert (again == place) == known


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
            for each, appended, position in sent[-COUNT:]:
                if each == name and appended >= self.clock.now_ms - WINDOW_MS:
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
        self.sent[number].append((name, self.clock.now_ms, position))
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
        kill(self.store)
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
