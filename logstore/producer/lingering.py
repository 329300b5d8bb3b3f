"""The thread of a producer, which writes the records that have lingered.

The thread has a weak reference to its producer, so that a producer that is dropped ends its thread.
While records are on their way the producer is in `busy`, and so is not dropped before they are
written; at the end of the interpreter those of `busy` are flushed.
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
    _hurried: bool  # somebody waits for an answer: write without lingering
    _generation: int
    _max_block: float

    def _go_round(self) -> bool:
        """Write, sync and answer; whether anything is left to look after."""

    def _flush(self, deadline: float | None = None, /) -> None: ...


busy: set[LingeringProducer] = set()  # with records on their way


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
    """The thread: every `linger` seconds while something is on its way, then asleep."""
    busy = False
    while True:
        woken = wake.wait(linger if busy else None)
        held = producer()
        if held is None or held._closed:
            return
        if woken and not busy and not held._hurried:
            busy = True  # the first record waits for others, too
        else:
            busy = held._go_round()
        del held


def _waking(wake: Wake) -> Callable[[object], None]:
    """Lets the thread end when its producer is gone."""
    return lambda _: wake.set()


def _flush_at_exit() -> None:
    """Interpreter exit: what was sent and not closed is still written."""
    for producer in list(busy):
        if producer._generation == _native.fork_generation() and not producer._closed:
            with contextlib.suppress(Exception):
                producer._flush(time.monotonic() + producer._max_block)


atexit.register(_flush_at_exit)
