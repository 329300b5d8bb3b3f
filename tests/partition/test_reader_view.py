"""Readers while a writer truncates, trims and reopens: no false error at any point in between.

The writer's file operations are watched: before and after each of them a reader, as another process
would have it, reads what there is.  It may see the log of before or of after, and may get an error
that its offset was deleted; it may not see damage where there is none.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logstore import OffsetOutOfRangeError, Partition, PartitionConfig, Record, RetentionPolicy
from logstore.files.directory import Directory
from logstore.log.producer_files import Producers
from logstore.partition.view import LogView
from logstore.recovery.truncation_plan import TruncationPlan
from tests.machines import fast_directory
from tests.partition.test_processes import start

TINY = PartitionConfig(segment_bytes=2048, index_interval_bytes=100)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that stands still while it is looked at is not waited for."""
    monkeypatch.setattr("logstore.partition.reader_view.SETTLE_SECONDS", 0.002)


def value(offset: int) -> bytes:
    return b"%d:" % offset + b"x" * (offset * 37 % 200)


def fill(log: Partition, count: int, generation: int = 0) -> None:
    for _ in range(0, count, 5):
        first = log.end_offset
        log.extend(
            [Record(value(offset), key=b"%d" % generation) for offset in range(first, first + 5)]
        )


class Watched:
    """A directory, or a file of it, whose every operation is surrounded by `look`."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        self._inner = inner
        self._look = look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._look()
            result = found(*args, **kwargs)
            self._look()
            return Watched(result, self._look) if name == "open" else result

        return call


@pytest.fixture
def watch(
    monkeypatch: pytest.MonkeyPatch, no_patience: None
) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """with watch(look): every change that a writer makes to a directory calls look() around it."""

    @contextlib.contextmanager
    def watching(look: Callable[[], None]) -> Iterator[None]:
        busy = False

        def once() -> None:
            nonlocal busy
            if not busy:
                busy = True
                try:
                    look()
                finally:
                    busy = False

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "sync", "replace", "write"):
                original = getattr(Directory, name)

                def around(self: Directory, *args: Any, _do: Any = original, **kwargs: Any) -> Any:
                    once()
                    result = _do(self, *args, **kwargs)
                    once()
                    return result

                patch.setattr(Directory, name, around)
            apply = TruncationPlan.apply
            patch.setattr(
                TruncationPlan,
                "apply",
                lambda plan, directory: apply(plan, Watched(directory, once)),
            )
            yield

    return watching


class Looker:
    """A reader that stays open, one that is half-way through, and a new one at every look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.looks = 0
        self.reader = Partition.open(path, readonly=True, config=TINY)
        self.half_way = iter(self.reader.scan())
        next(self.half_way)

    def close(self) -> None:
        self.reader.close()

    def __call__(self) -> None:
        self.looks += 1
        self.read_all(self.reader)
        self.step()
        if self.looks % 3 == 0:
            with Partition.open(self.path, readonly=True, config=TINY) as fresh:
                self.read_all(fresh)
                assert fresh.recovery.damage == []

    def step(self) -> None:
        """Read some more records; start again if the offset was deleted or is the end."""
        try:
            for _ in range(7):
                self.check(next(self.half_way))
        except (OffsetOutOfRangeError, StopIteration):
            self.half_way = iter(self.reader.scan())

    def read_all(self, reader: Partition) -> None:
        with contextlib.suppress(OffsetOutOfRangeError):
            for record in reader:
                self.check(record)
        with contextlib.suppress(OffsetOutOfRangeError):
            for columns in reader.scan().columns(rows=16):
                for offset, found in zip(columns.offsets, columns.values, strict=True):
                    assert bytes(found) == value(int(offset))
        with contextlib.suppress(OffsetOutOfRangeError):
            self.check(reader[reader.start_offset])
            self.check(reader[-1])
        with contextlib.suppress(OffsetOutOfRangeError):
            for record in reader.tail(3):
                self.check(record)
        with contextlib.suppress(OffsetOutOfRangeError):
            reader.offset_for_time(0)
        reader.check()

    def check(self, record: Record) -> None:
        assert record.value == value(record.offset)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is some: what a disk does is not the question here."""
    with tempfile.TemporaryDirectory(dir=fast_directory()) as name:
        yield Path(name)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Partition]:
    with Partition.open(tmp_path / "orders-0", durability="os", config=TINY) as partition:
        fill(partition, 120)
        yield partition


@pytest.fixture
def look(log: Partition) -> Iterator[Looker]:
    looker = Looker(log.path)
    yield looker
    looker.close()


Watch = Callable[..., contextlib.AbstractContextManager[None]]


@pytest.mark.parametrize("end", [118, 100, 63, 0])
def test_no_false_alarm_while_the_log_is_cut(
    log: Partition, look: Looker, watch: Watch, end: int
) -> None:
    with watch(look):
        log.truncate(end)
    assert look.looks > 20
    assert look.reader.end_offset == end
    with watch(look):
        fill(log, 40, generation=1)
    assert [record.offset for record in look.reader] == list(range(end + 40))


def test_no_false_alarm_while_segments_are_deleted(
    log: Partition, look: Looker, watch: Watch
) -> None:
    with watch(look):
        log.trim(33)
        log.enforce(RetentionPolicy(max_records=30))
        fill(log, 40)
        log.trim(log.end_offset)
    assert look.looks > 20
    assert look.reader.start_offset == look.reader.end_offset == 160


def test_no_false_alarm_while_the_writer_closes_and_opens(
    log: Partition, look: Looker, watch: Watch
) -> None:
    with watch(look):
        log.close()
        again = Partition.open(log.path, durability="os", config=TINY)
        fill(again, 40)
        again.roll()
        again.close()
    assert look.looks > 10
    assert look.reader.end_offset == 160


def test_no_false_alarm_after_a_writer_that_died_in_the_middle_of_a_cut(
    log: Partition, tmp_path: Path, watch: Watch
) -> None:
    """The cut is not finished before the next writer opens the log; readers work until then."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(tmp_path / f"copy{len(copies)}" / "orders-0")
        shutil.copytree(log.path, copies[-1])

    with watch(copy):
        log.truncate(63)
    assert len(copies) > 10
    for path in copies:
        with Partition.open(path, readonly=True, config=TINY) as reader:
            offsets = [record.offset for record in reader]
            assert offsets == list(range(len(offsets)))
            assert len(offsets) >= 60
            reader.check()
        with Partition.open(path, config=TINY) as writer:
            assert writer.end_offset in (63, 120)
            writer.check()


def test_a_reader_process_beside_a_busy_writer_sees_no_damage(tmp_path: Path) -> None:
    """The same without hooks: another process that cuts, trims and reopens as fast as it can."""
    path = tmp_path / "orders-0"
    script = """
        import random, sys, logstore
        from tests.partition.test_reader_view import TINY, fill
        random.seed(int(sys.argv[2]))
        for _ in range(20):
            with logstore.Partition.open(sys.argv[1], durability="os", config=TINY) as log:
                fill(log, 60)
                for _ in range(6):
                    log.truncate(random.randint(log.start_offset, log.end_offset))
                    fill(log, 30)
                log.trim(random.randint(log.start_offset, log.end_offset))
        print("done")
    """
    Partition.open(path, config=TINY).close()
    with Partition.open(path, readonly=True, config=TINY) as reader:
        looker = Looker.__new__(Looker)
        looker.path = path
        child = start(script, path, 7)
        while child.poll() is None:
            looker.read_all(reader)
        assert child.communicate()[0] == "done\n"
        looker.read_all(reader)


# ---- a writer that is killed in between ----


def copies_amid(log: Partition, watch: Watch, to: Path, act: Callable[[], object]) -> list[Path]:
    """The directory as a killed process leaves it, around every change that `act` makes."""
    copies: list[Path] = []

    def copy() -> None:
        copies.append(to / f"copy{len(copies)}" / "orders-0")
        shutil.copytree(log.path, copies[-1])

    with watch(copy):
        act()
    copy()
    return copies


def test_a_crash_amid_retention_leaves_the_log_of_before_or_of_after(
    log: Partition, tmp_path: Path, watch: Watch
) -> None:
    log.become_leader(4)
    fill(log, 20)
    everything = RetentionPolicy(max_bytes=0)  # even the active segment: rolled, then deleted
    copies = copies_amid(log, watch, tmp_path, lambda: log.enforce(everything))
    assert len(copies) > 10
    starts = []
    for path in copies:
        with Partition.open(path, durability="os", config=TINY) as copy:
            assert copy.end_offset == 140
            assert copy.recovery.damage == []
            assert copy.leader_epoch == 4
            starts.append(copy.start_offset)
            assert [record.offset for record in copy] == list(range(starts[-1], 140))
            copy.enforce(everything)
            assert copy.start_offset == 140
            assert [path.name for path in copy.path.glob("*.log")] == [f"{140:020d}.log"]
            assert copy.append(b"on") == 140
    assert starts == sorted(starts)
    assert {starts[0], starts[-1]} == {0, 140} == set(starts)


def test_a_crash_around_a_new_epoch_keeps_the_records_and_never_an_older_promise(
    log: Partition, tmp_path: Path, watch: Watch
) -> None:
    def act() -> None:
        log.become_leader(2)
        fill(log, 5)
        log.become_leader(3)
        log.truncate(122)
        fill(log, 10)

    copies = copies_amid(log, watch, tmp_path, act)
    promised = 0
    for path in copies:
        with Partition.open(path, durability="os", config=TINY) as copy:
            assert copy.leader_epoch >= promised
            promised = copy.leader_epoch
            assert [record.offset for record in copy] == list(range(copy.end_offset))
            carried = [
                (int.from_bytes(raw[12:16], "big"), int.from_bytes(raw[:8], "big"))
                for raw in copy.scan().batches()
            ]
            epochs = copy.leader_epochs
            assert all(epochs.epoch_for(offset) == epoch for epoch, offset in carried)
            copy.append(b"on")
            assert copy.leader_epochs.epoch_for(copy.end_offset - 1) == promised
    assert promised == 3


def test_a_cut_between_two_looks_of_a_committed_reader_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Partition.open(tmp_path / "t-0", durability="os") as log:
        for i in range(50):
            log.append(b"v%d" % i)
        with Partition.open(tmp_path / "t-0", readonly=True) as reader:
            assert reader.end_offset == 50
            real = LogView.known_producers

            def cut_first(view: LogView) -> Producers:
                if view is reader.parts.view and log.end_offset == 50:
                    log.truncate(10)
                return real(view)

            monkeypatch.setattr(LogView, "known_producers", cut_first)
            assert reader.last_stable_offset in (10, 50)
            assert len(list(reader.scan(isolation="read_committed"))) == 10
