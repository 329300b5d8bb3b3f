"""AsyncProducer: a producer for an event loop, on the same engine as Producer.

No method blocks the loop.  `send` encodes the record in the loop; the producer's thread writes and
syncs it, and wakes the loop once for an awaited Delivery.  A second thread, the worker, does the
calls that wait for the disk: flush, close, the begin and the end of a transaction.  The worker does
them one after the other, in the order of the calls.

Only tasks of one event loop may share it, and a transaction is used by one task.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar, Unpack, cast

from logstore.errors import ClosedError, DiskFullError
from logstore.producer.delivery import Delivery
from logstore.producer.lane import Lane
from logstore.producer.producer import RETRY, Producer
from logstore.producer.transaction import OffsetCommitter, RecordOptions, Transaction
from logstore.store.store import Store
from logstore.store.topic import Position

__all__ = ["AsyncProducer", "AsyncTransaction"]

T = TypeVar("T")


class _Engine(Producer):
    """A producer that writes only in its own thread, never in the thread that calls `send`."""

    crowded = False  # `buffer_bytes` are held: `send` has to wait
    full: DiskFullError | None = None  # the error of the last round, if the disk was full
    _refused: DiskFullError | None = None  # the same, of the current round
    tell: Callable[[], object] | None = None  # called by the thread after each round

    def make_room(self, lane: Lane) -> None:
        """Set the records of a full lane aside, and wake the thread."""
        lane.set_aside()
        self._hurried = True
        self._look_after()
        self._wake.set()

    def _look_at_buffer(self) -> None:
        held = self.held_bytes
        # Only a flag: `send` runs in the loop, which must not wait for the disk.
        self.crowded = held >= self._buffer_bytes
        self._held = 0
        self._held_max = max(1, min(self._buffer_bytes - held, 1 << 20))

    def _stuck(self, lane: Lane, error: DiskFullError) -> None:
        self._refused = error
        super()._stuck(lane, error)

    def _went_round(self) -> None:
        self.full, self._refused = self._refused, None
        if self.crowded and self.held_bytes < self._buffer_bytes:
            self.crowded = False
        if self.tell is not None:
            self.tell()


class AsyncProducer:
    """``async with AsyncProducer(store) as producer: await producer.append("topic", b"value")``

    The arguments are those of Producer.
    """

    def __init__(self, store: Store, transactional_id: str | None = None, **settings: Any) -> None:
        self._make: Callable[[], _Engine] = lambda: _Engine(store, transactional_id, **settings)
        self._engine: _Engine | None = None
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._starting: asyncio.Lock | None = None
        self._room = asyncio.Event()  # set in the loop by `tell`, from the thread of the engine
        self._closed = False

    def __repr__(self) -> str:
        return f"<AsyncProducer {self._engine!r}>"

    async def start(self) -> None:
        """Get a producer id; otherwise the first use of the producer does."""
        if self._closed:
            raise ClosedError("the producer is closed")
        if self._starting is None:
            # Made in the loop that uses it.  Several tasks may call `start` at once.
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._engine is None:
                engine = await self._in_worker(self._make)
                loop = asyncio.get_running_loop()

                def tell() -> None:
                    if not loop.is_closed():
                        loop.call_soon_threadsafe(self._room.set)

                engine.tell = tell
                self._engine = engine

    async def _in_worker(self, act: Callable[[], T]) -> T:
        """Call `act` in the worker, and return its result."""
        if self._worker is None:
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "logstore async producer")
        return await asyncio.get_running_loop().run_in_executor(self._worker, act)

    def _in_worker_later(self, act: Callable[[], object]) -> None:
        """Call `act` in the worker without waiting; not after `close`, which ends the worker."""
        if self._worker is not None and not self._closed:
            self._worker.submit(act)

    async def _ready(self) -> _Engine:
        if self._engine is None or self._closed:
            await self.start()
        return cast(_Engine, self._engine)

    # ---- sending ----

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: Any = None,
        partition: int | None = None,
        callback: Callable[[Delivery], object] | None = None,
        dedupe_id: str | bytes | None = None,
    ) -> Delivery:
        """Send a record; await the returned Delivery for the record's position.

        Waits only while `buffer_bytes` are held.  On a full disk it waits for `max_block` seconds;
        then it raises DiskFullError, and the record was not taken.
        """
        engine = self._engine
        if engine is None or self._closed:
            engine = await self._ready()
        if engine.crowded:
            await self._wait_for_room(engine)
        return (
            engine.send(topic, value, key=key, headers=headers, timestamp=timestamp,
                        partition=partition, callback=callback, dedupe_id=dedupe_id)
            if callback is not None or dedupe_id is not None
            else engine.send(topic, value, key=key, headers=headers, timestamp=timestamp,
                             partition=partition)
        )  # fmt: skip

    async def _wait_for_room(self, engine: _Engine) -> None:
        deadline = time.monotonic() + engine._max_block
        while engine.crowded:
            full = engine.full
            if full is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    error = copy.copy(full)  # several tasks may wait: each raises its own object
                    error.__notes__ = [
                        f"waited {engine._max_block} s for disk space; {engine.pending} records are"
                        f" held and will be tried again, the record of this call was not taken"
                    ]
                    raise error
                await asyncio.sleep(min(RETRY, left))
            # Clear the event before the second look at `crowded`: a round that ends between the
            # two lines sets the event again, or has cleared `crowded`.
            self._room.clear()
            if engine.crowded:
                engine.hurry()
                await self._room.wait()

    async def append(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        timestamp: Any = None,
        partition: int | None = None,
        dedupe_id: str | bytes | None = None,
    ) -> Position:
        """Send a record, wait until it is as durable as asked for, and return its position."""
        delivery = await self.send(topic, value, key=key, headers=headers, timestamp=timestamp,
                                   partition=partition, dedupe_id=dedupe_id)  # fmt: skip
        return await delivery

    # ---- transactions, and ends ----

    def transaction(self) -> AsyncTransaction:
        """``async with producer.transaction() as tx:`` commits, or aborts if the block raises."""
        return AsyncTransaction(self)

    async def flush(self) -> None:
        """As `Producer.flush`."""
        engine = await self._ready()
        await self._in_worker(engine.flush)

    async def close(self) -> None:
        """As `Producer.close`."""
        if self._closed:
            return
        if self._engine is not None:
            await self._in_worker(self._engine.close)
        self._closed = True
        if self._worker is not None:
            # Without a wait, which would block the loop; the worker has nothing left to do.
            self._worker.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.close()


class AsyncTransaction:
    """A transaction of an AsyncProducer: see Transaction."""

    def __init__(self, producer: AsyncProducer) -> None:
        """Use `AsyncProducer.transaction`."""
        self._producer = producer
        self._begun: Transaction | None = None

    async def begin(self) -> None:
        """Begin the transaction; ``async with`` calls this."""
        engine = await self._producer._ready()
        begun: list[Transaction] = []

        def undo() -> None:
            for each in begun:
                each.abort()

        try:
            await self._producer._in_worker(lambda: begun.append(engine.transaction()))
        except asyncio.CancelledError:
            # No task has the transaction, so abort it.  The worker runs `undo` before any later
            # call, which then finds no open transaction.
            self._producer._in_worker_later(undo)
            raise
        self._begun = begun[0]

    @property
    def _open(self) -> Transaction:
        if self._begun is None:
            raise ClosedError("the transaction has not begun: use it in an async with block")
        self._begun.check_open()
        return self._begun

    async def send(self, topic: str, value: Any, **more: Any) -> Delivery:
        """As `AsyncProducer.send`, as a part of the transaction."""
        _ = self._open
        return await self._producer.send(topic, value, **more)

    async def append(self, topic: str, value: Any, **options: Unpack[RecordOptions]) -> Position:
        """As `AsyncProducer.append`; durable when the transaction is."""
        _ = self._open
        return await self._producer.append(topic, value, **options)

    async def commit_offsets(
        self,
        offsets: OffsetCommitter | Mapping[tuple[str, int], Any],
        *,
        group_id: str | None = None,
    ) -> None:
        """As `Transaction.commit_offsets`."""
        begun = self._open
        await self._producer._in_worker(lambda: begun.commit_offsets(offsets, group_id=group_id))

    async def commit(self) -> None:
        """As `Transaction.commit`."""
        await self._producer._in_worker(self._open.commit)

    async def abort(self) -> None:
        """As `Transaction.abort`."""
        await self._producer._in_worker(self._open.abort)

    async def __aenter__(self) -> Self:
        await self.begin()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        begun = self._begun
        if begun is not None and not begun.over:
            # The worker commits or aborts.  `shield`: if this task is cancelled, it still finishes.
            act = self._producer._in_worker(lambda: begun.__exit__(kind, error, traceback))
            await asyncio.shield(act)
