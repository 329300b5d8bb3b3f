"""Committed offsets in Kafka's own topic: the bytes, the replay, transactions, topics that go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import logstore
from logstore import Compactor, InvalidRecordError, Maintenance, Store
from logstore.clock import ManualClock
from logstore.coordinators.consumer_group.records import ConsumerGroupKey
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.coordinators.offset_book import OffsetBook
from logstore.coordinators.offset_ledger import Ledger
from logstore.coordinators.offset_records import (
    CommittedOffset,
    GroupKey,
    GroupMetadata,
    MemberMetadata,
    OffsetKey,
    TopicPartition,
    parse_key,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


# ---- the bytes ----


def test_keys_and_values_are_kafkas() -> None:
    assert OffsetKey("g", "t", 3).encode().hex() == "000100016700017400000003"
    value = CommittedOffset(42, "", 5, 1000).encode()
    assert value.hex() == "0003000000000000002a00000005000000000000000003e8"
    assert GroupKey("g").encode().hex() == "0002000167"
    assert parse_key(OffsetKey("g", "t", 3).encode()) == OffsetKey("g", "t", 3)
    assert parse_key(GroupKey("g").encode()) == GroupKey("g")
    assert parse_key(b"\x00\x05\x00\x01g\x00\x01m") == ConsumerGroupKey(5, "g", "m")
    assert parse_key(b"\x00\x09\x00\x01g\x00\x01m") is None  # of a share group


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("0000000000000000002a0001610000000000000005", CommittedOffset(42, "a", -1, 5)),
        (
            "0001000000000000002a00016100000000000000050000000000000009",
            CommittedOffset(42, "a", -1, 5, 9),
        ),
        ("0002000000000000002a0001610000000000000005", CommittedOffset(42, "a", -1, 5)),
        ("0003000000000000002a000000070001610000000000000005", CommittedOffset(42, "a", 7, 5)),
        ("0004000000000000002a000000070261000000000000000500", CommittedOffset(42, "a", 7, 5)),
    ],
)
def test_every_version_of_an_offset_is_read(raw: str, wanted: CommittedOffset) -> None:
    assert CommittedOffset.decode(bytes.fromhex(raw)) == wanted


def test_one_with_an_expiry_is_written_as_kafka_writes_it() -> None:
    committed = CommittedOffset(42, "a", -1, 5, 9)
    assert committed.encode()[:2] == b"\x00\x01"
    assert CommittedOffset.decode(committed.encode()) == committed


def test_a_group_comes_back_with_its_members() -> None:
    member = MemberMetadata("m-1", "i", "c", "/127.0.0.1", 1000, 2000, b"sub", b"assigned")
    other = MemberMetadata("m-2", None, "c", "h", 1, 2, b"", b"")
    group = GroupMetadata("consumer", 7, "range", "m-1", 99, (member, other))
    assert GroupMetadata.decode(group.encode()) == group
    empty = GroupMetadata("", 0, None, None)
    assert GroupMetadata.decode(empty.encode()) == empty
    with pytest.raises(InvalidRecordError):
        GroupMetadata.decode(group.encode()[:-3])
    with pytest.raises(InvalidRecordError, match="version 9"):
        GroupMetadata.decode(b"\x00\x09")


def test_older_and_newer_groups_are_read() -> None:
    v0 = bytes.fromhex("0000 0001 63 00000002 0001 72 0001 6d 00000001 0001 6d 0001 69 0001 68 "
                       "00000bb8 00000001 aa 00000002 bbcc")  # fmt: skip
    member = MemberMetadata("m", None, "i", "h", 3000, 3000, b"\xaa", b"\xbb\xcc")
    assert GroupMetadata.decode(v0) == GroupMetadata("c", 2, "r", "m", -1, (member,))
    v4 = bytes.fromhex("0004 02 63 00000002 02 72 02 6d 0000000000000007 02 02 6d 00 02 69 02 68 "
                       "00000001 00000bb8 02 aa 03 bbcc 00 00")  # fmt: skip
    member = MemberMetadata("m", None, "i", "h", 1, 3000, b"\xaa", b"\xbb\xcc")
    assert GroupMetadata.decode(v4) == GroupMetadata("c", 2, "r", "m", 7, (member,))


def test_a_record_that_cannot_be_read_keeps_nobody_from_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger()
    ledger.see(0, OffsetKey("g", "t", 0).encode(), b"\x00\x03half")
    ledger.see(1, b"\x00", b"")
    ledger.see(2, None, b"x")
    ledger.see(3, OffsetKey("g", "t", 1).encode(), CommittedOffset(5).encode())
    assert ledger.committed("g") == {T1: CommittedOffset(5)}
    assert "offset 0 cannot be read" in caplog.text


# ---- in a store ----


def test_offsets_survive_a_reopening(make_store: Callable[..., Store]) -> None:
    store = make_store(clock=ManualClock(1_000))
    book = OffsetBook.of(store)
    assert book.committed("g") == {} and book.groups() == []
    book.commit("g", {("t", 0): 3, ("t", 1): CommittedOffset(4, "why", 2)})
    book.commit("other", {("t", 0): 9})
    book.commit("g", {("t", 0): 5})
    wanted = {T0: CommittedOffset(5, "", -1, 1_000), T1: CommittedOffset(4, "why", 2, 1_000)}
    assert book.committed("g") == wanted
    assert book.groups() == ["g", "other"]
    store.close()
    book = OffsetBook.of(make_store())
    assert book.committed("g") == wanted
    book.delete_offsets("g", [("t", 0)])
    assert book.committed("g") == {T1: wanted[T1]}
    book.delete_group("g")
    assert book.committed("g") == {} and not book.knows("g") and book.groups() == ["other"]


def test_what_is_no_offset_is_refused(store: Store) -> None:
    book = OffsetBook.of(store)
    with pytest.raises(InvalidRecordError, match="offset -1 of t-0"):
        book.commit("g", {("t", 0): -1})
    with pytest.raises(InvalidRecordError, match="5000 characters"):
        book.commit("g", {("t", 0): CommittedOffset(1, "x" * 5000)})
    with pytest.raises(TypeError):
        book.commit("g", {("t", 0): "1"})  # type: ignore[dict-item]
    with pytest.raises(TypeError):
        book.commit("g", {(b"t", 0): 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidRecordError, match="t cannot have a partition -1"):
        book.commit_in_transaction("g", {("t", -1): 1}, producer_id=1, producer_epoch=0)
    assert book.groups() == []


def test_readers_in_another_store_handle_follow(tmp_path: Path) -> None:
    with (
        logstore.open(tmp_path / "s", durability="os") as store,
        logstore.open(tmp_path / "s", readonly=True) as reader,
    ):
        seen = OffsetBook.of(reader)
        assert seen.committed("g") == {} and seen.groups() == []
        book = OffsetBook.of(store)
        for offset in (3, 8):
            book.commit("g", {("t", 0): offset})
            assert seen.committed("g")[T0].offset == offset


def test_offsets_of_a_transaction_count_when_it_is_committed(
    make_store: Callable[..., Store],
) -> None:
    store = make_store()
    book = OffsetBook.of(store)
    book.commit("g", {("t", 0): 1})
    for producer in (7, 8):
        book.commit_in_transaction(
            "g", {("t", 0): producer, ("t", 1): producer}, producer_id=producer, producer_epoch=0
        )
    assert {tp: c.offset for tp, c in book.committed("g").items()} == {T0: 1}
    assert book.pending("g") == {T0, T1}
    log = store[CONSUMER_OFFSETS][book.partition_of("g")]
    log.end_transaction(8, 0, commit=False)
    assert book.pending("g") == {T0, T1}
    log.end_transaction(7, 0, commit=True)
    wanted = {T0: 7, T1: 7}
    assert {tp: c.offset for tp, c in book.committed("g").items()} == wanted
    assert book.pending("g") == set()
    # The later record of the log counts, even if the transaction of an earlier one ends after it.
    book.commit_in_transaction("g", {("t", 0): 20}, producer_id=9, producer_epoch=0)
    book.commit("g", {("t", 0): 30})
    log.end_transaction(9, 0, commit=True)
    assert book.committed("g")[T0].offset == 30
    store.close()
    book = OffsetBook.of(make_store())
    assert {tp: c.offset for tp, c in book.committed("g").items()} == {T0: 30, T1: 7}


def test_a_new_topic_of_an_old_name_has_no_committed_offsets(
    make_store: Callable[..., Store],
) -> None:
    """Even if the process that deleted it never read an offset and crashed right after."""
    store = make_store()
    for name in ("t", "kept"):
        store.create_topic(name)
    OffsetBook.of(store).commit("g", {("t", 0): 3, ("kept", 0): 4})
    store.close()
    store = make_store()
    store.delete_topic("t")
    assert store.topic_changes.deleted == ("t",)
    store.close()
    store = make_store()
    store.create_topic("t")
    book = OffsetBook.of(store)
    assert list(book.committed("g")) == [("kept", 0)]
    assert store.topic_changes.deleted == ()
    book.commit("g", {("t", 0): 1})
    store.delete_topic("t")
    assert list(book.committed("g")) == [("kept", 0)]
    store.close()
    assert list(OffsetBook.of(make_store()).committed("g")) == [("kept", 0)]


def test_commits_of_many_threads_are_all_there(make_store: Callable[..., Store]) -> None:
    store = make_store()
    book = OffsetBook.of(store)

    def commit(number: int) -> None:
        for offset in range(50):
            book.commit("g", {("t", number): offset})
            assert book.committed("g")[TopicPartition("t", number)].offset == offset

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {TopicPartition("t", n): 49 for n in range(6)}
    assert {tp: c.offset for tp, c in book.committed("g").items()} == wanted
    store.close()
    book = OffsetBook.of(make_store())
    assert {tp: c.offset for tp, c in book.committed("g").items()} == wanted


def test_of_many_commits_only_the_newest_of_each_partition_is_decoded(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    book = OffsetBook.of(store)
    for n in range(100):
        book.commit("g", {("t", n % 3): n})
    book.commit_in_transaction("g", {("t", 3): 100}, producer_id=7, producer_epoch=0)
    for n in range(100, 200):
        book.commit("g", {("t", n % 3): n})
    store[CONSUMER_OFFSETS][book.partition_of("g")].end_transaction(7, 0, commit=True)
    book.delete_offsets("g", [("t", 0)])
    store.close()
    decode, decoded = CommittedOffset.decode, []

    def counted(raw: bytes) -> CommittedOffset:
        decoded.append(raw)
        return decode(raw)

    monkeypatch.setattr(CommittedOffset, "decode", counted)
    book = OffsetBook.of(make_store())
    found = {tp.partition: c.offset for tp, c in book.committed("g").items()}
    assert found == {1: 199, 2: 197, 3: 100}
    assert len(decoded) == 3


def test_the_newest_commit_that_can_be_read_counts_after_a_reopening(
    make_store: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    """A later version of Kafka wrote the last one; a group does not lose its place for that."""
    store = make_store()
    book = OffsetBook.of(store)
    book.commit("g", {("t", 0): 5, ("t", 1): 6})
    log = store[CONSUMER_OFFSETS][book.partition_of("g")]
    log.append(b"\x00\x63later", key=OffsetKey("g", "t", 0).encode())
    store.close()
    book = OffsetBook.of(make_store())
    assert {tp: c.offset for tp, c in book.committed("g").items()} == {T0: 5, T1: 6}
    assert "cannot be read" in caplog.text


def test_maintenance_compacts_commits_long_before_a_broker_would(store: Store) -> None:
    book = OffsetBook.of(store)
    commit: dict[tuple[str, int], CommittedOffset | int]
    commit = {("t", n): CommittedOffset(1, "m" * 4_000) for n in range(100)}
    for _ in range(30):
        book.commit("g", commit)  # of 400 KB
    log = store[CONSUMER_OFFSETS][book.partition_of("g")]
    before = sum(segment.size_bytes for segment in log.segments)
    Maintenance(store).run_once()
    after = sum(segment.size_bytes for segment in log.segments)
    assert before > 12_000_000 and after < 6_000_000
    assert len(book.committed("g")) == 100


class BookAgainstModel(RuleBasedStateMachine):
    """Commits, transactions, tombstones, compaction and reopening, against two dicts."""

    GROUPS = st.sampled_from(["a", "b"])
    OFFSETS = st.dictionaries(
        st.tuples(st.sampled_from(["t", "u"]), st.integers(0, 1)), st.integers(0, 100), min_size=1
    )
    PRODUCERS = st.integers(1, 3)

    @initialize()
    def open(self) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.store = logstore.open(
            self.directory.name, durability="os", config={"segment.bytes": 4096}
        )
        self.committed: dict[tuple[str, tuple[str, int]], tuple[int, int]] = {}
        self.pending: dict[int, dict[tuple[str, tuple[str, int]], tuple[int, int]]] = {}
        self.count = 0

    @property
    def book(self) -> OffsetBook:
        return OffsetBook.of(self.store)

    @rule(group=GROUPS, offsets=OFFSETS)
    def commit(self, group: str, offsets: dict[tuple[str, int], int]) -> None:
        self.book.commit(group, offsets)
        for tp, offset in offsets.items():
            self.count += 1
            self.committed[group, tp] = (self.count, offset)

    @rule(group=GROUPS, offsets=OFFSETS, producer=PRODUCERS)
    def commit_later(self, group: str, offsets: dict[tuple[str, int], int], producer: int) -> None:
        self.book.commit_in_transaction(group, offsets, producer_id=producer, producer_epoch=0)
        for tp, offset in offsets.items():
            self.count += 1
            self.pending.setdefault(producer, {})[group, tp] = (self.count, offset)

    @rule(producer=PRODUCERS, commit=st.booleans())
    def end(self, producer: int, commit: bool) -> None:
        for number in {self.book.partition_of(group) for group in ("a", "b")}:
            log = self.store.topic_changes.make_partition(self.store[CONSUMER_OFFSETS], number)
            log.end_transaction(producer, 0, commit=commit)
        for key, noted in self.pending.pop(producer, {}).items():
            if commit and noted > self.committed.get(key, (0, 0)):
                self.committed[key] = noted

    @rule(group=GROUPS)
    def delete(self, group: str) -> None:
        if not self.book.pending(group):
            self.book.delete_group(group)
            self.committed = {k: v for k, v in self.committed.items() if k[0] != group}

    @rule()
    def compact(self) -> None:
        for log in self.store.get(CONSUMER_OFFSETS) or ():
            log.roll()
            Compactor(log, min_cleanable_dirty_ratio=0).run()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = logstore.open(
            self.directory.name, durability="os", config={"segment.bytes": 4096}
        )

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        for group in ("a", "b"):
            found = {tuple(tp): c.offset for tp, c in self.book.committed(group).items()}
            assert found == {tp: v[1] for (g, tp), v in self.committed.items() if g == group}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.directory.cleanup()


TestBookAgainstModel = BookAgainstModel.TestCase
TestBookAgainstModel.settings = settings(max_examples=15, stateful_step_count=20)
