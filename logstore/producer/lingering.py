"""The thread of a producer, which writes the records that have lingered.

The thread has a weak reference to its producer, so the thread ends after the producer is dropped.
While a producer has pending records it is in `busy`, which is a strong reference: the producer is
not dropped before its records are written.  At interpreter exit the producers in `busy` are
flushed.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from logstore import _native
from logstore.waking import Wake, uninterrupted

__all__ = ["busy", "start_thread"]


class LingeringProducer(Protocol):
    """What the thread needs of its producer."""

    _closed: bool
    _hurried: bool  # a caller waits for a delivery: write without lingering
    _generation: int
    _max_block: float

    def _go_round(self) -> bool:
        """Write, sync and finish deliveries; return whether records are still pending."""

    def _flush(self, deadline: float | None = None, /) -> None: ...


busy: set[LingeringProducer] = set()  # producers with pending records


def start_thread(producer: LingeringProducer, wake: Wake, linger: float) -> threading.Thread:
    """Start the thread of a producer; it ends when the producer is closed or dropped."""
    thread = threading.Thread(
        target=_run,
        args=(weakref.ref(producer, _waking(wake)), wake, linger),
        name="logstore producer",
        daemon=True,
    )
    uninterrupted(thread.start)
    return thread


def _run(producer: weakref.ref[LingeringProducer], wake: Wake, linger: float) -> None:
    """Do a round every `linger` seconds while records are pending; otherwise sleep."""
    busy = False
    while True:
        # The weak reference has a callback that sets `wake`: a dropped producer ends this thread.
        woken = wake.wait(linger if busy else None)
        held = producer()
        if held is None or held._closed:
            return
        if woken and not busy and not held._hurried:
            busy = True  # the first record lingers as well: write it in the next round
        else:
            busy = held._go_round()
        # Drop the strong reference before the wait, or the producer could never be collected.
        del held


def _waking(wake: Wake) -> Callable[[object], None]:
    """Return a weak reference's callback that wakes the thread, so that it ends."""
    return lambda _: wake.set()


def _flush_at_exit() -> None:
    """Write the records of producers that were not closed before the interpreter exits."""
    for producer in list(busy):
        # Not in a child process: the records and the files are those of the parent.
        if producer._generation == _native.fork_generation() and not producer._closed:
            with contextlib.suppress(Exception):
                producer._flush(time.monotonic() + producer._max_block)


atexit.register(_flush_at_exit)
