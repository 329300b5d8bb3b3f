"""The I/O seam under a test's hands: every call logstore makes to the disk, recorded or spoiled.

All file access of logstore goes through one table of functions in its C core.  `record_io` puts a
recorder in the place of the operating system's: it does the same calls and writes each down, with
the bytes that were written.  `inject_io` lets chosen calls fail, fall short, take long, kill the
process, or pretend to have been done.  Nothing is compiled in or patched for it: what is tested is
what is shipped.

Only the calls of logstore are recorded.  The tested code may have files of its own: Python's calls
on them, and SQLite's, do not pass through the table.  `record_io` refuses what it cannot record,
because a crash state without those files is a state of a disk that never was.

There is one watch in a process at a time.  It sees the calls of all threads on paths at or below
its root, also on files that were open before; a child of a fork goes on with a watch of its own.
"""

from __future__ import annotations

import contextlib
import errno as errnos
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from logstore import _native

__all__ = [
    "KINDS",
    "MUTATIONS",
    "READS",
    "SYNCS",
    "Fault",
    "Injected",
    "Operation",
    "Trace",
    "inject_io",
    "record_io",
    "tree_of",
]

_NAMES: Final = _native.watch_kinds()
KINDS: Final = _NAMES[:-1]  # the last is a mark
SYNCS: Final = ("datasync", "sync")
MUTATIONS: Final = (
    *("pwrite", "truncate", "allocate", "open", "rename", "unlink"),
    *("mkdir", "rmdir", "set_times"),
)
READS: Final = ("pread", "size", "list", "stat")
_PRETENDABLE: Final = (*SYNCS, *(k for k in MUTATIONS if k != "open"), "forget")

_ACTIONS: Final = ("", "error", "late error", "short", "kill", "delay", "pretend")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call to the disk, or a mark that the test has put between two."""

    kind: str
    """One of `KINDS`, or ``"mark"``."""
    path: str
    """What it was about, below the root; empty for the root itself and for a mark."""
    target: str | None
    """The new path, of a rename."""
    fd: int
    """The file's descriptor; the directory's, where a name is given (-1: the path stood alone)."""
    flags: int
    """Of open: as os.O_RDWR, os.O_CREAT, ..."""
    position: int
    size: int
    """Bytes asked for; of truncate: the new size."""
    result: int
    """As logstore got it: a count, a descriptor, 0; or a negated errno."""
    spoiled: str
    """What a fault did to it: error, late error, short, delay, pretend; else empty."""
    done: int
    """Bytes of a write that reached the file."""
    data: bytes | None
    """These bytes; None where they were not asked for."""
    mark: object = None

    @property
    def performed(self) -> bool:
        """Whether the disk has seen it, whatever logstore was told."""
        if self.spoiled in ("pretend", "error"):
            return False
        return self.result >= 0 or self.spoiled == "late error"

    def __str__(self) -> str:
        if self.kind == "mark":
            return f"mark {self.mark!r}"
        words = [self.kind, self.path or "."]
        if self.target is not None:
            words.append(f"-> {self.target}")
        if self.kind in ("pread", "pwrite", "allocate", "forget"):
            words.append(f"[{self.position}, {self.position + self.size})")
        if self.kind == "truncate":
            words.append(f"to {self.size}")
        if self.result < 0:
            words.append(errnos.errorcode.get(-self.result, str(self.result)))
        elif self.kind in ("pread", "pwrite") and self.result != self.size:
            words.append(f"only {self.result}")
        if self.spoiled:
            words.append(f"({self.spoiled})")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Fault:
    """Which calls go wrong, and how.  Made by its class methods; the order of several matters.

    ``kind`` is a name of `KINDS` or several, None for any.  ``path`` is a pattern as a shell has
    it, over the whole path below the root: ``*.log`` is also ``orders-0/00000000000000000000.log``.
    Calls that match both are counted from one: the fault begins at number ``call`` and is over
    after that, unless it is to last ``forever``.
    """

    kinds: tuple[str, ...]
    path: str | None
    call: int
    forever: bool
    action: str
    value: int

    @classmethod
    def fail(
        cls,
        errno: int,
        kind: str | Iterable[str] | None = None,
        path: str | None = None,
        *,
        call: int = 1,
        forever: bool = False,
        late: bool = False,
    ) -> Fault:
        """The call fails with `errno` and is not done; with `late` it is done, and fails as well.

        >>> import errno
        >>> Fault.fail(errno.ENOSPC, "pwrite", "*.log", forever=True).action
        'error'
        """
        if errno not in errnos.errorcode:
            raise ValueError(f"{errno!r} is no errno: take one of the errno module")
        return cls._make(kind, path, call, forever, "late error" if late else "error", errno)

    @classmethod
    def short(
        cls,
        count: int,
        kind: str | Iterable[str] = ("pread", "pwrite"),
        path: str | None = None,
        *,
        call: int = 1,
        forever: bool = False,
    ) -> Fault:
        """A read or write moves at most `count` bytes, and says so."""
        fault = cls._make(kind, path, call, forever, "short", count)
        if not set(fault.kinds) <= {"pread", "pwrite"} or count < 0:
            raise ValueError("only pread and pwrite can fall short, to a count of 0 or more")
        return fault

    @classmethod
    def kill(
        cls,
        kind: str | Iterable[str] | None = None,
        path: str | None = None,
        *,
        call: int = 1,
        after_bytes: int = 0,
    ) -> Fault:
        """SIGKILL to this process right before the call; a write gets `after_bytes` down first."""
        return cls._make(kind, path, call, True, "kill", after_bytes)

    @classmethod
    def delay(
        cls,
        seconds: float,
        kind: str | Iterable[str] | None = None,
        path: str | None = None,
        *,
        call: int = 1,
        forever: bool = False,
    ) -> Fault:
        """The call is done `seconds` later; other threads go on meanwhile."""
        return cls._make(kind, path, call, forever, "delay", int(seconds * 1e9))

    @classmethod
    def pretend(
        cls,
        kind: str | Iterable[str],
        path: str | None = None,
        *,
        call: int = 1,
        forever: bool = True,
    ) -> Fault:
        """The call is left out and said to be done: what a missing barrier would be.

        A test that still passes with ``pretend("sync")`` does not test that sync.
        """
        fault = cls._make(kind, path, call, forever, "pretend", 0)
        if other := set(fault.kinds) - set(_PRETENDABLE):
            raise ValueError(f"nothing can stand in for {sorted(other)}: one of {_PRETENDABLE}")
        return fault

    @classmethod
    def _make(
        cls,
        kind: str | Iterable[str] | None,
        path: str | None,
        call: int,
        forever: bool,
        action: str,
        value: int,
    ) -> Fault:
        kinds = KINDS if kind is None else (kind,) if isinstance(kind, str) else tuple(kind)
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"no kind of call: {sorted(unknown)}; there are {KINDS}")
        if call < 1:
            raise ValueError(f"calls are counted from 1, not {call}")
        return cls(kinds, path, call, forever, action, value)

    def _native(self) -> tuple[int, str | None, int, int, int, int]:
        kinds = sum(1 << _NAMES.index(kind) for kind in set(self.kinds))
        times = -1 if self.forever else 1
        return kinds, self.path, self.call, times, _ACTIONS.index(self.action), self.value


class _Watch:
    """What the two context managers give: the calls so far."""

    def __init__(self, root: str, faults: tuple[Fault, ...]) -> None:
        self.root = root
        """The directory all paths are below, without links."""
        self.faults = faults
        self._operations: list[Operation] = []
        self._marks: list[object] = []
        self._count = 0
        self._fired = [0] * len(faults)
        self._matched = [0] * len(faults)
        self._on = False

    def _start(self, *, keep_calls: bool, keep_data: bool, ordered: bool) -> None:
        try:
            _native.watch_start(
                self.root,
                tuple(fault._native() for fault in self.faults),
                keep_calls,
                keep_data,
                ordered,
            )
        except OSError as error:
            if error.errno != errnos.EALREADY:
                raise
            raise RuntimeError(
                "the I/O of this process is watched already: one at a time"
            ) from None
        self._on = True

    def _stop(self) -> None:
        _native.watch_stop()
        self._catch_up()
        self._on = False

    def _catch_up(self) -> None:
        if not self._on:
            return
        self._count = _native.watch_count()
        found = _native.watch_faults(len(self.faults))
        self._matched = [matched for matched, _ in found]
        self._fired = [fired for _, fired in found]
        for call in _native.watch_calls(len(self._operations)):
            kind, path, target, fd, flags, position, size, result, spoiled, done, data = call
            name = _NAMES[kind]
            mark = self._marks[position] if name == "mark" else None
            action = _ACTIONS[spoiled]
            operation = Operation(
                *(name, path or "", target, fd, flags, position, size, result, action, done, data),
                mark,
            )
            self._operations.append(operation)

    @property
    def count(self) -> int:
        """How many calls there were so far."""
        self._catch_up()
        return self._count

    def mark(self, mark: object) -> None:
        """Put something between the calls: `mark` comes before any call that is made after this."""
        self._marks.append(mark)
        if self._on:
            _native.watch_mark(len(self._marks) - 1)


class Trace(_Watch):
    """What `record_io` gives: every call in the order in which the disk saw it."""

    initial: dict[str, bytes | None]
    """What was below the root before: contents by path, None for a directory."""

    @property
    def operations(self) -> list[Operation]:
        """All calls and marks so far."""
        self._catch_up()
        return self._operations


class Injected(_Watch):
    """What `inject_io` gives: what was called, and how often a fault had its way."""

    @property
    def calls(self) -> list[Operation]:
        """All calls so far, in the order in which they ended; bytes are not kept."""
        self._catch_up()
        return self._operations

    @property
    def fired(self) -> int:
        """How many calls were spoiled."""
        self._catch_up()
        return sum(self._fired)

    @property
    def matched(self) -> list[int]:
        """For each fault, how many calls it speaks of: a loop over ``call=`` ends there."""
        self._catch_up()
        return list(self._matched)


def tree_of(root: str | os.PathLike[str]) -> dict[str, bytes | None]:
    """All that is below a directory: the contents of files, None for directories."""
    tree: dict[str, bytes | None] = {}
    top = os.fspath(root)
    for above, folders, files in os.walk(top):
        prefix = os.path.relpath(above, top)
        prefix = "" if prefix == "." else f"{prefix}/"
        for name in folders:
            tree[f"{prefix}{name}"] = None
        for name in files:
            with open(f"{above}/{name}", "rb") as file:
                tree[f"{prefix}{name}"] = file.read()
    return tree


@contextlib.contextmanager
def record_io(root: str | os.PathLike[str], *faults: Fault, data: bool = True) -> Iterator[Trace]:
    """Record every call of logstore on files below `root`, a directory, until the block ends.

    RuntimeError if another part of the program changes a file there: at once from the call that
    does it, where Python shows it (``open`` for writing, rename, remove, mkdir, a connection of
    sqlite3), else at the end of the block, with the files that the recording does not explain.
    Keep such files outside of `root`, and judge them by other means.

    Calls of several threads are done one at a time, so that their order is known.  With `data`,
    what is written is kept, and what was there before (`Trace.initial`).  Faults may be given as
    well; a call that one has kept from the disk says so (`Operation.performed`).

    >>> import tempfile, logstore
    >>> with tempfile.TemporaryDirectory() as directory, record_io(directory) as trace:
    ...     with logstore.Partition.open(f"{directory}/orders-0") as log:
    ...         trace.mark(("acknowledged", log.append(b"hello")))
    >>> [str(call) for call in trace.operations if call.kind in ("mkdir", "mark")]
    ['mkdir orders-0', "mark ('acknowledged', 0)"]
    """
    trace = Trace(os.path.realpath(root), faults)
    trace.initial = tree_of(trace.root) if data else {}
    trace._start(keep_calls=True, keep_data=data, ordered=True)
    try:
        with _refusing(trace.root):
            yield trace
    finally:
        trace._stop()
    if data:
        _require_complete(trace)


# ---- what is not recorded ----

# The root of the recording under way.  An audit hook cannot be removed, so it looks here.
_recorded: list[str] = []
_hooked: list[bool] = []
# Events of files that change, with how many paths are in front of their arguments.
_CHANGES: Final = {
    **{"open": 1, "sqlite3.connect": 1, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1},
    **{"os.truncate": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2},
}
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@contextlib.contextmanager
def _refusing(root: str) -> Iterator[None]:
    if not _hooked:
        sys.addaudithook(_refuse)
        _hooked.append(True)
    _recorded.append(root)
    try:
        yield
    finally:
        _recorded.remove(root)


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if not _recorded or event not in _CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITES):
        return
    for path in arguments[: _CHANGES[event]]:
        if not isinstance(path, (str, bytes, os.PathLike)):
            continue  # a descriptor: the end of the recording finds what was written to it
        above, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        full = os.path.join(os.path.realpath(above), name)
        for root in _recorded:
            if full.startswith(f"{root.rstrip('/')}/"):
                raise RuntimeError(
                    f"record_io({root!r}) cannot record {event} of {full}: only the calls of "
                    "logstore are recorded, so that no crash state would have this change; keep "
                    "files of your own outside of that directory"
                )


def _require_complete(trace: Trace) -> None:
    from logstore.testing.crash import tree_at_the_end

    known, found = tree_at_the_end(trace), tree_of(trace.root)
    if known != found:
        changed = sorted(p for p in {*known, *found} if known.get(p, 0) != found.get(p, 0))
        raise RuntimeError(
            f"below {trace.root} these were changed by calls that are not recorded: "
            f"{', '.join(changed[:5])}{', ...' if len(changed) > 5 else ''}; no crash state would "
            "have these changes; keep files of your own outside of that directory"
        )


@contextlib.contextmanager
def inject_io(
    *faults: Fault, root: str | os.PathLike[str] = "/", keep_calls: bool = True
) -> Iterator[Injected]:
    """Spoil calls on files below `root` until the block ends.

    Without a fault it only counts, which tells a loop over all calls where to end.  Calls of
    several threads stay as concurrent as they are.

    >>> import errno, tempfile, logstore
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     with logstore.Partition.open(f"{directory}/orders-0") as log:
    ...         with inject_io(Fault.fail(errno.ENOSPC, "pwrite", "*.log")) as injected:
    ...             try:
    ...                 log.append(b"hello")
    ...             except logstore.DiskFullError as error:
    ...                 print("refused, and nothing was written:", log.end_offset)
    ...         log.append(b"hello again")
    refused, and nothing was written: 0
    0
    >>> injected.fired
    1
    """
    injected = Injected(os.path.realpath(root), faults)
    injected._start(keep_calls=keep_calls, keep_data=False, ordered=False)
    try:
        yield injected
    finally:
        injected._stop()
