"""repair: makes a damaged log valid again, with as few changes as possible.

``repair(path)`` inspects and plans; ``repair(path, dry_run=False)`` makes the changes.  Indexes,
snapshots and checkpoints are made again from the log.  If records are lost, nothing is changed
without ``accept_loss=True``.  With it, the damaged bytes are removed, the records around them keep
their offsets, and the missing offsets are a gap, as after a compaction.

Invariant: no byte of the log is deleted.  Damaged bytes, and the side files that a step replaces,
are first copied or renamed to ``<name>.cut-<n>`` in the same directory.  A receipt
(``logstore.repair-<n>.json``) lists the changed files with their checksums before and after; it
exists, unfinished, before the first change.  If a repair is killed, each file is the old or the new
one, and the repair can be run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from logstore import _native
from logstore.checking.partition_check import CheckProgress, find_problems
from logstore.checking.problem import Problem, ProblemKind
from logstore.checking.root_check import RootInspection
from logstore.clock import SystemClock
from logstore.config import ConfigError, PartitionConfig
from logstore.errors import LogStoreError
from logstore.files.directory import Directory, copy_bytes
from logstore.files.lock import DirectoryLock
from logstore.files.names import base_offset_of, segment_name
from logstore.log.segment import Segment
from logstore.log.segment_contents import SegmentContents
from logstore.log.segment_digest import DIGEST_SUFFIX, SegmentDigest, digest, digest_of
from logstore.log.state import PartitionState
from logstore.log.topic_id import PARTITION_METADATA, topic_id_text
from logstore.partition.partition import Partition, open_in_store
from logstore.partition.view import LogView
from logstore.recovery.failed_sync import FailedSync
from logstore.recovery.loader import Claims
from logstore.recovery.swap_plan import SWAP_PLAN, RewrittenSegment, SwapPlan
from logstore.recovery.truncation_plan import TRUNCATION_PLAN
from logstore.root.catalogue import Catalogue, partition_directories
from logstore.root.clean_shutdown import CleanShutdown
from logstore.upkeep.repair_report import Receipt, Repair, RepairStep, file_digest

__all__ = ["repair"]

log = logging.getLogger("logstore.repair")


# The step for each kind of problem.  A kind in none of the four sets is only reported.
# Rename the file; the next open for writing makes it again from the log.
_SET_ASIDE = {
    ProblemKind.DAMAGED_DIGEST,
    ProblemKind.DAMAGED_TRANSACTION_INDEX,
    ProblemKind.DAMAGED_SNAPSHOT,
    ProblemKind.DAMAGED_LEADER_EPOCHS,
    ProblemKind.DAMAGED_STATE,
    ProblemKind.DAMAGED_CHECKPOINT,
}
# Rebuild the index files from the .log file.
_REBUILD = {
    ProblemKind.DAMAGED_INDEX,
    ProblemKind.MISSING_INDEX,
    ProblemKind.DAMAGED_TIME_INDEX,
}
# Open the partition for writing: recovery handles these.
_OPEN = {
    ProblemKind.TORN_TAIL,
    ProblemKind.DAMAGED_PLAN,
    ProblemKind.UNFINISHED_PLAN,
    ProblemKind.FAILED_SYNC,
}
# Steps that lose records, settings or an identity: only with accept_loss.
_LOSING = {
    ProblemKind.DAMAGED_BATCH: "cut the damaged bytes out",
    ProblemKind.DIGEST_MISMATCH: "accept the file, and write a new digest",
    ProblemKind.DAMAGED_CATALOGUE: "set it aside: topics get default settings",
    ProblemKind.DAMAGED_IDENTITY: "set it aside: the next open makes a new identity",
}


def repair(
    path: str | os.PathLike[str],
    *,
    dry_run: bool = True,
    accept_loss: bool = False,
    config: PartitionConfig | Mapping[str, Any] | None = None,
    progress: CheckProgress | None = None,
) -> Repair:
    """Plan the repair of a store or a partition; with ``dry_run=False``, also do it.

    Steps that lose records, settings or an identity need `accept_loss`.  The logs are opened with
    `config`.  Raise LockedError if another handle has the path open for writing.  An OSError leaves
    a part of the steps done: the receipt lists them, and the repair can be run again.
    """
    directory = Directory(path)
    try:
        return _Mender(directory, PartitionConfig.of(config), accept_loss, progress).run(dry_run)
    finally:
        directory.close()


class _Mender:
    def __init__(
        self,
        directory: Directory,
        config: PartitionConfig,
        accept_loss: bool,
        progress: CheckProgress | None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._accept_loss = accept_loss
        self._progress = progress
        names = directory.names()
        self._alone = any(name.endswith(".log") for name in names)
        self._lock: DirectoryLock | None = None

    def run(self, dry_run: bool) -> Repair:
        if dry_run:
            return self._plan(dry_run)
        # Before the lock is taken, because the open takes it.  A store's partitions are opened
        # under the store's lock: see `_finish_changes`.
        if self._alone and self._is_amid_a_change(self._directory):
            Partition.open(self._directory.path, config=self._config, create=False).close()
        self._lock = DirectoryLock(
            self._directory,
            root=not self._alone,
            under_parent=CleanShutdown.clear_for_partition,
        )
        try:
            self._finish_changes()
            done = self._plan(dry_run)
            if done.steps:
                self._apply(done)
        finally:
            self._lock.release()
            self._lock = None
        if self._alone and done.steps:
            # After the release, because the open takes the lock itself.  Recovery then makes the
            # files that were set aside.
            Partition.open(self._directory.path, config=self._config, create=False).close()
        return done

    def _is_amid_a_change(self, directory: Directory) -> bool:
        """Return whether a change of the files is unfinished.

        Recovery must finish it first: in between, correct files look damaged.
        """
        return any(map(directory.exists, (SWAP_PLAN, TRUNCATION_PLAN, FailedSync.NAME)))

    def _finish_changes(self) -> None:
        if self._alone:
            return
        for topic, numbers in partition_directories(self._directory.directories()).items():
            for number in numbers:
                with self._at(f"{topic}-{number}") as directory:
                    amid = self._is_amid_a_change(directory)
                if amid:
                    self._open_and_close(f"{topic}-{number}")

    # ---- inspecting and planning ----

    def _problems(self) -> list[Problem]:
        if self._alone:
            return self._problems_of(self._directory)
        problems = RootInspection(self._directory).run()
        for topic, numbers in partition_directories(self._directory.directories()).items():
            for number in numbers:
                below = self._directory.below(f"{topic}-{number}")
                try:
                    problems += self._problems_of(below)
                finally:
                    below.close()
        return problems

    def _problems_of(self, directory: Directory) -> list[Problem]:
        try:
            # Readonly: the inspection takes no lock, and a dry run changes nothing.
            with Partition.open(directory.path, readonly=True, config=self._config) as reader:
                return find_problems(reader.parts.view, deep=True, progress=self._progress)
        except (LogStoreError, OSError) as error:
            return [Problem(ProblemKind.UNOPENABLE_PARTITION, directory.path, str(error))]

    def _plan(self, dry_run: bool) -> Repair:
        done = Repair(self._directory.path, dry_run, [], [])
        by_path: dict[Path, list[Problem]] = {}
        for problem in self._problems():
            by_path.setdefault(problem.path, []).append(problem)
        for path, problems in by_path.items():
            steps, left = self._steps_for(path, problems)
            done.steps += steps
            done.left += left
        return done

    def _steps_for(
        self, path: Path, problems: Sequence[Problem]
    ) -> tuple[list[RepairStep], list[Problem]]:
        kinds = {problem.kind for problem in problems}
        found = tuple(problems)
        # One step for each file.  A kind in _LOSING decides it, in the order of that dict.
        if kinds & _LOSING.keys():
            kind = next(kind for kind in _LOSING if kind in kinds)
            if not self._accept_loss:
                return [], list(problems)
            if kind is ProblemKind.DAMAGED_BATCH:
                lost = tuple(p.offsets for p in problems if p.offsets is not None)
                return [RepairStep("cut", path, _LOSING[kind], found, lost)], []
            action = "accept" if kind is ProblemKind.DIGEST_MISMATCH else "set-aside"
            return [RepairStep(action, path, _LOSING[kind], found)], []
        if kinds & _REBUILD:
            return [RepairStep("rebuild", path, "rebuild it from the log", found)], []
        if kinds & _SET_ASIDE:
            return [RepairStep("set-aside", path, "set it aside, to be made again", found)], []
        if ProblemKind.DAMAGED_METADATA in kinds and self._topic_id_for(path) is not None:
            return [RepairStep("rewrite", path, "write it from the catalogue", found)], []
        if kinds & _OPEN and not self._is_root(path):
            return [RepairStep("open", path, "open the log, to finish or undo it", found)], []
        return [], list(problems)

    def _is_root(self, path: Path) -> bool:
        return not self._alone and path.parent == self._directory.path

    def _topic_id_for(self, path: Path) -> bytes | None:
        if self._alone:
            return None
        with contextlib.suppress(LogStoreError, OSError):
            entries = Catalogue.read(self._directory).entries
            entry = entries.get(path.parent.name.rpartition("-")[0])
            return None if entry is None else topic_id_text(entry.id)
        return None

    # ---- doing ----

    def _apply(self, done: Repair) -> None:
        receipt = Receipt(self._directory, done, self._accept_loss)
        done.receipt = receipt.path
        receipt.write(finished=False)  # before the first change
        touched: dict[str, None] = {}
        for step in done.steps:
            below = "" if self._alone or self._is_root(step.path) else step.path.parent.name
            if below:
                touched[below] = None
            with self._at(below) as directory:
                # Both digests are in the receipt, so that a later check can compare the files with
                # it.
                before = file_digest(directory, step.path.name)
                self._do(step, directory)
                receipt.note(step, before, file_digest(directory, step.path.name))
                log.warning("%s", step)
        # After all steps: a partition may have several, and recovery must see the result of all.
        for name in touched:
            self._open_and_close(name)
        receipt.write(finished=True)

    @contextlib.contextmanager
    def _at(self, below: str) -> Iterator[Directory]:
        if not below:
            yield self._directory
            return
        directory = self._directory.below(below)
        try:
            yield directory
        finally:
            directory.close()

    def _do(self, step: RepairStep, directory: Directory) -> None:
        name = step.path.name
        if step.action == "set-aside":
            if directory.exists(name):
                directory.rename(name, _free_name(directory, name))
                directory.sync()
        elif step.action == "rewrite":
            content = self._topic_id_for(step.path)
            assert content is not None
            _keep_copy(directory, name)  # before the file is replaced
            directory.replace(PARTITION_METADATA, content)
        elif step.action == "rebuild":
            self._rebuild(directory, base_offset_of(name))
        elif step.action == "accept":
            # The next close or Maintenance writes a digest of the bytes as they are.
            SegmentDigest.remove(directory, base_offset_of(name))
            directory.sync()
        elif step.action == "cut":
            self._cut(directory, base_offset_of(name), step.problems)

    def _segment(self, directory: Directory, base: int) -> Segment:
        """Return a segment without its neighbours, in which offsets may be missing."""
        return LogView(directory, self._config, SystemClock()).make_segment(base, False)

    def _rebuild(self, directory: Directory, base: int) -> None:
        """Rebuild both indexes, unless the .log file is damaged: then they cannot be complete."""
        segment = self._segment(directory, base)
        contents = segment.walk()
        if contents.stopped == "end":
            for suffix in (".index", ".timeindex"):
                _keep_copy(directory, segment_name(base, suffix))
            segment.write_indexes(contents, sync=True)
            directory.sync()
        segment.release()

    # ---- cutting damage out ----

    def _cut(self, directory: Directory, base: int, problems: Iterable[Problem]) -> None:
        """Replace a .log file by one without the damaged bytes.

        Order: copy the damaged bytes aside, allow gaps in the state file, write and sync the new
        files as .cleaned, then swap by a plan.  A crash before the plan is complete leaves the old
        files; after it, recovery finishes the swap.
        """
        name = segment_name(base, ".log")
        size = directory.size(name)
        holes = sorted(
            (max(p.position, 0), p.end_position if p.end_position >= 0 else size)
            for p in problems
            if p.kind is ProblemKind.DAMAGED_BATCH
        )
        self._keep_holes(directory, name, holes)  # synced before anything is replaced
        _allow_gaps(directory)
        target = f"{name}.cleaned"
        directory.unlink(target)  # of a repair that was interrupted
        _copy_around(directory, name, target, holes, size)
        contents = self._walk_cleaned(directory, base, target)
        files = {".index": contents.offsets, ".timeindex": contents.times}
        with contextlib.suppress(FileNotFoundError):
            files[".txnindex"] = directory.read(segment_name(base, ".txnindex"))
        found = digest_of(directory, target)
        assert found is not None
        if base != max(base_offset_of(each) for each in directory.names() if each.endswith(".log")):
            # Only a sealed segment has a digest: the last one is appended to.
            digests = {suffix: digest(content) for suffix, content in files.items()}
            files[DIGEST_SUFFIX] = SegmentDigest(found, digests).encode()
        for suffix, content in files.items():
            directory.write(f"{segment_name(base, suffix)}.cleaned", content, sync=True)
        directory.sync()
        plan = SwapPlan(RewrittenSegment(base, (".log", *files), *found), (base,))
        # The commit point: the new files are durable, and from here on recovery finishes the swap.
        plan.write(directory)
        plan.apply(directory)
        plan.finish(directory)

    def _keep_holes(
        self, directory: Directory, name: str, holes: Sequence[tuple[int, int]]
    ) -> None:
        source = directory.open(name)
        try:
            for start, end in holes:
                kept = directory.open(
                    _free_name(directory, name), write=True, create=True, exclusive=True
                )
                try:
                    copy_bytes(source, start, end, kept, 0)
                    kept.sync()
                finally:
                    kept.close()
        finally:
            source.close()

    def _walk_cleaned(self, directory: Directory, base: int, name: str) -> SegmentContents:
        file = directory.open(name)
        try:
            found = _native.scan_prefix(
                file, base, 0, file.size(), base, self._config.index_interval_bytes, False, None
            )
        finally:
            file.close()
        contents = SegmentContents(**found)
        if contents.stopped != "end":
            raise ConfigError(
                f"{directory.path / name} is still damaged at byte {contents.position} "
                f"({contents.reason}): nothing was replaced; check the partition again"
            )
        segment = self._segment(directory, base)
        return contents._replace(times=contents.final_times(segment.base_offset))

    def _open_and_close(self, name: str) -> None:
        """Open a partition for writing: recovery makes the files that were set aside."""
        open_in_store(
            self._directory,
            name,
            lock=self._lock,
            durability="fsync",
            config=self._config,
            clock=None,
            claims=Claims(),
        ).close()


def _free_name(directory: Directory, name: str) -> str:
    taken = set(directory.names())
    number = 1
    while f"{name}.cut-{number}" in taken:
        number += 1
    return f"{name}.cut-{number}"


def _keep_copy(directory: Directory, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        content = directory.read(name)
        directory.replace(_free_name(directory, name), content)


def _copy_around(
    directory: Directory, name: str, target: str, holes: Sequence[tuple[int, int]], size: int
) -> None:
    source = directory.open(name)
    try:
        new = directory.open(target, write=True, create=True, exclusive=True)
        try:
            # `at` is in the source, `position` in the target.  The empty hole at the end makes the
            # loop copy the bytes after the last one.
            at = position = 0
            for start, end in [*holes, (size, size)]:
                position = copy_bytes(source, at, start, new, position)
                at = max(at, end)  # holes may overlap
            new.sync()
        finally:
            new.close()
    finally:
        source.close()


def _allow_gaps(directory: Directory) -> None:
    """Allow missing offsets up to the end of the log.

    This is written before the first file is replaced: otherwise a crash in between would leave a
    gap that a later check reports as damage.
    """
    state = PartitionState.read(directory)
    if state is not None:
        changed = dataclasses.replace(
            state, clean=False, dense_from=max(state.dense_from, state.end_offset)
        )
        changed.write(directory)
