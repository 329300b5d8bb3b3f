"""Every bit of every kind of file flips: the log reads the same, or an error names the damage.

The files of a store and of its partition, as a clean close left them and as a killed process did,
and in the middle of a planned swap and a planned cut.  For each bit: open and read; where writing
is another way in, that way as well.  Either what is read is equal, record for record, or an error
of ours names the damage.  A batch at the end that was never synced may also be cut off as torn,
and is then reported and kept.

The catalogue of topics is text that may be edited by hand: a bit that changes a setting is what an
edit would be, and one that changes a name or a number leads to a partition that is not there, which
raises FileNotFoundError.  The records are the same.

`make campaigns` flips them all; that takes too long for every run of the tests.
Two processes share the flips: this file run as a program is one of them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import logstore
from logstore import Compactor, ConfigError, LogStoreError, Partition, PartitionConfig, Record
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.partition import reader_view
from logstore.recovery.report import RecoveryReport
from logstore.testing import as_reference, encode_batch
from logstore.testing.io import inject_io
from logstore.testing.io_calls import Fault
from tests.campaign import sized

if TYPE_CHECKING:
    from tests.conftest import RunShares

SETTINGS = {"segment.bytes": 1024, "index.interval.bytes": 200, "min.compaction.lag.ms": 0}
CONFIG = PartitionConfig.of(SETTINGS)
TIME = 1_600_000_000_000

Seen = tuple[Any, ...]


class Violation(AssertionError):
    """Something was read that is not what was written, and no error was raised."""


# ---- what is damaged ------------------------------------------------------------------------


def fill(log: Partition) -> None:
    """Batches of every kind: packed, of a producer, of transactions, and of two leaders."""
    for number in range(6):
        log.append(
            b"plain %d" % number + bytes(90),
            key=b"k%d" % (number % 3),
            headers=[("h", b"%d" % number)],
            timestamp=TIME + number,
        )
    log.become_leader(3)
    for compression in ("lz4", "zstd"):
        with log.writer(compression=compression, linger=None) as out:
            for number in range(20):
                out.append(compression.encode() + b" %d" % number, timestamp=TIME + 50 + number)
    for producer_id in (7, 8):
        records = [Record(b"txn %d" % producer_id, key=b"t", timestamp=TIME + 90)] * 2
        raw = encode_batch(
            records, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
        )
        log.append_batch(raw, verify_transaction=False)
        log.end_transaction(producer_id, 0, commit=producer_id == 7)
    for number in range(5):
        log.append(b"behind %d" % number + bytes(100), timestamp=TIME + 200 + number)


def trimmed(store: logstore.Store) -> Partition:
    """Return a new partition that is filled, trimmed and checkpointed, and has its digests."""
    store.create_topic("orders", config=SETTINGS)
    log = store["orders"][0]
    fill(log)
    log.trim(2)
    store.checkpoint()
    log.parts.rewriter.write_digests()
    return log


def whole(root: Path) -> None:
    """A store that was closed cleanly, whose partition has lost its first records by a trim."""
    with logstore.open(root, durability="os") as store:
        assert len(trimmed(store).segments) >= 3


def left_by_kill(root: Path) -> None:
    """The same, killed after a sync and one more append."""
    copy = root.with_name("live")
    with logstore.open(copy, durability="os") as store:
        log = trimmed(store)
        log.sync()
        log.append(b"not synced" + bytes(50), timestamp=TIME + 300)
        shutil.copytree(copy, root, dirs_exist_ok=True)
    shutil.rmtree(copy)


def stopped(
    name: str, act: Callable[[Partition], object], kind: str, path: str, call: int = 1
) -> Callable[[Path], None]:
    """What a process leaves that was stopped at a call in the middle of a plan."""

    def start(root: Path) -> None:
        whole(root)
        with logstore.open(root, durability="os") as store:
            log = store["orders"][0]
            copy = root.with_name("stopped")
            fault = Fault.fail(errno.EIO, kind, path, call=call, forever=True)
            with inject_io(fault, root=root) as io:
                try:
                    act(log)
                except OSError:
                    assert io.fired
                shutil.copytree(root, copy)
            log.parts.discard()
        shutil.rmtree(root)
        copy.rename(root)
        assert any(root.rglob("*.plan"))

    start.__name__ = name
    return start


swapping = stopped("swapping", lambda log: Compactor(log).run(), "rename", "*.swap")
swapped = stopped("swapped", lambda log: Compactor(log).run(), "rename", "*.swap", call=5)
cutting = stopped("cutting", lambda log: log.truncate(20), "truncate", "*.log")
cut = stopped("cut", lambda log: log.truncate(20), "pwrite", "*.log")


# ---- what is seen ---------------------------------------------------------------------------


def look(log: Partition) -> Seen:
    """What a user can learn of a partition."""
    records = tuple(as_reference(record) for record in log.scan())
    committed = tuple(record.offset for record in log.scan(isolation="read_committed"))
    found = tuple(as_reference(log[record.offset]) for record in records[::7])
    times = tuple(log.offset_for_time(TIME + age) for age in (0, 55, 95, 203, 10_000))
    return log.start_offset, log.end_offset, records, committed, found, times


def look_at_store(store: logstore.Store) -> Seen:
    """What a user can learn of a store."""
    return tuple((name, tuple(look(log) for log in topic)) for name, topic in store.items())


def stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


class Sample:
    """A directory that is put back as it was before every flip."""

    def __init__(self, start: Callable[[Path], None], place: Path) -> None:
        self.name = start.__name__
        self.root = place / self.name / "store"
        self.root.mkdir(parents=True)
        start(self.root)
        self.partition = self.root / "orders-0"
        self.files = {
            path: path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            # The reserve is room and nothing else: its bytes are never read.
            if path.is_file() and path.name not in (".lock", RESERVE_NAME)
        }
        self.stamps: dict[Path, tuple[int, int, int]] = {}  # of files that are as they were

    def restore(self) -> None:
        """Make again only what is no longer as it was."""
        left = dict(self.files)
        for folder in (self.root, self.partition):
            for entry in os.scandir(folder):
                path = Path(entry.path)
                if path not in self.files:
                    if entry.is_file() and entry.name not in (".lock", RESERVE_NAME):
                        path.unlink()
                elif self.stamps.get(path) == stamp(entry.stat()):
                    del left[path]
        for path, contents in left.items():
            self.put(path, contents)
            self.stamps[path] = stamp(path.stat())

    def put(self, path: Path, contents: bytes | bytearray) -> None:
        self.stamps.pop(path, None)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(fd, contents)
        os.close(fd)

    # ---- the ways in ----

    def read_partition(self) -> tuple[Seen, RecoveryReport]:
        with Partition.open(self.partition, readonly=True, config=CONFIG) as log:
            return look(log), log.recovery

    def write_partition(self) -> tuple[Seen, RecoveryReport]:
        log = Partition.open(self.partition, durability="os", config=CONFIG)
        try:
            return look(log), log.recovery
        finally:
            log.parts.discard()

    def read_store(self) -> tuple[Seen, RecoveryReport | None]:
        with logstore.open(self.root, readonly=True) as store:
            return look_at_store(store), None

    def write_store(self) -> tuple[Seen, RecoveryReport | None]:
        with logstore.open(self.root, durability="os") as store:
            return look_at_store(store), None


def kind_of(path: Path) -> str:
    """``.log`` for a segment's log, the name for a file there is one of."""
    return path.suffix if path.name[:1].isdigit() else path.name


def flips(contents: bytes, share: int, shares: int) -> Iterator[tuple[int, int]]:
    """(byte, bit) of this share."""
    for position in range(share, len(contents), shares):
        for bit in range(8):
            yield position, bit


class Campaign:
    def __init__(self, sample: Sample, share: int, shares: int) -> None:
        self.sample = sample
        self.share, self.shares = share, shares
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def flip_all(
        self,
        files: list[Path],
        way: Callable[[], tuple[Seen, RecoveryReport | None]],
        *,
        writes: bool,
        cut_to: int | None = None,
        or_else: Seen | None = None,
    ) -> None:
        """`cut_to`: where a torn tail may begin, in records; `or_else`: what is as right."""
        sample = self.sample
        sample.restore()
        expected = way()[0]
        if writes:
            sample.restore()
        for path in files:
            contents = sample.files[path]
            for position, bit in flips(contents, self.share, self.shares):
                damaged = bytearray(contents)
                damaged[position] ^= 1 << bit
                sample.put(path, damaged)
                where = f"byte {position} bit {bit}"
                self.count(path, way, (expected, or_else), where, cut_to)
                if writes:
                    sample.restore()
            sample.put(path, contents)

    def count(
        self,
        path: Path,
        way: Callable[[], tuple[Seen, RecoveryReport | None]],
        right: tuple[Seen, Seen | None],
        where: str,
        cut_to: int | None,
    ) -> None:
        expected = right[0]
        what = f"{self.sample.name} {way.__name__} {kind_of(path)}"
        self.counts["flips"] += 1
        self.counts[kind_of(path)] += 1
        try:
            seen, report = way()
        except (LogStoreError, ConfigError):
            self.counts["told"] += 1
            return
        except FileNotFoundError as error:
            if path.name != "logstore.topics" or "this partition's directory is gone" not in str(
                error
            ):
                self.violations.append(f"{what} {where}: {error}")
            self.counts["told"] += 1
            return
        except Exception as error:  # noqa: BLE001  any other error is a finding
            self.violations.append(f"{what} {where}: {type(error).__name__}: {error}")
            return
        if seen in right:
            self.counts["equal"] += 1
        elif report is not None and report.torn and cut_to is not None and path.suffix == ".log":
            if seen[2] != expected[2][:cut_to]:
                self.violations.append(f"{what} {where}: cut too far")
            self.counts["torn"] += 1
        else:
            self.violations.append(f"{what} {where}: {differences(expected, seen)}")


def differences(expected: Seen, seen: Seen) -> str:
    names = ("start", "end", "records", "committed", "found", "times")
    if len(expected) != 6:
        if [topic[0] for topic in expected] != [topic[0] for topic in seen]:
            return f"other topics: {[topic[0] for topic in seen]}"
        expected, seen = expected[0][1][0], seen[0][1][0]
    return "; ".join(
        f"{name}: {str(b)[:60]} instead of {str(a)[:60]}" if len(str(a)) < 200 else f"other {name}"
        for name, a, b in zip(names, expected, seen, strict=True)
        if a != b
    )


def one_of_each_kind(files: Iterable[Path]) -> set[Path]:
    """The smallest file of each kind that is not empty."""
    smallest: dict[str, Path] = {}
    for path in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        if path.stat().st_size:
            smallest[kind_of(path)] = path
    return set(smallest.values())


def run_share(share: int, shares: int, place: Path, which: str, only: str = "") -> dict[str, int]:
    counts: Counter[str] = Counter()
    violations: list[str] = []
    # Without the plan's help a compaction did not happen; a cut has no such excuse.
    uncompacted = Sample(whole, place / "before").read_partition()[0]
    for start in (whole, left_by_kill, swapping, swapped, cutting, cut):
        if only and only != start.__name__:
            continue
        sample = Sample(start, place)
        campaign = Campaign(sample, share, shares)
        chosen = one_of_each_kind(sample.files) if which == "each kind" else set(sample.files)
        inside = [path for path in sample.files if path.parent == sample.partition]
        at_root = [path for path in sample.files if path.parent == sample.root]
        inside = [path for path in inside if path in chosen]
        at_root = [path for path in at_root if path in chosen]
        if start is whole:
            campaign.flip_all(inside, sample.read_partition, writes=False)
            campaign.flip_all(inside, sample.write_partition, writes=True)
            campaign.flip_all(at_root, sample.read_store, writes=False)
            campaign.flip_all(at_root, sample.write_store, writes=True)
        elif start is left_by_kill:
            records = sample.write_partition()[0][2]
            campaign.flip_all(inside, sample.write_partition, writes=True, cut_to=len(records) - 1)
            campaign.flip_all(at_root, sample.write_store, writes=True)
        else:
            # What is special here: the plan, and the files that wait for their names.
            special = [p for p in inside if p.suffix in (".plan", ".swap", ".cleaned", ".deleted")]
            or_else = uncompacted if start in (swapping, swapped) else None
            for way in (sample.write_partition, sample.read_partition):
                writes = way.__name__.startswith("write")
                campaign.flip_all(special, way, writes=writes, or_else=or_else)
        counts += campaign.counts
        violations += campaign.violations
    for line in violations:
        print(line, file=sys.stderr)
    counts["violations"] = len(violations)
    return dict(counts)


KINDS = (
    *(".log", ".index", ".timeindex", ".txnindex", ".snapshot", ".summary", ".sum"),
    *("leader-epoch-checkpoint", "partition.metadata", "logstore.state", "logstore.durable"),
    *("meta.properties", "logstore.topics", ".kafka_cleanshutdown", "logstore.clean"),
    *("recovery-point-offset-checkpoint", "log-start-offset-checkpoint"),
    *("replication-offset-checkpoint", "cleaner-offset-checkpoint"),
    *("swap.plan", "truncate.plan", ".swap", ".cleaned", ".deleted", "logstore.start"),
)


ONE_FLIP_IN = sized(12, 1, 1)


def check_counts(counts: dict[str, int]) -> None:
    assert counts["violations"] == 0
    assert all(counts[kind] > 50 // ONE_FLIP_IN for kind in KINDS), counts
    assert counts["told"] > 0
    assert counts["equal"] > 0


@pytest.mark.campaign
def test_every_bit_of_a_file_of_every_kind_may_flip(run_shares: RunShares) -> None:
    check_counts(run_shares(__file__, "each kind", shares=2 * ONE_FLIP_IN, chosen=(0, ONE_FLIP_IN)))


@pytest.mark.slow
def test_every_bit_of_every_file_may_flip(run_shares: RunShares) -> None:
    check_counts(run_shares(__file__, "every file"))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    reader_view.SETTLE_SECONDS = 0.0  # there is no writer whose cut a reader could wait for
    only = sys.argv[5] if len(sys.argv) > 5 else ""
    with tempfile.TemporaryDirectory(dir=sys.argv[3]) as folder:
        counted = run_share(int(sys.argv[1]), int(sys.argv[2]), Path(folder), sys.argv[4], only)
    print(json.dumps(counted))
