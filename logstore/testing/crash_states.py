"""Crash states: the directories that a crash may leave after a prefix of the recorded calls."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from logstore.testing.disk_model import (
    SECTOR,
    Change,
    Disk,
    File,
    Folder,
    Node,
    Tree,
    applied,
)
from logstore.testing.io_calls import Operation, Trace

__all__ = ["Crash", "Model", "crash_states"]


_T = TypeVar("_T")

Model = Literal["kill", "ordered", "unordered"]

_SUBSETS_OF: Final = 10  # up to this many pending changes, all subsets are tried

_RANDOM_SUBSETS: Final = 20


@dataclass(frozen=True, slots=True)
class Crash:
    """A state of the disk after a crash, and the crash that leads to it."""

    model: Model
    """``kill``, or the model of names under which a power cut leaves this."""
    step: int
    """The number of operations that were done before the crash."""
    last: Operation | None
    """The last of them."""
    marks: tuple[Any, ...]
    """The marks before the crash."""
    tree: Tree = field(repr=False)
    """The files by their paths; None is a directory."""
    story: str = ""
    """Which changes are missing or torn."""

    @property
    def digest(self) -> bytes:
        """Return an eight-byte digest of the files; equal for equal files."""
        total = hashlib.blake2b(digest_size=8)
        for path in sorted(self.tree):
            content = self.tree[path]
            total.update(b"%d %b\0" % (-1 if content is None else len(content), path.encode()))
            total.update(_content_digest(content))
        return total.digest()

    def __str__(self) -> str:
        return f"{self.model} after step {self.step} ({self.last}): {self.story}"


# Most files are the same in many states: each content is hashed once.  Cleared when it is large.
_digests: dict[bytes, bytes] = {}


def _content_digest(content: bytes | None) -> bytes:
    if content is None:
        return b""
    known = _digests.get(content)
    if known is None:
        if len(_digests) > 20_000:
            _digests.clear()
        known = _digests[content] = hashlib.blake2b(content, digest_size=8).digest()
    return known


@dataclass(frozen=True, slots=True)
class _Choice:
    """The pending changes that are in a state."""

    model: Model
    names: frozenset[int]  # steps
    data: frozenset[int]
    torn: tuple[int, int, str] | None = None  # step, position in its data, bytes after it


def tree_at_the_end(trace: Trace) -> Tree:
    """Return the files that the calls of a recording leave if no crash interrupts them."""
    disk = Disk(trace.initial)
    for step, call in enumerate(trace.operations):
        if call.kind != "mark":
            disk.play(call, step)
    return _Builder(disk).tree(_Choice("kill", frozenset(), _all_data(disk)))


class _Builder:
    """Builds the tree of a choice.  File contents are cached, because many choices share them."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self._contents: dict[object, bytes] = {}

    def tree(self, choice: _Choice) -> Tree:
        tree: Tree = {}
        self._add(tree, "", self.disk.root, choice)
        return tree

    def _names(self, folder: Folder, choice: _Choice) -> dict[str, Node]:
        if choice.model == "kill":
            return folder.now
        # Ordered: one journal for all folders, of which a prefix lasts.  Unordered: any subset of
        # the changes of each folder since its last sync.
        ordered = choice.model == "ordered"
        names = dict(folder.committed if ordered else folder.durable)
        for change in self.disk.journal if ordered else folder.pending:
            if change.folder is folder and change.step in choice.names:
                change.apply(names)
        return names

    def _add(self, tree: Tree, above: str, folder: Folder, choice: _Choice) -> None:
        for name, node in self._names(folder, choice).items():
            path = f"{above}{name}"
            if isinstance(node, Folder):
                tree[path] = None
                self._add(tree, f"{path}/", node, choice)
            else:
                tree[path] = self._content(node, choice)

    def _content(self, file: File, choice: _Choice) -> bytes:
        if not file.pending:
            return file.durable
        chosen = [change for change in file.pending if change.step in choice.data]
        torn = choice.torn
        if torn is not None and chosen and chosen[-1].step == torn[0]:
            before = self._remember(file, chosen[:-1])
            return _torn(before, chosen[-1], torn[1], torn[2])
        return self._remember(file, chosen)

    def _remember(self, file: File, chosen: list[Change]) -> bytes:
        # `version` changes with each sync, because `durable` is another base then.
        key = (id(file), file.version, *(change.step for change in chosen))
        known = self._contents.get(key)
        if known is None:
            if len(self._contents) > 4096:
                self._contents.clear()
            known = self._contents[key] = applied(file.durable, chosen)
        return known


def _garbage(count: int, seed: int) -> bytes:
    """Return pseudo-random bytes, the same for the same `seed`."""
    return random.Random(seed).randbytes(count)


def _torn(before: bytes, change: Change, at: int, rest: str) -> bytes:
    """Return `before` with the first `at` bytes of a write applied; `rest` fills the others."""
    data = change.data
    assert data is not None
    end = change.position + len(data)
    content = bytearray(before)
    if rest == "old":
        piece = data[:at]
    elif rest == "zeros":
        piece = data[:at] + bytes(len(data) - at)
    elif rest == "garbage":
        piece = data[:at] + _garbage(len(data) - at, at)
    else:  # "head missing": a later sector was written, an earlier one was not
        kept = before[change.position : change.position + at]
        piece = kept + bytes(at - len(kept)) + data[at:]
    if change.position > len(content):
        content.extend(bytes(change.position - len(content)))
    content[change.position : min(end, change.position + len(piece))] = piece
    return bytes(content)


def _tears(change: Change) -> Iterator[int]:
    """Yield positions to tear a write: every byte of a small write, else sector boundaries."""
    assert change.data is not None
    size = len(change.data)
    if size <= SECTOR:
        yield from range(size)
        return
    first = SECTOR - change.position % SECTOR
    yield 0
    yield from range(first, size, SECTOR)
    yield size - 1


def crash_states(
    trace: Trace,
    *,
    models: Sequence[Model] = ("kill", "ordered", "unordered"),
    per_step: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Crash]:
    """Yield every state that a crash may leave after each call of a recording.

    `per_step` limits the torn writes and subsets after one call in one model to a sample, which is
    the same for the same `seed`.  A `shard` (i, n) takes every n-th call.  The same state may be
    yielded more than once; see `Crash.digest`.
    """
    disk = Disk(trace.initial)
    builder = _Builder(disk)
    marks: list[Any] = []
    operations = trace.operations
    changed = True  # the state before the first call is tried too
    last: Operation | None = None
    for step in range(len(operations) + 1):
        # One step more than there are calls: the state after the last call.
        upcoming = operations[step] if step < len(operations) else None
        mine = step % shard[1] == shard[0]
        # A call that changes nothing on disk leaves the states of the step before.
        if mine and (changed or upcoming is None):
            for choice, story in _choices(disk, models, per_step, seed + step):
                tree = builder.tree(choice)
                yield Crash(choice.model, step, last, tuple(marks), tree, story)
        if mine and upcoming is not None and "kill" in models:
            yield from _killed_inside(disk, upcoming, step, last, tuple(marks))
        if upcoming is None:
            return
        if upcoming.kind == "mark":
            marks.append(upcoming.mark)
            # A mark is a new promise: the same files are judged again with it.
            changed = True
        else:
            changed = disk.play(upcoming, step)
        last = upcoming


def _killed_inside(
    disk: Disk, call: Operation, step: int, last: Operation | None, marks: tuple[Any, ...]
) -> Iterator[Crash]:
    """Yield the states of a kill during a write: a prefix of it is in the page cache."""
    if call.kind != "pwrite" or not call.performed or not call.data:
        return
    node = disk.files.get(call.fd) or disk.find(call.path)
    if not isinstance(node, File):
        return
    size = len(call.data)
    tree = _Builder(disk).tree(_Choice("kill", frozenset(), _all_data(disk)))
    before = node.now()
    # A signal can stop a write after any byte; these four places stand for all.
    for at in sorted({1, size // 3, size // 2, size - 1} - {0, size}):
        change = Change(step, node, call.position, call.data, 0)
        torn = {
            path: _torn(before, change, at, "old") if disk.find(path) is node else content
            for path, content in tree.items()
        }
        story = f"{at} of the {size} bytes of {call} were written"
        yield Crash("kill", step, last, marks, torn, story)


def _all_data(disk: Disk) -> frozenset[int]:
    files = disk.pending_files(disk.folders())
    return frozenset(change.step for file in files for change in file.pending)


def _choices(
    disk: Disk, models: Sequence[Model], per_step: int | None, seed: int
) -> Iterator[tuple[_Choice, str]]:
    folders = disk.folders()
    files = disk.pending_files(folders)
    changes = [change for file in files for change in file.pending]
    data = frozenset(change.step for change in changes)
    if "kill" in models:
        yield _Choice("kill", frozenset(), data), "everything was done"
    writes = [change for change in changes if change.data]
    # Only the newest write is torn: an earlier one was torn in the steps after it.
    newest = max(writes, key=lambda change: change.step, default=None)
    if newest is not None and newest.step != newest.file.pending[-1].step:
        newest = None  # a truncation removed it
    for model in models:
        if model == "ordered":
            journal = [change.step for change in disk.journal]
            yield from _ordered(journal, data, newest, per_step, seed)
        elif model == "unordered":
            names = frozenset(c.step for folder in folders for c in folder.pending)
            yield from _unordered(names, data, newest, per_step, seed)


def _torn_choices(
    model: Model,
    names: frozenset[int],
    data: frozenset[int],
    change: Change | None,
    limit: int | None,
    seed: int,
) -> Iterator[tuple[_Choice, str]]:
    if change is None:
        return
    assert change.data is not None
    size = len(change.data)
    tears = [
        (at, rest)
        for at in _tears(change)
        for rest in ("old", "zeros", "garbage", "head missing")
        # At 0, "old" is a state without the write and "head missing" one with all of it.
        if at or rest in ("zeros", "garbage")
    ]
    for at, rest in _sample(tears, limit, seed):
        choice = _Choice(model, names, data, (change.step, at, rest))
        yield choice, f"write of step {change.step} torn at {at} of {size}, rest {rest}"


def _sample(found: list[_T], limit: int | None, seed: int) -> list[_T]:
    if limit is None or len(found) <= limit:
        return found
    return random.Random(seed).sample(found, limit)


def _ordered(
    journal: list[int],
    data: frozenset[int],
    newest: Change | None,
    per_step: int | None,
    seed: int,
) -> Iterator[tuple[_Choice, str]]:
    everything = frozenset(journal)
    none: frozenset[int] = frozenset()
    for count in range(len(journal) + 1):
        names = frozenset(journal[:count])
        for chosen, which in ((data, "all"), (none, "no")):
            story = f"{count} of {len(journal)} changes of names, {which} data"
            yield _Choice("ordered", names, chosen), story
    for step in data:
        yield _Choice("ordered", everything, data - {step}), f"data of step {step} missing"
        yield _Choice("ordered", everything, frozenset({step})), f"data of step {step} alone"
    yield from _torn_choices("ordered", everything, data, newest, per_step, seed)
    subsets = list(_subsets_with(range(len(journal) + 1), data, seed))
    for count, chosen in _sample(subsets, per_step, seed):
        story = f"{count} of {len(journal)} changes of names, data of {sorted(chosen)}"
        yield _Choice("ordered", frozenset(journal[:count]), chosen), story


def _subsets_with(
    counts: range, data: frozenset[int], seed: int
) -> Iterator[tuple[int, frozenset[int]]]:
    steps = sorted(data)
    # All subsets if they are few, else a random sample.
    if len(counts) << len(steps) <= 1 << _SUBSETS_OF:
        for count in counts:
            for mask in range(1 << len(steps)):
                yield count, frozenset(s for i, s in enumerate(steps) if mask >> i & 1)
        return
    chance = random.Random(seed)
    for _ in range(_RANDOM_SUBSETS):
        chosen = frozenset(step for step in steps if chance.random() < 0.5)
        yield chance.choice(counts), chosen


def _unordered(
    names: frozenset[int],
    data: frozenset[int],
    newest: Change | None,
    per_step: int | None,
    seed: int,
) -> Iterator[tuple[_Choice, str]]:
    none: frozenset[int] = frozenset()
    yield _Choice("unordered", names, data), "everything lasts"
    yield _Choice("unordered", none, none), "nothing lasts"
    yield _Choice("unordered", names, none), "names last, data does not"
    yield _Choice("unordered", none, data), "data lasts, names do not"
    for step in names:
        yield _Choice("unordered", names - {step}, data), f"name of step {step} missing"
        yield _Choice("unordered", frozenset({step}), none), f"name of step {step} alone"
        yield _Choice("unordered", frozenset({step}), data), f"name of step {step}, all data"
    for step in data:
        yield _Choice("unordered", names, data - {step}), f"data of step {step} missing"
        yield _Choice("unordered", none, frozenset({step})), f"data of step {step} alone"
        yield _Choice("unordered", names, frozenset({step})), f"names, data of step {step}"
    # A different sample of tears than in the ordered model, so that more are tried in all.
    yield from _torn_choices("unordered", names, data, newest, per_step, ~seed)
    subsets = list(_subsets_with(range(1), names | data, seed))
    for _, chosen in _sample(subsets, per_step, seed):
        story = f"of the pending {sorted(names | data)} only {sorted(chosen)}"
        yield _Choice("unordered", chosen & names, chosen & data), story
