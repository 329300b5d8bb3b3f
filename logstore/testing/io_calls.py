"""I/O calls: a recorded call, a fault to inject, and the list of recorded calls."""

from __future__ import annotations

import errno as errnos
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from logstore import _native

__all__ = [
    "Fault",
    "Injected",
    "KINDS",
    "MUTATIONS",
    "Operation",
    "READS",
    "SYNCS",
    "Trace",
    "tree_of",
]


_NAMES: Final = _native.io_recorder_kinds()

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
    """One file system call, or a mark that the test put between two calls."""

    kind: str
    """One of `KINDS`, or ``"mark"``."""
    path: str
    """The path below the root; empty for the root itself and for a mark."""
    target: str | None
    """The new path of a rename."""
    fd: int
    """The file's descriptor; for a call with a name, the directory's (-1: none was given)."""
    flags: int
    """The flags of open: os.O_RDWR, os.O_CREAT, ..."""
    position: int
    size: int
    """The number of bytes requested; for truncate the new size."""
    result: int
    """The result that logstore got: a count, a descriptor, 0, or a negated errno."""
    spoiled: str
    """The injected fault: error, late error, short, delay, pretend; else empty."""
    done: int
    """Bytes of a write that reached the file."""
    data: bytes | None
    """The bytes that were written; None if they were not recorded."""
    mark: object = None

    @property
    def performed(self) -> bool:
        """Return whether the call was performed.  Its result may differ, because of a fault."""
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
    """The calls to disturb, and how.  Use the class methods; the order of faults matters.

    ``kind`` is one or several of `KINDS`, None for any.  ``path`` is a shell pattern for the whole
    path below the root: ``*.log`` also matches ``orders-0/00000000000000000000.log``.  Calls that
    match both are counted from 1: the fault applies to call number ``call``, and with ``forever``
    to all later calls.
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
        """The call fails with `errno` and is not performed; with `late` it is performed and fails.

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
        """A read or write transfers at most `count` bytes and returns that number."""
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
        """Kill this process (SIGKILL) before the call, or after `after_bytes` of a write."""
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
        """The call is performed `seconds` later.  Other threads continue."""
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
        """The call returns success but is not performed, as if the code did not make it.

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
    """Base of Trace and Injected: the calls so far."""

    def __init__(self, root: str, faults: tuple[Fault, ...]) -> None:
        self.root = root
        """The root of all paths, with symbolic links resolved."""
        self.faults = faults
        self._operations: list[Operation] = []
        self._marks: list[object] = []
        self._count = 0
        self._fired = [0] * len(faults)
        self._matched = [0] * len(faults)
        self._on = False

    def _start(self, *, keep_calls: bool, keep_data: bool, ordered: bool) -> None:
        try:
            _native.io_recorder_start(
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
        _native.io_recorder_stop()
        self._catch_up()
        self._on = False

    def _catch_up(self) -> None:
        if not self._on:
            return
        self._count = _native.io_recorder_count()
        found = _native.io_recorder_faults(len(self.faults))
        self._matched = [matched for matched, _ in found]
        self._fired = [fired for _, fired in found]
        for call in _native.io_recorder_calls(len(self._operations)):
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
        """Return the number of calls so far."""
        self._catch_up()
        return self._count

    def mark(self, mark: object) -> None:
        """Record a mark between the calls: before every call that starts after this."""
        self._marks.append(mark)
        if self._on:
            _native.io_recorder_mark(len(self._marks) - 1)


class Trace(_Watch):
    """The recording of `record_io`: every call in the order in which it was performed."""

    initial: dict[str, bytes | None]
    """The files below the root before the recording: contents by path, None for a directory."""

    @property
    def operations(self) -> list[Operation]:
        """Return all calls and marks so far."""
        self._catch_up()
        return self._operations


class Injected(_Watch):
    """The result of `inject_io`: the calls, and how often a fault was injected."""

    @property
    def calls(self) -> list[Operation]:
        """Return all calls so far, in the order in which they ended, without written bytes."""
        self._catch_up()
        return self._operations

    @property
    def fired(self) -> int:
        """Return the number of calls with an injected fault."""
        self._catch_up()
        return sum(self._fired)

    @property
    def matched(self) -> list[int]:
        """Return for each fault the number of calls that match it: the bound for ``call=``."""
        self._catch_up()
        return list(self._matched)


def tree_of(root: str | os.PathLike[str]) -> dict[str, bytes | None]:
    """Return the tree below a directory: the contents of files, None for directories."""
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
