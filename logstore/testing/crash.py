"""The crash explorer: every state in which a crash could have left the disk, tried out.

It takes a recording (`logstore.testing.record_io`) and plays it on a disk of its own making, which
knows for every file what is durable and what is only in the page cache, and the same for the names
in every directory.  After each call it enumerates what a crash at this moment may leave:

- a kill: everything that was done, and any part of the write that was under way;
- a power cut: of what is not durable everything, nothing, each change alone missing and alone
  there, all subsets (or some, where there are many), the last write torn, its rest old, zeros or
  garbage, and a file grown without its data.

Names obey one of two models.  *ordered* is a journal: directory changes last in the order in which
they were made, and to sync a file is to make its name durable.  *unordered* promises nothing but
what was asked for: of the changes in directories that were not synced, any may be missing.

Each distinct state is written into a directory, the code under test recovers from it, and its
result is judged.  What was promised by then, the test has put into the recording as marks.

>>> import tempfile, logstore
>>> from logstore.testing import explore, record_io
>>> def run(directory):
...     with record_io(directory) as trace, logstore.Partition.open(directory + "/a-0") as log:
...         for value in (b"one", b"two"):
...             trace.mark((log.append(value), value))        # acknowledged, so it must survive
...     return trace
>>> def recover(directory, crash):
...     with logstore.Partition.open(directory + "/a-0") as log:
...         return {record.offset: record.value for record in log}
>>> def judge(found, crash):
...     for offset, value in crash.marks:
...         assert found[offset] == value
>>> with tempfile.TemporaryDirectory() as directory:
...     result = explore(run(directory), recover, judge)
>>> result.violations
[]
>>> result.distinct > 500
True
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from logstore import _files
from logstore.testing.io import Operation, Trace, record_io

__all__ = [
    "Crash",
    "CrashViolation",
    "Exploration",
    "Model",
    "Sandbox",
    "another_boot",
    "crash_states",
    "explore",
    "explore_recovery",
]

_T = TypeVar("_T")
Model = Literal["kill", "ordered", "unordered"]
Tree = dict[str, bytes | None]  # contents by path below the root; None is a directory

SECTOR: Final = 512
_SUBSETS_OF: Final = 10  # so many pending changes are tried in all combinations
_RANDOM_SUBSETS: Final = 20


# ---- the disk -------------------------------------------------------------------------------


class _File:
    """Contents that are durable, and what was done to them since."""

    __slots__ = ("durable", "pending", "version")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = durable
        self.pending: list[_Change] = []
        self.version = 0  # of `durable`

    def now(self) -> bytes:
        return _applied(self.durable, self.pending)


class _Folder:
    """Names, in the three stages of the two models."""

    __slots__ = ("committed", "durable", "now", "pending")

    def __init__(self) -> None:
        self.now: dict[str, _Node] = {}
        self.durable: dict[str, _Node] = {}  # unordered: as of the last sync
        self.pending: list[_Renaming] = []  # unordered: since then
        self.committed: dict[str, _Node] = {}  # ordered: as of the last commit of the journal


_Node = _File | _Folder


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A write, or with no data a change of size."""

    step: int
    file: _File
    position: int
    data: bytes | None
    size: int  # without data: the size from then on
    grows: bool = False  # allocate: never shortens


@dataclass(frozen=True, slots=True, eq=False)
class _Renaming:
    """A name that comes, goes, or both at once."""

    step: int
    folder: _Folder
    old: str | None
    new: str | None
    node: _Node

    def apply(self, names: dict[str, _Node]) -> None:
        if self.old is not None and names.get(self.old) is self.node:
            del names[self.old]
        if self.new is not None:
            names[self.new] = self.node


def _applied(content: bytes, changes: Sequence[_Change]) -> bytes:
    if not changes:
        return content
    result = bytearray(content)
    for change in changes:
        if change.data is None:
            if change.size >= len(result):
                result.extend(bytes(change.size - len(result)))
            elif not change.grows:
                del result[change.size :]
        else:
            end = change.position + len(change.data)
            if change.position > len(result):
                result.extend(bytes(change.position - len(result)))
            result[change.position : end] = change.data
    return bytes(result)


class _Disk:
    def __init__(self, initial: Tree) -> None:
        self.root = _Folder()
        self.files: dict[int, _Node] = {}  # by descriptor
        self.journal: list[_Renaming] = []
        self.step = 0
        for path in sorted(initial):
            content = initial[path]
            self._enter(path, _Folder() if content is None else _File(content))

    def _enter(self, path: str, node: _Node) -> None:
        folder, name = self._place(path)
        folder.now[name] = folder.durable[name] = folder.committed[name] = node

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        assert isinstance(folder, _Folder), path
        return folder, name

    def find(self, path: str) -> _Node | None:
        node: _Node | None = self.root
        for name in path.split("/") if path else ():
            if not isinstance(node, _Folder):
                return None
            node = node.now.get(name)
        return node

    def play(self, call: Operation, step: int) -> bool:
        """Do what a call did; whether anything that a crash could leave is different now."""
        self.step = step
        if not call.performed:
            return False
        kind = call.kind
        if kind in ("pwrite", "truncate", "allocate", "datasync", "sync"):
            node = self.files.get(call.fd)
            if node is None:
                node = self.find(call.path)
            if node is None:
                return False  # opened before the recording, and deleted since
            return self._on_file(node, call)
        if kind == "open":
            return self._open(call)
        if kind == "close":
            self.files.pop(call.fd, None)
            return False
        if kind in ("rename", "unlink", "rmdir", "mkdir"):
            folder, name = self._place(call.path)
            if kind == "mkdir":
                self._change(folder, None, name, _Folder())
            elif kind == "rename":
                assert call.target is not None
                self._change(folder, name, call.target.rpartition("/")[2], folder.now[name])
            else:
                self._change(folder, name, None, folder.now[name])
            return True
        return False

    def _open(self, call: Operation) -> bool:
        node = self.find(call.path)
        created = node is None
        if node is None:
            folder, name = self._place(call.path)
            node = _File()
            self._change(folder, None, name, node)
        self.files[call.result] = node
        return created

    def _on_file(self, node: _Node, call: Operation) -> bool:
        if isinstance(node, _Folder):
            assert call.kind == "sync", call
            return self._sync_folder(node)
        if call.kind == "pwrite":
            assert call.data is not None, "record with data=True"
            node.pending.append(_Change(self.step, node, call.position, call.data, 0))
        elif call.kind == "truncate":
            node.pending.append(_Change(self.step, node, 0, None, call.size))
        elif call.kind == "allocate":
            end = call.position + call.size
            node.pending.append(_Change(self.step, node, 0, None, end, grows=True))
        else:
            self._commit([c.step for c in self.journal if c.node is node])
            if not node.pending:
                return False
            node.durable, node.pending = node.now(), []
            node.version += 1
        return True

    def _sync_folder(self, folder: _Folder) -> bool:
        self._commit([c.step for c in self.journal if c.folder is folder])
        changed = bool(folder.pending)
        folder.durable, folder.pending = dict(folder.now), []
        return changed

    def _commit(self, steps: list[int]) -> None:
        """The journal lasts up to the last of these."""
        if not steps:
            return
        last = max(steps)
        for change in self.journal:
            if change.step <= last:
                change.apply(change.folder.committed)
        self.journal = [change for change in self.journal if change.step > last]

    def _change(self, folder: _Folder, old: str | None, new: str | None, node: _Node) -> None:
        change = _Renaming(self.step, folder, old, new, node)
        change.apply(folder.now)
        folder.pending.append(change)
        self.journal.append(change)

    def folders(self) -> list[_Folder]:
        """Every folder that some state may show."""
        found: list[_Folder] = [self.root]
        for folder in found:
            for node in self._shown(folder):
                if isinstance(node, _Folder) and node not in found:
                    found.append(node)
        return found

    def _shown(self, folder: _Folder) -> Iterator[_Node]:
        yield from folder.durable.values()
        yield from folder.committed.values()
        for change in folder.pending:
            yield change.node

    def pending_files(self, folders: list[_Folder]) -> list[_File]:
        found: dict[int, _File] = {}
        for folder in folders:
            for node in self._shown(folder):
                if isinstance(node, _File) and node.pending:
                    found[id(node)] = node
        return list(found.values())


# ---- one state ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crash:
    """A state of the disk after a crash, and how it came about."""

    model: Model
    """``kill``, or the model of names under which a power cut leaves this."""
    step: int
    """So many operations of the recording were done."""
    last: Operation | None
    """The last of them."""
    marks: tuple[Any, ...]
    """All marks that came before."""
    tree: Tree = field(repr=False)
    """The files by their paths; None is a directory."""
    story: str = ""
    """Which changes are missing or torn."""

    @property
    def digest(self) -> bytes:
        """Eight bytes that stand for the files, whatever led to them."""
        total = hashlib.blake2b(digest_size=8)
        for path in sorted(self.tree):
            content = self.tree[path]
            total.update(b"%d %b\0" % (-1 if content is None else len(content), path.encode()))
            total.update(_content_digest(content))
        return total.digest()

    def __str__(self) -> str:
        return f"{self.model} after step {self.step} ({self.last}): {self.story}"


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
    """What of the pending changes is there."""

    model: Model
    names: frozenset[int]  # steps
    data: frozenset[int]
    torn: tuple[int, int, str] | None = None  # step, position in its data, what is behind it


def tree_at_the_end(trace: Trace) -> Tree:
    """Return the files that the calls of a recording leave if no crash interrupts them."""
    disk = _Disk(trace.initial)
    for step, call in enumerate(trace.operations):
        if call.kind != "mark":
            disk.play(call, step)
    return _Builder(disk).tree(_Choice("kill", frozenset(), _all_data(disk)))


class _Builder:
    """Makes trees of choices; remembers contents, which come again and again."""

    def __init__(self, disk: _Disk) -> None:
        self.disk = disk
        self._contents: dict[object, bytes] = {}

    def tree(self, choice: _Choice) -> Tree:
        tree: Tree = {}
        self._add(tree, "", self.disk.root, choice)
        return tree

    def _names(self, folder: _Folder, choice: _Choice) -> dict[str, _Node]:
        if choice.model == "kill":
            return folder.now
        ordered = choice.model == "ordered"
        names = dict(folder.committed if ordered else folder.durable)
        for change in self.disk.journal if ordered else folder.pending:
            if change.folder is folder and change.step in choice.names:
                change.apply(names)
        return names

    def _add(self, tree: Tree, above: str, folder: _Folder, choice: _Choice) -> None:
        for name, node in self._names(folder, choice).items():
            path = f"{above}{name}"
            if isinstance(node, _Folder):
                tree[path] = None
                self._add(tree, f"{path}/", node, choice)
            else:
                tree[path] = self._content(node, choice)

    def _content(self, file: _File, choice: _Choice) -> bytes:
        if not file.pending:
            return file.durable
        chosen = [change for change in file.pending if change.step in choice.data]
        torn = choice.torn
        if torn is not None and chosen and chosen[-1].step == torn[0]:
            before = self._remember(file, chosen[:-1])
            return _torn(before, chosen[-1], torn[1], torn[2])
        return self._remember(file, chosen)

    def _remember(self, file: _File, chosen: list[_Change]) -> bytes:
        key = (id(file), file.version, *(change.step for change in chosen))
        known = self._contents.get(key)
        if known is None:
            if len(self._contents) > 4096:
                self._contents.clear()
            known = self._contents[key] = _applied(file.durable, chosen)
        return known


def _garbage(count: int, seed: int) -> bytes:
    """Bytes that are neither zeros nor anything that was written; always the same."""
    return random.Random(seed).randbytes(count)


def _torn(before: bytes, change: _Change, at: int, rest: str) -> bytes:
    """`before` with a write of which `at` bytes have arrived, and the others not."""
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
    else:  # "head missing": a later sector arrived, an earlier one did not
        kept = before[change.position : change.position + at]
        piece = kept + bytes(at - len(kept)) + data[at:]
    if change.position > len(content):
        content.extend(bytes(change.position - len(content)))
    content[change.position : min(end, change.position + len(piece))] = piece
    return bytes(content)


def _tears(change: _Change) -> Iterator[int]:
    """Where a write is torn: at each byte when it is small, else where sectors begin."""
    assert change.data is not None
    size = len(change.data)
    if size <= SECTOR:
        yield from range(size)
        return
    first = SECTOR - change.position % SECTOR
    yield 0
    yield from range(first, size, SECTOR)
    yield size - 1


# ---- all states -----------------------------------------------------------------------------


def crash_states(
    trace: Trace,
    *,
    models: Sequence[Model] = ("kill", "ordered", "unordered"),
    per_step: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Crash]:
    """Every state that a crash may leave, after each call of a recording in turn.

    `per_step` bounds how many torn writes and subsets are tried after one call and in one model: a
    sample, always the same for a `seed`.  A `shard` (i, n) takes every n-th call.  States may come
    again; see `Crash.digest`.
    """
    disk = _Disk(trace.initial)
    builder = _Builder(disk)
    marks: list[Any] = []
    operations = trace.operations
    changed = True  # also the state before the first call counts
    last: Operation | None = None
    for step in range(len(operations) + 1):
        upcoming = operations[step] if step < len(operations) else None
        mine = step % shard[1] == shard[0]
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
            changed = True
        else:
            changed = disk.play(upcoming, step)
        last = upcoming


def _killed_inside(
    disk: _Disk, call: Operation, step: int, last: Operation | None, marks: tuple[Any, ...]
) -> Iterator[Crash]:
    """A kill can stop a write half-way: its beginning is in the page cache then."""
    if call.kind != "pwrite" or not call.performed or not call.data:
        return
    node = disk.files.get(call.fd) or disk.find(call.path)
    if not isinstance(node, _File):
        return
    size = len(call.data)
    tree = _Builder(disk).tree(_Choice("kill", frozenset(), _all_data(disk)))
    before = node.now()
    for at in sorted({1, size // 3, size // 2, size - 1} - {0, size}):
        change = _Change(step, node, call.position, call.data, 0)
        torn = {
            path: _torn(before, change, at, "old") if disk.find(path) is node else content
            for path, content in tree.items()
        }
        story = f"{at} of the {size} bytes of {call} were written"
        yield Crash("kill", step, last, marks, torn, story)


def _all_data(disk: _Disk) -> frozenset[int]:
    files = disk.pending_files(disk.folders())
    return frozenset(change.step for file in files for change in file.pending)


def _choices(
    disk: _Disk, models: Sequence[Model], per_step: int | None, seed: int
) -> Iterator[tuple[_Choice, str]]:
    folders = disk.folders()
    files = disk.pending_files(folders)
    changes = [change for file in files for change in file.pending]
    data = frozenset(change.step for change in changes)
    if "kill" in models:
        yield _Choice("kill", frozenset(), data), "everything was done"
    writes = [change for change in changes if change.data]
    newest = max(writes, key=lambda change: change.step, default=None)
    if newest is not None and newest.step != newest.file.pending[-1].step:
        newest = None  # cut off since
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
    change: _Change | None,
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
        if at or rest in ("zeros", "garbage")  # otherwise nothing, or everything, is there
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
    newest: _Change | None,
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
    newest: _Change | None,
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
    # In this model another sample of tears: together they are more.
    yield from _torn_choices("unordered", names, data, newest, per_step, ~seed)
    subsets = list(_subsets_with(range(1), names | data, seed))
    for _, chosen in _sample(subsets, per_step, seed):
        story = f"of the pending {sorted(names | data)} only {sorted(chosen)}"
        yield _Choice("unordered", chosen & names, chosen & data), story


# ---- trying them ----------------------------------------------------------------------------


def directory_in_memory(prefix: str) -> str:
    """Make a temporary directory, in memory if the machine has such a place; return its path."""
    memory = "/dev/shm"
    usable = os.path.isdir(memory) and os.access(memory, os.W_OK)
    return tempfile.mkdtemp(prefix=prefix, dir=memory if usable else None)


_LONG_AGO: Final = 1_500_000_000_000_000_000  # ns; a file that recovery writes to is younger


class Sandbox:
    """A directory that is made to hold one tree after another; only differences are written.

    Without a path it is a temporary one, in memory where the machine has such a place.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._temporary = path is None
        self.path = directory_in_memory("logstore-crash-") if path is None else os.fspath(path)
        self._held: dict[str, tuple[bytes, int]] = {}  # contents and inode

    def put(self, tree: Tree) -> None:
        """Make the directory hold `tree` and nothing else."""
        kept: set[str] = set()
        self._clear(self.path, "", tree, kept)
        for path in sorted(tree):
            content = tree[path]
            if path in kept:
                continue
            full = f"{self.path}/{path}"
            if content is None:
                os.mkdir(full)
                continue
            fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if content:
                    os.write(fd, content)
                os.utime(fd, ns=(_LONG_AGO, _LONG_AGO))
                self._held[path] = content, os.fstat(fd).st_ino
            finally:
                os.close(fd)

    def _clear(self, above: str, prefix: str, tree: Tree, kept: set[str]) -> None:
        with os.scandir(above) as entries:
            found = list(entries)
        for entry in found:
            path = f"{prefix}{entry.name}"
            wanted = tree.get(path, b"")
            if entry.is_dir(follow_symlinks=False):
                if path in tree and wanted is None:
                    kept.add(path)
                    self._clear(entry.path, f"{path}/", tree, kept)
                else:
                    shutil.rmtree(entry.path)
            elif path in tree and self._is_still(path, entry, wanted):
                kept.add(path)
            else:
                os.unlink(entry.path)
                self._held.pop(path, None)

    def _is_still(self, path: str, entry: os.DirEntry[str], wanted: bytes | None) -> bool:
        held = self._held.get(path)
        if held is None or (held[0] is not wanted and held[0] != wanted):
            return False
        status = entry.stat(follow_symlinks=False)
        return status.st_mtime_ns == _LONG_AGO and status.st_ino == held[1]

    def close(self) -> None:
        """Remove the directory, if it is a temporary one."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def another_boot(name: str | None = "after a power cut") -> Iterator[None]:
    """The machine has booted again, as far as logstore can tell, until the block ends.

    With None logstore reads the machine's real boot id.
    """
    before = _files.boot_override
    _files.boot_override = name
    try:
        yield
    finally:
        _files.boot_override = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What recovery reports is to be expected here, thousands of times."""
    logger = logging.getLogger("logstore")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


Recover = Callable[[str, Crash], Any]
Judge = Callable[[Any, Crash], None]


@dataclass(frozen=True, slots=True, repr=False)
class CrashViolation:
    """A crash after which a promise was broken."""

    crash: Crash
    error: str
    """The exception, with the last calls that led to it."""

    def __str__(self) -> str:
        return f"{self.crash}\n{self.error}"

    __repr__ = __str__


@dataclass(slots=True, repr=False)
class Exploration:
    """What came of it.  Its repr is its str: a test that fails shows the violations."""

    steps: int = 0
    """Calls of the recording after which a crash was tried."""
    tried: int = 0
    """States that were judged; one that is judged against other promises counts again."""
    digests: set[bytes] = field(default_factory=set)
    """Of the distinct states."""
    violations: list[CrashViolation] = field(default_factory=list)

    @property
    def distinct(self) -> int:
        """How many different states of the disk were recovered from."""
        return len(self.digests)

    def add(self, other: Exploration) -> None:
        """Take another's figures into this one."""
        self.steps += other.steps
        self.tried += other.tried
        self.digests |= other.digests
        self.violations += other.violations

    def __str__(self) -> str:
        figures = f"{self.distinct} distinct states after {self.steps} calls, {self.tried} judged"
        return "\n".join(
            [f"{figures}, {len(self.violations)} violations", *map(str, self.violations)]
        )

    __repr__ = __str__


def explore(
    trace: Trace,
    recover: Recover,
    judge: Judge | None = None,
    *,
    models: Sequence[Model] = ("kill", "ordered", "unordered"),
    per_step: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    sandbox: Sandbox | None = None,
    violations_max: int = 3,
    stop_after: int | None = None,
    skip: Container[bytes] = (),
) -> Exploration:
    """Recover from every state that a crash may have left, and judge what came of it.

    `recover(path, crash)` opens what is in the directory and tells what it found; `judge(found,
    crash)` raises AssertionError when that breaks a promise that ``crash.marks`` tells of.
    Recovery is run once for a distinct state, judging again whenever there are new marks.  After a
    power cut logstore is made to believe that the machine has booted.  Any exception of either is a
    violation; after `violations_max` of them, or `stop_after` distinct states, it ends.  States
    whose digests are in `skip` were tried before.
    """
    own = sandbox is None
    box = sandbox or Sandbox()
    result = Exploration()
    known: dict[tuple[bytes, bool], Any] = {}
    judged: set[tuple[bytes, bool, int]] = set()
    last_step = -1
    try:
        for crash in crash_states(trace, models=models, per_step=per_step, seed=seed, shard=shard):
            if crash.step != last_step:
                result.steps += 1
                last_step = crash.step
            digest, power = crash.digest, crash.model != "kill"
            if (digest, power, len(crash.marks)) in judged or digest in skip:
                continue
            judged.add((digest, power, len(crash.marks)))
            result.tried += 1
            result.digests.add(digest)
            try:
                if (digest, power) not in known:
                    box.put(crash.tree)
                    with _quiet(), another_boot("after a power cut" if power else None):
                        known[digest, power] = recover(box.path, crash)
                if judge is not None:
                    judge(known[digest, power], crash)
            except Exception as error:  # noqa: BLE001  whatever it is, it must not be
                text = "".join(traceback.format_exception(error, limit=-3))
                result.violations.append(CrashViolation(crash, text))
                if len(result.violations) >= violations_max:
                    break
            if stop_after is not None and result.distinct >= stop_after:
                break
    finally:
        if own:
            box.close()
    return result


def explore_recovery(
    crash: Crash,
    recover: Recover,
    judge: Judge | None = None,
    *,
    per_step: int | None = None,
    seed: int = 0,
    sandbox: Sandbox | None = None,
    violations_max: int = 3,
) -> Exploration:
    """Crash again, at every call of the recovery from `crash`, and recover from that.

    Each second recovery must come to what the first, left alone, comes to; and `judge` is asked as
    it would be after the first crash.
    """
    power = crash.model != "kill"
    own = sandbox is None
    box = sandbox or Sandbox()
    try:
        box.put(crash.tree)
        first_boot = another_boot("the first recovery" if power else None)
        with _quiet(), first_boot, record_io(box.path) as trace:
            expected = recover(box.path, crash)

        def judge_again(found: Any, _: Crash) -> None:
            if judge is not None:
                judge(found, crash)
            if found != expected:
                raise AssertionError(
                    f"a recovery that was stopped came to {found}\n"
                    f"left alone it comes to {expected}\nthe first crash was: {crash}"
                )

        models: tuple[Model, ...] = ("kill", "ordered", "unordered") if power else ("kill",)

        def recover_again(path: str, again: Crash) -> Any:
            if again.model == "kill" and power:
                with another_boot("the first recovery"):
                    return recover(path, crash)
            return recover(path, crash)

        return explore(
            trace,
            recover_again,
            judge_again,
            models=models,
            per_step=per_step,
            seed=seed,
            sandbox=box,
            violations_max=violations_max,
        )
    finally:
        if own:
            box.close()
