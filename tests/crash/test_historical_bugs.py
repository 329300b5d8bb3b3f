"""Bugs that other logs had, by their tickets: each is a test here, or names the one that proves it.

What happened stands in one sentence above each.  `PROVEN_ELSEWHERE` leads to tests that were
written for the promise and not for the ticket; that they exist is checked.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import Compactor, DiskFullError, FencedError, Partition, PartitionConfig, Record
from logstore.files.directory import Directory
from logstore.log.state import PartitionState
from logstore.testing import as_reference, check_invariants, encode_batch
from logstore.testing.io import inject_io, record_io
from logstore.testing.io_calls import READS, SYNCS, Fault

TESTS = Path(__file__).parent.parent
TIME = 1_600_000_000_000
SMALL = PartitionConfig(segment_bytes=1024, index_interval_bytes=100)

PROVEN_ELSEWHERE = {
    # A retried fsync reports success although the pages were dropped.
    "fsyncgate, PostgreSQL 2018": [
        "test_failing_fsync.py::test_nothing_is_acknowledged_on_the_word_of_an_fsync_that_failed",
        "test_failing_fsync.py::test_no_append_is_acknowledged_after_an_fsync_failed",
    ],
    # The last stable offset is read twice, or stale after a roll: aborted data is served.
    "KAFKA-9807, KAFKA-9196, KAFKA-14704, KAFKA-2477": [
        "test_transactions_in_log.py"
        "::test_a_transaction_that_ends_while_a_reader_looks_is_whole_or_not_there",
        "test_transactions_in_log.py"
        "::test_committed_readers_beside_a_busy_writer_see_whole_transactions",
        "test_transactions_in_log.py::test_following_over_rolls_sees_each_committed_record_once",
    ],
    # The cleaner passes what is committed: an uncommitted value replaces a committed one.
    "KAFKA-13194": [
        "test_compaction.py::test_a_value_goes_only_when_the_newer_one_is_durable",
        "test_compaction.py::test_nothing_of_an_open_transaction_is_compacted",
        "test_compaction.py::test_an_aborted_value_does_not_supersede_a_committed_one",
    ],
    # Markers are removed, or taken for records of one key: aborted data becomes visible.
    "KAFKA-13727, KAFKA-14055, KAFKA-8351": [
        "test_compaction.py::test_aborted_data_goes_and_its_marker_stays_until_its_time",
        "test_compaction.py::test_a_marker_outlives_the_last_batch_of_its_producer",
        "test_compaction.py::test_a_commit_marker_stays_while_its_data_does",
    ],
    # A tombstone is deleted too early, and a deleted key is back; or it is never deleted.
    "KAFKA-4529, KAFKA-8522": [
        "test_compaction.py::test_a_deleted_key_never_comes_back",
        "test_compaction.py::test_a_tombstone_stays_for_its_time_after_compaction_met_it",
    ],
    # A crash while segments are swapped; the wrong segment deleted; cleaner and retention at once.
    "KAFKA-2118, KAFKA-12520, KAFKA-7322, KAFKA-3330": [
        "test_compaction_swap.py"
        "::test_a_kill_at_any_change_of_a_name_leaves_the_log_before_or_after",
        "test_compaction_swap.py"
        "::test_a_power_cut_may_keep_any_part_of_the_renames_since_the_last_sync",
        "test_compaction_swap.py::test_a_cut_while_segments_are_rewritten_stops_it",
        "test_compaction_swap.py::test_a_trim_meanwhile_stops_it",
    ],
    # The index of aborted transactions fails after the append; state moves before the append did.
    "KAFKA-7866, KAFKA-6683, KAFKA-5249": [
        "test_transactions_in_log.py::test_a_failed_note_of_an_abort_holds_committed_readers_back",
        "test_transactions_in_log.py::test_a_failed_write_leaves_the_producer_as_it_was",
        "test_io_faults.py::test_every_call_may_fail_in_every_way",
    ],
    # A relative offset, or the size of a value, does not fit 32 bits.
    "KAFKA-6264, KAFKA-4451, KAFKA-5413": [
        "test_segments.py::test_roll_before_a_relative_offset_overflows",
        "test_compaction.py::test_offsets_too_far_apart_are_not_merged",
        "test_partition_hardening.py::test_a_value_near_2_gib_is_refused_not_cut",
    ],
    # A writable mapping on a full disk is a SIGBUS; one that is unmapped under a reader a SIGSEGV.
    "kafka-native #151, LavinMQ #2180, memray #116, KAFKA-7442": [
        "test_io_seam.py::test_no_c_touches_a_file_around_the_seam_and_nothing_maps_one",
    ],
    # Sequences wrap at 2**31.
    "KAFKA-7692, KAFKA-7693, KAFKA-18660": [
        "test_producer_state.py::test_sequences_wrap_around_and_back",
        "test_producer_state.py::test_a_sequence_follows_the_largest_with_zero",
        "test_producer_state.py::test_a_batch_over_the_wrap_keeps_both_ends",
    ],
    # Producers are forgotten too early: their epoch decreases, or they are out of order.
    "KAFKA-9144, KAFKA-7190": [
        "test_producer_state.py::test_silent_producers_are_forgotten_unless_in_a_transaction",
        "test_producer_state.py::test_an_unknown_producer_may_start_anywhere",
        "test_transactions_in_log.py::test_producers_are_forgotten_in_time",
    ],
    # A roll meets a file of the new segment that is there already.
    "KAFKA-6388, KAFKA-654": [
        "test_segments.py::test_an_empty_file_in_the_way_of_a_roll_is_used",
        "test_segments.py::test_a_file_with_data_in_the_way_of_a_roll_is_not_overwritten",
        "test_partition_hardening.py::test_an_empty_file_left_inside_the_last_segment_is_dropped",
    ],
}


@pytest.mark.parametrize("ticket", PROVEN_ELSEWHERE)
def test_the_proof_that_is_named_exists(ticket: str) -> None:
    for name in PROVEN_ELSEWHERE[ticket]:
        file, _, function = name.partition("::")
        (path,) = TESTS.rglob(file)
        tree = ast.parse(path.read_text("utf-8"))
        assert function in [n.name for n in tree.body if isinstance(n, ast.FunctionDef)], name


# ---- what reaches the disk before what ------------------------------------------------------


def test_kafka_3968_a_new_segment_has_its_name_before_a_record_in_it_is_acknowledged(
    tmp_path: Path,
) -> None:
    """A segment was fsynced and its directory was not: after a power cut the file was gone."""
    with (
        Partition.open(tmp_path / "orders-0", config=SMALL) as log,
        record_io(tmp_path) as trace,
    ):
        for number in range(12):
            log.append(b"%d" % number + bytes(200), timestamp=TIME)
            trace.mark(number)
    unsynced: set[str] = set()
    created = 0
    for call in trace.operations:
        if call.kind == "open" and call.flags & os.O_CREAT and call.path.endswith(".log"):
            unsynced.add(call.path)
            created += 1
        elif call.kind in SYNCS and call.path == "orders-0" and call.result == 0:
            unsynced.clear()
        elif call.kind == "mark":
            assert not unsynced, f"record {call.mark} was acknowledged"
    assert created >= 2


NAMED_FOR_GOOD = (
    "meta.properties",
    "logstore.topics",
    ".kafka_cleanshutdown",
    "logstore.clean",
    "recovery-point-offset-checkpoint",
    "log-start-offset-checkpoint",
    "replication-offset-checkpoint",
    "cleaner-offset-checkpoint",
    "orders-0/leader-epoch-checkpoint",
    "orders-0/truncate.plan",
    "orders-0/swap.plan",
    "orders-0/logstore.start",
)


def test_kafka_16541_a_small_file_is_synced_before_it_gets_its_name_and_its_name_after(
    tmp_path: Path,
) -> None:
    """The fsync before a rename was dropped for speed: checkpoints were empty after a power cut."""
    settings = {"segment.bytes": 1024, "cleanup.policy": "compact"}
    with record_io(tmp_path) as trace, logstore.open(tmp_path, durability="os") as store:
        log = store.create_topic("orders", config=settings)[0]
        for number in range(20):
            log.append(b"%d" % number + bytes(200), key=b"%d" % (number % 2), timestamp=TIME)
        log.become_leader(2)
        Compactor(log).run()
        log.trim(17)
        log.truncate(19)
    seen = set()
    synced: set[str] = set()
    waiting: set[str] = set()
    for call in trace.operations:
        if call.kind == "pwrite":
            synced.discard(call.path)
        elif call.kind in SYNCS and call.result == 0:
            synced.add(call.path)
            waiting = {
                name for name in waiting if str(Path(name).parent) not in (call.path or ".",)
            }
        elif call.kind == "rename" and call.target in NAMED_FOR_GOOD:
            assert call.path in synced, f"{call.target} was not synced before it got its name"
            seen.add(call.target)
            waiting.add(call.target)
    assert seen == set(NAMED_FOR_GOOD)
    assert not waiting, f"the names were never synced: {waiting}"


# ---- recovery -------------------------------------------------------------------------------


def left_by_kill(tmp_path: Path, count: int = 12) -> Path:
    """What a killed process leaves: three segments, and half a batch at the end."""
    path = tmp_path / "killed" / "orders-0"
    with Partition.open(tmp_path / "orders-0", durability="os", config=SMALL) as log:
        for number in range(count):
            log.append(b"%d" % number + bytes(200), timestamp=TIME + number)
        shutil.copytree(log.path, path)
    with max(path.glob("*.log")).open("ab") as file:
        file.write(b"half a batch")
    return path


def test_kafka_14482_an_error_while_recovery_reads_destroys_nothing(tmp_path: Path) -> None:
    """One EIO during recovery cut a segment to its base and deleted all later ones."""
    pristine = left_by_kill(tmp_path)
    logs = {file.name: file.read_bytes() for file in pristine.glob("*.log")}
    with inject_io(root=tmp_path) as counted:
        copy = shutil.copytree(pristine, tmp_path / "count" / "orders-0")
        Partition.open(copy, durability="os", config=SMALL).parts.discard()
    calls = sum(call.kind in (*READS, "open") for call in counted.calls)
    assert calls > 20
    failed = 0
    for number in range(1, calls + 1):
        copy = shutil.copytree(pristine, tmp_path / f"{number}" / "orders-0")
        with inject_io(Fault.fail(errno.EIO, (*READS, "open"), call=number), root=tmp_path):
            try:
                Partition.open(copy, durability="os", config=SMALL).parts.discard()
            except OSError:
                failed += 1
        for name, contents in logs.items():
            assert contents.startswith((copy / name).read_bytes())
        with Partition.open(copy, durability="os", config=SMALL) as log:
            assert [record.offset for record in log.scan()] == list(range(12)), f"call {number}"
        shutil.rmtree(copy.parent)
    assert failed > calls // 2


@pytest.mark.parametrize("what", ["appended", "truncated and appended", "damaged"])
def test_kafka_15375_a_clean_mark_from_before_does_not_skip_recovery(
    tmp_path: Path, what: str
) -> None:
    """A marker of a clean shutdown stayed, or came too early: a torn tail was not looked for.

    Also Redpanda #9711, KAFKA-10101, KAFKA-673.
    """
    root = tmp_path / "store"
    with logstore.open(root, durability="os") as store:
        log = store.create_topic("orders", config={"segment.bytes": 1024})[0]
        for number in range(6):
            log.append(b"%d" % number + bytes(200), timestamp=TIME)
    marks = [root / name for name in (".kafka_cleanshutdown", "logstore.clean")]
    marks += [root / "orders-0" / name for name in ("logstore.state", "logstore.durable")]
    clean = {mark: mark.read_bytes() for mark in marks}
    copy = tmp_path / "crashed"
    with logstore.open(root, durability="os") as store:
        log = store["orders"][0]
        if what == "truncated and appended":
            log.truncate(4)
        for number in range(3):
            log.append(b"later %d" % number + bytes(200), timestamp=TIME)
        expected = [as_reference(record) for record in log.scan()]
        shutil.copytree(root, copy)
    for mark, contents in clean.items():
        (copy / mark.relative_to(root)).write_bytes(contents)
    last = max((copy / "orders-0").glob("*.log"))
    with last.open("ab") as file:
        file.write(b"torn")
    if what == "damaged":  # of the size that the old state has
        active = max((root / "orders-0").glob("*.log"))
        last.write_bytes(last.read_bytes()[: active.stat().st_size])
    with logstore.open(copy, durability="os") as store:
        log = store["orders"][0]
        found = [as_reference(record) for record in log.scan()]
        assert found == expected[: len(found)]
        assert len(found) >= 4
        assert log.recovery.torn or what == "damaged"
        assert log.append(b"goes on", timestamp=TIME) == len(found)
        check_invariants(log)


# ---- writes that do not come to their end ---------------------------------------------------


def test_kafka_10778_no_append_lands_behind_half_of_another(tmp_path: Path) -> None:
    """Appending went on after a write that failed half-way.  Also KAFKA-309, py-lmdb #474."""
    with Partition.open(tmp_path / "orders-0", durability="os") as log:
        log.append(b"first", timestamp=TIME)
        size = log.segments[-1].size_bytes
        batch = size
        for written in range(batch):
            faults = [Fault.fail(errno.ENOSPC, "pwrite", "*.log")]
            if written:
                faults = [
                    Fault.short(written, "pwrite", "*.log"),
                    Fault.fail(errno.ENOSPC, "pwrite", "*.log", call=2),
                ]
            with inject_io(*faults, root=tmp_path) as io, pytest.raises(DiskFullError):
                log.append(b"other", timestamp=TIME)
            assert io.fired == len(faults)
            assert log.segments[-1].path.stat().st_size == log.segments[-1].size_bytes
            end = log.end_offset
            assert log.append(b"again %d" % written, timestamp=TIME) == end
        found = [record.value for record in log.scan()]
        assert found == [b"first", *(b"again %d" % number for number in range(batch))]
        check_invariants(log)


def test_kafka_309_a_write_in_pieces_of_a_byte_is_whole(tmp_path: Path) -> None:
    """A short count was taken for a failure, or for the end."""
    with Partition.open(tmp_path / "orders-0") as log:
        with inject_io(Fault.short(1, forever=True), root=tmp_path) as io:
            assert log.append(b"in pieces", timestamp=TIME) == 0
            assert log[0].value == b"in pieces"
        assert io.fired > 70
        check_invariants(log)


# ---- compaction and transactions ------------------------------------------------------------


def test_kafka_13727_markers_are_not_records_of_one_key(tmp_path: Path) -> None:
    """All markers have the same few bytes as a key: all but the last went, and aborts with them."""
    config = PartitionConfig(segment_bytes=1024, min_compaction_lag_ms=0)
    with Partition.open(tmp_path / "orders-0", durability="os", config=config) as log:
        for producer_id in range(6):
            records = [Record(b"of %d" % producer_id + bytes(150), key=b"k", timestamp=TIME)]
            log.append_batch(
                encode_batch(
                    records,
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=0,
                    transactional=True,
                )
            )
            log.end_transaction(producer_id, 0, commit=producer_id % 3 == 0)
        log.roll()
        log.sync()
        before = [record.value for record in log.scan(isolation="read_committed")]
        assert [value[:4] for value in before if value] == [b"of 0", b"of 3"]
        for _ in range(2):
            Compactor(log).run()
            found = [record.value for record in log.scan(isolation="read_committed")]
            assert found == before[-1:]
        check_invariants(log)


# ---- numbers that end -----------------------------------------------------------------------


def at_two_gib(path: Path, below: int) -> PartitionConfig:
    """A closed log whose file ends so many bytes below 2 GiB, nearly all of them a hole."""
    config = PartitionConfig(segment_bytes=(1 << 31) - 1)
    with Partition.open(path, durability="os", config=config) as log:
        log.append(b"the first", timestamp=TIME)
    size = (1 << 31) - below
    os.truncate(path / f"{0:020d}.log", size)
    directory = Directory(path)
    state = PartitionState.read(directory)
    assert state is not None
    assert state.clean
    dataclasses.replace(state, active_bytes=size).write(directory)
    directory.close()
    return config


@pytest.mark.parametrize("below", [1, 2, 60, 61, 74, 75, 76, 200])
def test_kafka_1670_a_segment_never_grows_beyond_what_a_position_can_say(
    tmp_path: Path, below: int
) -> None:
    """Sizes and positions near 2**31 overflowed.  Also KAFKA-3047, KAFKA-6292."""
    path = tmp_path / "orders-0"
    config = at_two_gib(path, below)
    log = Partition.open(path, durability="os", config=config)
    try:
        assert log.recovery.clean
        for number in range(1, 4):
            assert log.append(b"number %d" % number, timestamp=TIME + number) == number
        first, *later = log.segments
        assert first.size_bytes < 1 << 31
        assert later or below == 200
        for number in range(1, 4):
            if later and number >= later[0].base_offset:
                assert log[number].value == b"number %d" % number
        for segment in log.segments:
            assert all(0 <= position < 1 << 31 for _, position in segment.offset_index)
            assert segment.path.stat().st_size < 1 << 31
    finally:
        log.parts.discard()


def test_kafka_19367_the_greatest_producer_epoch_is_the_last(tmp_path: Path) -> None:
    """A producer's epoch was raised twice at its end, and went round to a smaller one."""
    with Partition.open(tmp_path / "orders-0", durability="os") as log:

        def produce(epoch: int, sequence: int) -> Callable[[], object]:
            raw = encode_batch(
                [Record(b"v", timestamp=TIME)],
                producer_id=5,
                producer_epoch=epoch,
                base_sequence=sequence,
                transactional=True,
            )
            return lambda: log.append_batch(raw)

        produce(32_766, 0)()
        log.end_transaction(5, 32_767, commit=False)  # ending it fences the producer
        with pytest.raises(FencedError):
            produce(32_766, 1)()
        produce(32_767, 0)()
        log.end_transaction(5, 32_767, commit=True)
        for epoch in (0, 1, 32_766):
            with pytest.raises(FencedError):
                produce(epoch, 0)()
        assert [r.offset for r in log.scan(isolation="read_committed")] == [2]
        check_invariants(log)
