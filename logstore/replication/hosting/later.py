"""later, run_later: calls that are made when the thread holds no lock of ours.

An event of a replica may cause calls of other objects: an answer to a producer, a fetch of a
follower on another node, which moves the high watermark here.  None of them may run under the
replica's lock.  So they are put into a queue of the thread, and the outermost function runs the
queue after it has released its lock.  A call that causes further calls adds them to the same queue:
the depth of the stack stays small, however long a chain of fetches is.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

__all__ = ["holding", "later", "run_later"]

log = logging.getLogger("logstore.replication")


class _Queue(threading.local):
    def __init__(self) -> None:
        self.calls: collections.deque[Callable[[], object]] = collections.deque()
        self.running = False


_queue = _Queue()


def later(call: Callable[[], object]) -> None:
    """Have a call made by the next `run_later` of this thread."""
    _queue.calls.append(call)


@contextlib.contextmanager
def holding() -> Iterator[None]:
    """Make no calls inside of this block, whoever asks for them: the caller holds locks.

    It has to call `run_later` after it has released them.
    """
    before, _queue.running = _queue.running, True
    try:
        yield
    finally:
        _queue.running = before


def run_later() -> None:
    """Make the calls of this thread.  The caller holds no lock of a replica or node.

    Does nothing inside of another `run_later`, which makes the new calls too.
    """
    queue = _queue
    if queue.running or not queue.calls:
        return
    queue.running = True
    calls = queue.calls
    try:
        while calls:
            call = calls.popleft()
            try:
                call()
            except Exception:  # the other calls belong to other requests
                log.exception("a call of a replica failed: %r", call)
    finally:
        queue.running = False
