"""Observer: a session with the metadata tree of a cluster that is not a node, for tools.

It has an image of the tree and can change it through `Admin`, like a node, but it is registered
nowhere and has no replicas.  Callbacks of the session keep the image; the caller waits.  A session
that is lost is not opened again: the tool ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from logstore.closeable import Closeable
from logstore.errors import ClosedError, MetadataUnavailableError
from logstore.replication.hosting.admin import Admin, Done
from logstore.replication.hosting.membership import wall_ms
from logstore.replication.machines.image import ROOTS, ClusterImage
from logstore.replication.metadata import Metadata, Op, Outcome, SessionState, Unknown
from logstore.timers import Timers
from logstore.waking import Gate

__all__ = ["Observer"]

# What holds, whom to tell, and how to cancel the time-out.
_Waiting = tuple[Callable[[], bool], Callable[[bool], object], Callable[[], object]]


class Observer(Closeable):
    """Sees a cluster, and changes it.  It owns the session.  Threads may share it.

    Raise MetadataUnavailableError if the tree cannot be reached within `timeout` seconds.
    """

    def __init__(self, metadata: Metadata, *, timeout: float = 30.0) -> None:
        self.image = ClusterImage()
        self.lock = threading.RLock()  # guards the image against its readers, and `_waiting`
        self.lost_since: float | None = None  # Unix time; set when the session is lost
        self._session = metadata
        self._timers = Timers(name="logstore observer timers")
        self._waiting: list[_Waiting] = []
        self._loaded = False  # whether the image has the whole tree
        try:
            metadata.start(ROOTS, self._changed, self._moved, timeout=timeout)
            with self.lock:
                self.image.load(metadata)
                self._loaded = True
            self._timers.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session.  A second call does nothing."""
        self._session.close()
        self._timers.close()

    # ---- what Admin needs: see Changer ----

    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]:
        """Make a call in `ms` milliseconds; return a function that cancels it."""
        timeout = self._timers.after(ms / 1000, call)
        return lambda: self._timers.cancel(timeout)

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Change the tree; `done` is called when the image has the change."""

        def answered(outcome: Outcome) -> None:
            # The watcher may be called later than this: a caller must see its own change.
            for op in ops:
                self._refresh(op.path)
            done(outcome)

        try:
            self._session.commit(ops, answered)
        except ClosedError:
            done(Unknown())

    def when(
        self, holds: Callable[[], bool], done: Callable[[bool], object], timeout: float
    ) -> None:
        """Call ``done(True)`` when `holds` is true after a change of the tree, else done(False)."""

        def late() -> None:
            with self.lock:
                found = waiting in self._waiting
                if found:
                    self._waiting.remove(waiting)
            if found:
                done(False)

        with self.lock:
            waiting = holds, done, self.after(round(timeout * 1000), late)
            self._waiting.append(waiting)
        self._end_waits()

    # ---- callbacks of the session ----

    def _changed(self, path: str) -> None:
        self._refresh(path)
        self._end_waits()

    def _refresh(self, path: str) -> None:
        with self.lock:
            if self._loaded:  # else `load` reads it, or has read it
                self.image.refresh(self._session.read, path)

    def _moved(self, state: SessionState) -> None:
        if state == "lost":
            # The tree will not change here any more: no wait can end well.
            self.lost_since = wall_ms() / 1000
            with self.lock:
                ended, self._waiting = self._waiting, []
            for _, done, cancel in ended:
                cancel()
                done(False)

    def _end_waits(self) -> None:
        with self.lock:
            ended = [each for each in self._waiting if each[0]()]
            self._waiting = [each for each in self._waiting if each not in ended]
        # Without the lock: `done` may start the next change.
        for _, done, cancel in ended:
            cancel()
            done(True)

    # ---- for tools ----

    def change(self, act: Callable[[Admin, Done], None], timeout: float = 30.0) -> None:
        """Make a change and wait until it is done; raise its error."""
        gate = Gate()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            gate.open()

        act(Admin(self), done)
        # Admin has time-outs of its own; this one is for a session that never answers.
        gate.wait(timeout + 10)
        if self.lost_since is not None:
            reason = "the session with the metadata service was lost: it is not known whether " \
                     "the change is done"  # fmt: skip
            raise MetadataUnavailableError(reason, since=self.lost_since)
        if not errors:
            raise TimeoutError(f"no answer within {timeout + 10:g} s")
        if errors[0] is not None:
            raise errors[0]

    def wait(self, holds: Callable[[ClusterImage], bool], timeout: float) -> bool:
        """Return when ``holds(image)`` is true; return False after `timeout` seconds."""
        gate = Gate()
        held: list[bool] = []

        def done(found: bool) -> None:
            held.append(found)
            gate.open()

        self.when(lambda: holds(self.image), done, timeout)
        gate.wait(timeout + 10)
        return bool(held) and held[0]
