"""Writer: buffered appends.  Records are encoded into batches, batches are written in order.

Records that a writer holds are not in the log.  `flush`, `close` and the end of a `with` block
write all of them, or raise.  After an error that left the log unchanged (a full disk) the writer
still holds the records, and the next flush writes them.

Threads may share a writer.  `append` blocks while a full buffer is written: this bounds memory.
`_order` serialises the writing; it is taken before the log's lock.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Protocol, Self

from logstore import _native
from logstore.closeable import Closeable
from logstore.config import ConfigError, PartitionConfig, wants_fsync
from logstore.errors import ClosedError, ForkedHandleError, IndeterminateAppendError
from logstore.format.encoder import builder_settings, codec_number
from logstore.waking import Gate, uninterrupted

__all__ = ["Buffered", "Writer", "Writers"]

WRITE_BYTES = 1 << 19  # written in one system call


class Target(Protocol):
    """The interface of Appender that a writer uses."""

    @property
    def name(self) -> str: ...
    def write_batches(self, batches: _native.Builder, /) -> range:
        """Append batches.  If the builder is empty afterwards, they are in the log."""

    def make_durable(self, offsets: range, /) -> None:
        """Return when the log is on stable storage up to the end of the range."""


class Buffered(Protocol):
    """An object that holds records for a log, and writes them when it is closed."""

    def close(self) -> None: ...


class Writers:
    """What is closed with a log: its Writers, and the lanes of producers.

    The references are weak: an object that is dropped needs no close.
    """

    def __init__(self) -> None:
        # A list, since a WeakSet is seven objects for each log of a store.  append, remove and the
        # copy in `close` are atomic; a dead reference equals only itself.
        self._writers: list[weakref.ref[Buffered]] = []

    def add(self, writer: Buffered) -> None:
        """Have an object closed when the log is closed."""
        self._writers.append(weakref.ref(writer, self._writers.remove))

    def close(self) -> None:
        """Close all.  Raises if one cannot write what it holds."""
        for reference in list(self._writers):
            if (writer := reference()) is not None:
                writer.close()


class Writer(_native.Builder, Closeable):
    """Buffered appends to one partition.  Made by ``partition.writer()``; use it in a ``with``.

    ``append(value, *, key=None, headers=(), timestamp=None)`` and ``extend(records)`` add records;
    both return None: a record gets its offset when it is written.
    """

    def __new__(
        cls,
        target: Target,
        config: PartitionConfig,
        clock: Callable[[], int] | None,
        *,
        batch_bytes: int,
        compression: str | None,
        compression_level: int | None,
        linger: float | None,
        durability: str,
    ) -> Self:
        if linger is not None and linger <= 0:
            raise ConfigError(f"linger must be positive seconds or None, not {linger}")
        settings = builder_settings(config, codec_number(compression, config), compression_level,
                                    batch_bytes=batch_bytes, write_bytes=WRITE_BYTES)  # fmt: skip
        return super().__new__(cls, **settings, clock=clock)

    def __init__(
        self,
        target: Target,
        config: PartitionConfig,
        clock: Callable[[], int] | None,
        *,
        linger: float | None,
        durability: str,
        **options: object,
    ) -> None:
        self._closed = True  # until __init__ ends: see __del__
        self._target = target
        self._fsync = wants_fsync(durability)
        self._order = threading.RLock()  # one write at a time, in order
        self._generation = _native.fork_generation()
        self._unwritten: list[_native.Builder] = []
        self._failure: IndeterminateAppendError | None = None
        self._offsets = range(0)
        self._hand_overs = 0
        self._ended = Gate()
        self._closed = False
        if linger is not None:
            thread = threading.Thread(
                target=_hand_over_lingering,
                args=(weakref.ref(self), self._ended, linger / 2),
                name=f"{target.name} writer",
                daemon=True,
            )
            uninterrupted(thread.start)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.pending} pending"
        return f"<Writer {self._target.name} {state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def pending(self) -> int:
        """Records that are not in the log yet."""
        return self._records + sum(taken._records for taken in self._unwritten)

    def flush(self) -> None:
        """Write all records, and with durability="fsync" wait until they are on disk."""
        if self._closed:
            raise ClosedError("the writer is closed")
        self._hand_over()
        if self._fsync and self._offsets:
            self._target.make_durable(self._offsets)

    def close(self) -> None:
        """Flush, and refuse further records.  If it raises, the writer is still open."""
        if self._closed:
            return
        self._check_fork()
        with self._order:
            self.flush()
            # Write records that other threads added after the flush.
            self._close()
            self._hand_over()
            if self._fsync and self._offsets:
                self._target.make_durable(self._offsets)
            self._closed = True
        self._ended.open()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self._ended.open()
            if self.pending:
                warnings.warn(
                    f"a writer of {self._target.name} was dropped with {self.pending} records "
                    f"that are not in the log: close it, or use it in a with block",
                    ResourceWarning,
                    stacklevel=2,
                    source=self,
                )

    def _hand_over(self) -> None:
        """Write all records that are held.  `append` calls it when the buffer is full."""
        self._check_fork()
        with self._order:
            if self._failure is not None:
                raise self._failure
            again = bool(self._unwritten)  # an error or an interrupt left these
            if not again:  # else write these first: memory stays bounded
                self._take(self._unwritten)
            while self._unwritten:
                taken = self._unwritten[0]
                try:
                    written = self._target.write_batches(taken)
                except IndeterminateAppendError as error:
                    self._failure = error  # trying again could write twice
                    raise
                # After an interrupt the builder may be written and empty: then flush syncs up to
                # the end of the log.
                if written or again:
                    self._offsets = range(self._offsets.start, written.stop)
                del self._unwritten[0]
                self._put_back(taken)
                if not self._unwritten and self._records:
                    self._take(self._unwritten)
            self._hand_overs += 1

    def _check_fork(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandleError(
                f"this writer of {self._target.name} was made before a fork: "
                f"open the log again in this process"
            )

    def _hand_over_if_idle(self, seen: int) -> int:
        """Flush if nothing was written since `seen`; return the count for the next call."""
        if seen == self._hand_overs and self.pending and not self._closed:
            # An error is not lost: the records are still held, or `_failure` is set.  The next
            # append, flush or close of the user raises it.
            with contextlib.suppress(OSError, ValueError):
                self.flush()
        return self._hand_overs


def _hand_over_lingering(writer: weakref.ref[Writer], ended: Gate, interval: float) -> None:
    """The linger thread: checks twice in each linger time.  It refers to the writer weakly."""
    seen = -1
    while not ended.wait(interval):
        held = writer()
        if held is None:
            return
        seen = held._hand_over_if_idle(seen)
        del held
