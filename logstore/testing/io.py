"""Record the file system calls of logstore, or inject faults into them.

All file access of logstore uses one table of functions in its C core.  `record_io` replaces the
table with one that performs each call and records it, with the bytes of writes.  `inject_io` makes
chosen calls fail, transfer fewer bytes, wait, kill the process, or return success without being
performed.  This needs no special build and no patching: the tested code is the shipped code.

Only the calls of logstore are recorded.  Calls of Python's ``open`` or of SQLite do not use the
table.  `record_io` raises if such a call changes a file below its root, because the crash states
would lack that change.

A process has at most one watch at a time.  The watch sees the calls of all threads on paths at or
below its root, also on files that were open before.  The child of a fork has its own watch.
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

    Raises RuntimeError if other code changes a file there: from the call itself if Python audits it
    (``open`` for writing, rename, remove, mkdir, a connection of sqlite3), else at the end of the
    block, with the names of the files that the recording does not explain.  Keep such files outside
    of `root`.

    Calls of several threads are performed one at a time, so their order is known.  With `data`, the
    bytes of writes and the initial files (`Trace.initial`) are kept.  `faults` are injected as by
    `inject_io`; `Operation.performed` is False for a call that a fault kept from the disk.

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


# ---- calls that cannot be recorded ----

# The root of the current recording.  An audit hook cannot be removed, so it checks this.
_recorded: list[str] = []
_hooked: list[bool] = []
# Audit events of calls that change files, with the number of leading path arguments.
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
            continue  # a descriptor: the check at the end of the recording finds its changes
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
    """Inject faults into calls on files below `root` until the block ends.

    Without faults the calls are only counted, to find the bound of a loop over all calls.  Calls of
    several threads remain concurrent.

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
