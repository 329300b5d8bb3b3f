"""Rewritten segments take the place of old ones: a crash finds the log before or after.

A `Journal` stands between the code and the directory.  It knows which names a power cut would
leave: those of the last sync of the directory, and any part of what was renamed since.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore import Compactor, CorruptLogError, ManualClock, Partition, Record
from logstore.files.directory import Directory
from logstore.files.names import segment_name
from logstore.recovery.swap_plan import SWAP_PLAN, SwapPlan
from logstore.testing import check_invariants
from tests.conftest import MakeLog

Contents = list[tuple[int, bytes | None, bytes | None]]
SMALL = {"segment.bytes": 1024}


def contents(log: Partition) -> Contents:
    return [(record.offset, record.key, record.value) for record in log]


def fill(log: Partition, keys: int = 3, records: int = 60) -> None:
    for number in range(records):
        log.append(b"%03d" % number * 8, key=b"k%d" % (number % keys))


class Crash(BaseException):
    """The process is gone."""


class Journal:
    """Counts changes of names, copies the directory before one of them, and stops there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, copies: Path) -> None:
        self.path = path
        self.copies = copies
        self.count = 0
        self.stop_at = -1
        self.synced: Path | None = None
        self.since: list[tuple[str, ...]] = []
        self.cuts: list[tuple[Path, list[tuple[str, ...]]]] = []
        for name in ("rename", "unlink", "sync"):
            original = getattr(Directory, name)

            def patched(
                directory: Directory, *args: str, _name: str = name,
                _original: Callable[..., None] = original,
            ) -> None:  # fmt: skip
                self.before(_name, args)
                _original(directory, *args)
                self.after(_name, args)

            monkeypatch.setattr(Directory, name, patched)

    def copy(self) -> Path:
        target = self.copies / f"{len(list(self.copies.iterdir()))}" / self.path.name
        shutil.copytree(self.path, target)
        return target

    def before(self, name: str, args: tuple[str, ...]) -> None:
        if name == "unlink" and not (self.path / args[0]).exists():
            return
        if self.count == self.stop_at:
            raise Crash
        self.count += 1

    def after(self, name: str, args: tuple[str, ...]) -> None:
        if self.synced is None:
            return
        if name != "sync":
            self.since.append((name, *args))
            return
        self.cuts.append((self.synced, self.since))
        self.synced, self.since = self.copy(), []


def reopened(path: Path) -> tuple[Contents, Partition]:
    log = Partition.open(path, durability="os", config=SMALL, clock=ManualClock())
    return contents(log), log


def assert_before_or_after(path: Path, before: Contents, after: Contents, thoroughly: bool) -> bool:
    """Open a copy twice, compact it, and return whether it is the log after the swap."""
    with Partition.open(path, readonly=True) as reader:
        seen = contents(reader)
    found, log = reopened(path)
    assert found in (before, after)
    assert seen in (before, found), "a reader is never ahead of the next writer"
    check_invariants(log)
    assert log.append(b"more") == before[-1][0] + 1
    log.close()
    assert not [name for name in path.iterdir() if name.suffix in (".cleaned", ".swap", ".deleted")]
    assert not (path / SWAP_PLAN).exists()
    if thoroughly:
        again, log = reopened(path)
        assert again[:-1] == found
        one_swap(log)
        assert contents(log)[:-1] == after
        log.close()
    return found == after


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, Contents, Contents]:
    """A log of several small segments, and what it holds before and after."""
    path = tmp_path / "orders-0"
    with Partition.open(path, durability="os", config=SMALL, clock=ManualClock()) as log:
        fill(log)
        before = contents(log)
    after_path = tmp_path / "after" / "orders-0"
    shutil.copytree(path, after_path)
    with Partition.open(after_path, durability="os", config=SMALL, clock=ManualClock()) as log:
        Compactor(log).run()
        after = contents(log)
    assert after != before
    return path, before, after


def one_swap(log: Partition) -> None:
    """All sealed segments become one."""
    object.__setattr__(log.config, "segment_bytes", 1 << 20)
    Compactor(log, min_cleanable_dirty_ratio=0).run()


def test_a_kill_at_any_change_of_a_name_leaves_the_log_before_or_after(
    filled: tuple[Path, Contents, Contents], tmp_path: Path
) -> None:
    path, before, after = filled
    seen = set()
    for stop_at in itertools.count():
        copy = tmp_path / "kill" / str(stop_at) / "orders-0"
        shutil.copytree(path, copy)
        with pytest.MonkeyPatch.context() as patch:
            _, log = reopened(copy)
            (tmp_path / "copies").mkdir(exist_ok=True)
            journal = Journal(patch, copy, tmp_path / "copies")
            journal.stop_at = stop_at
            try:
                one_swap(log)
                finished = True
            except Crash:
                finished = False
            left = tmp_path / "left" / str(stop_at) / "orders-0"
            shutil.copytree(copy, left)
        log.parts.active.writer = None  # the process is gone: nothing is written any more
        log.parts.drop()
        seen.add(assert_before_or_after(left, before, after, stop_at % 6 == 0))
        if finished:
            break
    assert seen == {False, True}
    assert stop_at > 15


def apply_part(path: Path, operations: list[tuple[str, ...]]) -> None:
    for name, *args in operations:
        if name == "rename" and (path / args[0]).exists():
            (path / args[0]).rename(path / args[1])
        elif name == "unlink":
            (path / args[0]).unlink(missing_ok=True)


def test_a_power_cut_may_keep_any_part_of_the_renames_since_the_last_sync(
    filled: tuple[Path, Contents, Contents], tmp_path: Path
) -> None:
    path, before, after = filled
    with Partition.open(path, durability="os", config=SMALL, clock=ManualClock()) as log:
        log.trim(log.segments[-4].base_offset)  # three sealed segments are enough: 2^9 parts
        before = contents(log)
    with pytest.MonkeyPatch.context() as patch:
        _, log = reopened(path)
        (tmp_path / "copies").mkdir()
        journal = Journal(patch, path, tmp_path / "copies")
        journal.synced = journal.copy()
        one_swap(log)
        after = contents(log)
        journal.cuts.append((journal.synced, journal.since))
    log.close()
    tried = 0
    for synced, operations in journal.cuts:
        # Temporary files come and go by themselves; what counts are the segments and the plan.
        parts = list(itertools.product([False, True], repeat=len(operations)))
        step = max(1, len(parts) // 16)
        for part in [*parts[::step], parts[-1]]:
            cut = tmp_path / "cut" / str(tried) / "orders-0"
            shutil.copytree(synced, cut)
            apply_part(cut, [o for o, kept in zip(operations, part, strict=True) if kept])
            found, log = reopened(cut)
            assert found in (before, after), (operations, part)
            log.close()
            shutil.rmtree(cut)
            tried += 1
    assert tried > 50


def test_a_damaged_rewritten_segment_gives_way_to_the_old_ones(
    filled: tuple[Path, Contents, Contents], tmp_path: Path
) -> None:
    path, before, _ = filled
    with pytest.MonkeyPatch.context() as patch:
        _, log = reopened(path)

        def stop(self: SwapPlan, directory: Directory) -> None:
            raise Crash

        patch.setattr(SwapPlan, "finish", stop)  # all is renamed, nothing is forgotten
        with pytest.raises(Crash):
            one_swap(log)
        log.parts.active.writer = None
        log.parts.drop()
    new = path / segment_name(0, ".log")
    data = bytearray(new.read_bytes())
    data[len(data) // 2] ^= 1
    new.write_bytes(data)
    found, log = reopened(path)
    assert found == before
    assert not log.recovery.swap_finished
    check_invariants(log)
    log.close()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("state", ["cleaned", "mixed", "swap", "deleted", "half final"])
def test_the_states_a_broker_leaves_are_finished_or_undone(
    filled: tuple[Path, Contents, Contents], tmp_path: Path, state: str, known: bool
) -> None:
    path, before, after = filled
    done = tmp_path / "done" / "orders-0"
    shutil.copytree(path, done)
    _, log = reopened(done)
    one_swap(log)
    log.close()
    old = sorted(path.glob("*.log"))[:-1]
    suffixes = (".log", ".index", ".timeindex")
    kind = {"cleaned": "cleaned", "mixed": "swap"}.get(state, "swap")
    for suffix in suffixes:
        shutil.copy(done / segment_name(0, suffix), path / f"{segment_name(0, suffix)}.{kind}")
    if state == "mixed":  # another segment of the same operation is not finished
        (path / f"{segment_name(0, '.log')}.cleaned").write_bytes(b"half")
    if state in ("deleted", "half final"):
        for file in old:
            for suffix in suffixes:
                name = path / (file.stem + suffix)
                name.rename(f"{name}.deleted")
    if state == "half final":
        name = path / segment_name(0, ".log")
        name.with_suffix(".log.swap").rename(name)
    if not known:
        (path / "logstore.state").unlink()  # a broker has none
    found, log = reopened(path)
    assert found == (before if state in ("cleaned", "mixed") else after)
    check_invariants(log)
    log.close()
    assert (
        not list(path.glob("*.swap")) + list(path.glob("*.cleaned")) + list(path.glob("*.deleted"))
    )


def test_a_torn_plan_means_that_nothing_was_renamed(
    filled: tuple[Path, Contents, Contents],
) -> None:
    path, before, _ = filled
    (path / SWAP_PLAN).write_bytes(b"0badc0de\n{")
    found, log = reopened(path)
    assert found == before
    log.close()
    assert not (path / SWAP_PLAN).exists()


# ---- readers, interrupts, cuts ----


def test_readers_stay_in_the_files_they_are_in(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    before = contents(log)
    scan = iter(log.scan())
    first = next(scan)
    early = log.segments[:-1]
    held = early[2].scan()
    Compactor(log).run()
    rest = [(record.offset, record.key, record.value) for record in scan]
    # The segment it was in is read to its end as it was; the later ones are new.
    assert (first.offset, first.key, first.value) == before[0]
    assert rest[: early[0].end_offset - 1] == before[1 : early[0].end_offset]
    in_old = [(record.offset, record.key, record.value) for record in held]
    assert in_old == before[early[2].base_offset : early[2].end_offset]
    # A segment that a reader holds, but had not opened, is the old one, too.
    assert [record.offset for record in early[1].scan()] == list(
        range(early[1].base_offset, early[1].end_offset)
    )
    assert {record.key for record in log} == {b"k0", b"k1", b"k2"}


def test_a_reader_in_another_handle_sees_the_swap(tmp_path: Path, make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    reader = make_log(readonly=True)
    assert contents(reader) == contents(log)
    Compactor(log).run()
    assert contents(reader) == contents(log)
    assert reader.get(b"k1") == log.get(b"k1")


def test_a_reader_that_looks_between_two_renames_sees_one_or_the_other(
    filled: tuple[Path, Contents, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before, after = filled
    _, log = reopened(path)
    reader = Partition.open(path, readonly=True)
    looks: list[bool] = []
    rename = Directory.rename

    def looking(directory: Directory, source: str, target: str) -> None:
        rename(directory, source, target)
        if directory is log.parts.view.directory:
            found = contents(reader)
            assert found in (before, after)
            with Partition.open(path, readonly=True) as fresh:
                assert contents(fresh) in (before, after)
            looks.append(found == after)

    monkeypatch.setattr(Directory, "rename", looking)
    one_swap(log)
    monkeypatch.undo()
    assert set(looks) == {False, True}
    assert contents(reader) == after
    reader.close()
    log.close()


@pytest.mark.parametrize("after_calls", range(0, 40, 3))
def test_an_interrupt_leaves_a_log_that_goes_on(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, after_calls: int
) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    newest = {record.key: record.value for record in log}
    calls = itertools.count()
    for name in ("rename", "unlink", "sync"):
        original = getattr(Directory, name)

        def interrupted(
            directory: Directory, *args: str, _original: Callable[..., None] = original
        ) -> None:
            if next(calls) == after_calls:
                raise KeyboardInterrupt
            _original(directory, *args)

        monkeypatch.setattr(Directory, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        Compactor(log).run()
    monkeypatch.undo()
    assert {record.key: record.value for record in log} == newest
    assert not list(log.path.glob("*.cleaned"))
    assert not (log.path / SWAP_PLAN).exists()
    log.append(b"on", key=b"k0")
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert len({record.key for record in log}) == 3
    check_invariants(log)


def test_a_cut_while_segments_are_rewritten_stops_it(make_log: MakeLog) -> None:
    """The map knows a value that the cut takes away: an older one must not go for it."""
    log = make_log(segment_bytes=1024)
    log.append(b"old", key=b"precious")
    fill(log)
    newer = log.append(b"new", key=b"precious")
    fill(log)

    def cut(done: int, total: int) -> None:
        if log.end_offset > newer:
            log.truncate(newer)

    report = Compactor(log, progress=cut).run()
    assert "truncated or trimmed" in report.reason
    found = log.get(b"precious")
    assert found is not None and found.value == b"old"
    assert log.first_dirty_offset == 0
    check_invariants(log)


def test_a_trim_meanwhile_stops_it(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    report = Compactor(log, progress=lambda done, total: log.trim(40)).run()
    assert "truncated or trimmed" in report.reason
    assert log.start_offset == 40
    assert [offset for offset, _, _ in contents(log)] == list(range(40, 60))
    Compactor(log).run()
    check_invariants(log)


def test_one_compaction_at_a_time(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    with (
        log.parts.rewriter.rewriting(),
        pytest.raises(ValueError, match="being compacted or purged already"),
    ):
        Compactor(log).run()
    Compactor(log).run()


def test_appends_go_on_meanwhile(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1 << 16)
    fill(log, keys=50, records=3000)
    stop = threading.Event()
    appended: list[int] = []

    def append() -> None:
        while not stop.is_set() and len(appended) < 10_000:
            appended.append(log.append(b"x" * 50, key=b"k%d" % (len(appended) % 50)))

    thread = threading.Thread(target=append)
    thread.start()
    try:
        for _ in range(5):
            Compactor(log, min_cleanable_dirty_ratio=0).run()
    finally:
        stop.set()
        thread.join()
    assert appended == list(range(3000, 3000 + len(appended)))
    assert {record.key for record in log} == {b"k%d" % i for i in range(50)}
    check_invariants(log)


def test_a_damaged_segment_is_not_compacted(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    before = contents(log)
    second = log.segments[1].path
    data = bytearray(second.read_bytes())
    data[70] ^= 1
    second.write_bytes(data)
    with pytest.raises(CorruptLogError):
        Compactor(log).run()
    data[70] ^= 1
    second.write_bytes(data)
    assert contents(log) == before
    assert not list(log.path.glob("*.cleaned"))


def test_records_below_the_map_are_kept_by_a_record(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=1024)
    log.extend([Record(b"%d" % i * 30, key=b"a") for i in range(40)])
    log.roll()
    assert Compactor(log).run().records_after == 1
    assert [record.offset for record in log] == [39]


def test_readers_of_other_handles_never_miss_a_newest_value(make_log: MakeLog) -> None:
    """Scans, single reads and searches of a readonly handle, while segments are swapped."""
    log = make_log(segment_bytes=1024)
    fill(log, keys=7, records=400)
    newest = {record.key: (record.offset, record.value) for record in log}
    reader = make_log(readonly=True)
    stop = threading.Event()
    failures: list[BaseException] = []
    scans = 0

    def read() -> None:
        nonlocal scans
        try:
            while not stop.is_set() or not scans:
                offsets = []
                found = {}
                for record in reader:
                    offsets.append(record.offset)
                    found[record.key] = (record.offset, record.value)
                assert found == newest
                assert offsets == sorted(set(offsets))
                assert reader[newest[b"k3"][0]].key == b"k3"
                one = reader.get(b"k5")
                assert one is not None and (one.offset, one.value) == newest[b"k5"]
                scans += 1
        except BaseException as error:  # noqa: BLE001  the test below raises it
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        Compactor(log).run()
        Compactor(log, memory_bytes=72, min_cleanable_dirty_ratio=0).run()
        for key in (b"nothing", b"has", b"this"):
            Compactor(log).purge(key)
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_a_full_disk_leaves_the_log_as_it_is_and_usable(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = make_log(segment_bytes=1024)
    fill(log)
    before = contents(log)
    replace = Directory.replace

    def full(directory: Directory, name: str, data: bytes, *, sync: bool = True) -> None:
        if name == SWAP_PLAN:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(directory, name, data, sync=sync)

    monkeypatch.setattr(Directory, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        Compactor(log).run()
    monkeypatch.undo()
    assert contents(log) == before
    assert not list(log.path.glob("*.cleaned"))
    log.append(b"goes on", key=b"k0")
    assert Compactor(log).run().superseded > 0
    check_invariants(log)
