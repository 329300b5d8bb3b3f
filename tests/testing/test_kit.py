"""What users of `logstore.testing` meet: one namespace, no false alarms, readable failures."""

from __future__ import annotations

import mmap
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import testing
from logstore.testing import crash, fixtures, history, io, operations, strategies
from logstore.testing.crash import Exploration
from logstore.testing.history import check
from logstore.testing.history_findings import Copy
from logstore.testing.io import record_io
from logstore.testing.operations import Recorder, Send
from logstore.testing.reference import ReferenceRecord

# ---- one namespace ----


@pytest.mark.parametrize("room", [crash, fixtures, history, io, operations, strategies])
def test_every_public_name_of_the_kit_is_imported_from_one_place(room: object) -> None:
    # Two classes have the name Operation: that of a call to the disk is the kit's.
    names = [name for name in room.__all__ if room is not operations or name != "Operation"]  # type: ignore[attr-defined]
    for name in names:
        assert getattr(testing, name) is getattr(room, name)
        assert name in testing.__all__


# ---- copies ----


def copied(isolation: str, target: list[bytes], **sent: bool) -> Recorder:
    recorder = Recorder()
    for number in range(3):
        with recorder.send("writer", "source", b"%d" % number) as pending:
            pending.acknowledged(number)
    records = [ReferenceRecord(value, offset=at) for at, value in enumerate(target)]
    for record in records if sent.get("sent", True) else ():
        with recorder.send("copier", "target", record.value) as pending:
            pending.acknowledged(record.offset)
    source = [ReferenceRecord(b"%d" % number, offset=number) for number in range(3)]
    recorder.snapshot("source", source, isolation=isolation)
    recorder.snapshot("target", records, isolation=isolation)
    return recorder


COPY = Copy(frozenset({"source"}), frozenset({"target"}))


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_a_complete_copy_is_clean_at_either_isolation(isolation: str) -> None:
    recorder = copied(isolation, [b"0", b"1", b"2"])
    assert check(recorder.history(), caught_up=True, copies=[COPY]) == []


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ([b"0", b"2"], "b'1' at offset 1 of 'source' is not in the copy"),
        ([b"0", b"1", b"1", b"2"], "b'1' is in the copy twice, and in the source once"),
    ],
)
def test_an_incomplete_or_repeated_copy_is_found_at_either_isolation(
    isolation: str, target: list[bytes], message: str
) -> None:
    found = check(
        copied(isolation, target).history(),
        kinds=["exactly-once-copy"],
        caught_up=True,
        copies=[COPY],
    )
    assert [finding.message for finding in found] == [message]


def test_a_copy_that_was_only_read_uncommitted_and_not_sent_is_refused() -> None:
    recorder = copied("read_uncommitted", [b"0", b"1", b"2"], sent=False)
    with pytest.raises(ValueError, match=r"'target'.*isolation='read_committed'"):
        check(recorder.history(), caught_up=True, copies=[COPY])


def test_the_record_of_an_aborted_transaction_does_not_count_as_a_copy() -> None:
    recorder = Recorder()
    with recorder.send("writer", "source", b"0") as pending:
        pending.acknowledged(0)
    for offset, outcome in [(0, "abort"), (2, "commit")]:
        transaction = recorder.transaction("copier")
        transaction.add(Send("target", b"0", offset))
        if outcome == "abort":
            transaction.fail()
        else:
            transaction.ok()
    seen = [ReferenceRecord(b"0", offset=0), ReferenceRecord(b"0", offset=2)]
    recorder.snapshot("target", seen)
    assert (
        check(recorder.history(), kinds=["exactly-once-copy"], caught_up=True, copies=[COPY]) == []
    )


# ---- failures ----


def test_an_exploration_is_shown_as_its_story_and_without_its_digests(tmp_path: Path) -> None:
    with record_io(tmp_path) as trace, logstore.Partition.open(tmp_path / "a-0") as log:
        trace.mark(log.append(b"one"))

    def never(_: str, crash: testing.Crash) -> None:
        raise AssertionError("the balance is wrong")

    result = testing.explore(trace, never, stop_after=5)
    assert repr(result) == str(result)
    assert "the balance is wrong" in repr(result)
    assert not any(repr(digest) in repr(result) for digest in result.digests)
    assert repr(result.violations[0]) == str(result.violations[0])
    assert repr(Exploration()).startswith("0 distinct states")


# ---- files of the tested code ----


def write_text(path: Path) -> None:
    path.write_text("42")


def rename_in(path: Path) -> None:
    other = path.parent.parent / "outside"
    other.write_text("42")
    other.replace(path)


def connect(path: Path) -> None:
    sqlite3.connect(path).close()


def make_directory(path: Path) -> None:
    path.mkdir()


def open_descriptor(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))


@pytest.mark.parametrize("act", [write_text, rename_in, connect, make_directory, open_descriptor])
def test_a_call_of_the_tested_code_that_is_not_recorded_is_refused(
    tmp_path: Path, act: Callable[[Path], None]
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with (
        pytest.raises(RuntimeError, match=rf"cannot record .*{root}/mine"),
        record_io(root),
        logstore.Partition.open(root / "a-0") as log,
    ):
        log.append(b"one")
        act(root / "mine")
    act(root / "mine")  # not recorded any more, so allowed again


def test_a_file_that_is_deleted_while_it_is_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("42")
    with pytest.raises(RuntimeError, match=r"cannot record os\.remove"), record_io(tmp_path):
        (tmp_path / "mine").unlink()


def test_reading_and_writing_elsewhere_is_not_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "mine").write_text("42")
    with record_io(root) as trace:
        assert (root / "mine").read_text() == "42"
        (tmp_path / "mine").write_text("42")
    assert trace.initial == {"mine": b"42"}


def test_a_file_that_was_open_before_and_is_written_is_named_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapped,
        pytest.raises(RuntimeError, match="not recorded: mine"),
        record_io(tmp_path),
    ):
        mapped[:3] = b"abc"
        mapped.flush()


def test_what_the_block_raises_is_not_replaced_by_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "mine"
    with (
        path.open("wb", buffering=0) as file,
        pytest.raises(KeyError, match="first"),
        record_io(tmp_path),
    ):
        file.write(b"abc")
        raise KeyError("first")


# ---- a store under test ----


def test_a_store_under_test_is_in_memory_where_there_is_such_a_place() -> None:
    with testing.StoreUnderTest(durability="os") as under_test:
        place = under_test.path
        if os.access("/dev/shm", os.W_OK):
            assert place.is_relative_to("/dev/shm")
        under_test.store.create_topic("orders")[0].append(b"a")
        assert under_test.crash()["orders"][0][0].value == b"a"
    assert not place.parent.exists()


def test_a_store_under_test_stays_in_the_directory_that_it_is_given(tmp_path: Path) -> None:
    with testing.StoreUnderTest(tmp_path / "store") as under_test:
        assert under_test.path.is_relative_to(tmp_path)
    assert (tmp_path / "store").exists()
