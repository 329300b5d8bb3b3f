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
import os
import sys
from collections.abc import Iterator
from typing import Final

from logstore.testing.io_calls import Fault, Injected, Trace, tree_of

__all__ = ["inject_io", "record_io"]


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
    from logstore.testing.crash_states import tree_at_the_end

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
