"""Producer: records from an application into the topics of a store.

`append` returns when its record is durable; `send` returns at once, and what it returns tells
later.  Records of one partition travel together, in batches, in the order in which they were sent.

Who does the work: a lane that is full is written by the thread that finds it full, which is the
back-pressure; one thread of the producer writes what has lingered, syncs and answers.  That thread
sleeps while nothing is on its way, and holds the producer only as long as something is: a producer
that is dropped, or an interpreter that ends, still writes what was sent.

Idempotent: every batch carries the producer's id and a sequence, so that a batch which is written
again is answered with its first offsets.

Threads may share a producer.  With a transactional id it writes in transactions, one at a time; a
transaction belongs to one thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from logstore import _native
from logstore.closeable import Closeable
from logstore.config import ConfigError, wants_fsync
from logstore.errors import (
    ClosedError,
    DiskFullError,
    FencedError,
    ForkedHandleError,
    TransactionAbortedError,
)
from logstore.interceptors import InterceptorChain, Outgoing
from logstore.partitioner import Partitioner
from logstore.producer.dedupe import DedupeWindows
from logstore.producer.delivery import Delivery, answering
from logstore.producer.lane import Lane
from logstore.producer.lingering import busy, start_thread
from logstore.producer.routing import Route, Router, partitioner_of
from logstore.producer.transacting import TransactionClient
from logstore.producer.transaction import Transaction
from logstore.serialization import SerializationError, Serializer, serializer
from logstore.store.store import Store
from logstore.store.topic import Position
from logstore.waking import Wake

if TYPE_CHECKING:
    import datetime

    from typing_extensions import Buffer

__all__ = ["Producer"]

log = logging.getLogger("logstore.producer")

BATCH_BYTES = 64 << 10
BUFFER_BYTES = 32 << 20  # as Kafka's producer
LINGER = 0.01
MAX_BLOCK = 60.0
DELIVERY_TIMEOUT = 120.0
TRANSACTION_TIMEOUT = 60.0
DEDUPE_WINDOW = 120.0
DEDUPE_RECORDS = 100_000
RETRY = 0.05  # seconds between attempts to write to a full disk

T = TypeVar("T")
_Headers: TypeAlias = "Iterable[tuple[str, bytes | None]]"


class Producer(_native.Sender, Closeable):
    """Writes records to the topics of a store.  Use it in a ``with`` block, or close it.

    - `batch_bytes`, `compression` (none, gzip, snappy, lz4, zstd), `compression_level`: of a batch.
    - `linger`: seconds that a record may wait for others.
    - `buffer_bytes`: what may be held in memory; beyond it, `send` writes before it returns.
    - `max_block`: seconds that a call may wait for room on a full disk; then it raises
      DiskFullError, and the record of that call was not taken.
    - `delivery_timeout`: seconds after which records that were sent before fail as well.
    - `partitioner`: a callable of (key, value, partitions), "round_robin" or "random"; by default
      the topic's own.
    - `key_serializer`, `value_serializer`: a callable, or "json", "string", "integer", "long"...
    - `interceptors`: objects with `on_send` or `on_acknowledgement`, called in this order.
    - `durability`: "fsync" or "os"; the store's by default.
    - `idempotence`: number the batches, so that none is appended twice.

    A record that is sent with a `dedupe_id` (str or bytes) is sent once: for `dedupe_window`
    seconds after it was appended, and as long as it is among the `dedupe_records` newest of its
    partition, the same id for the same topic is answered with the first record's place.  The id is
    kept in a header of the record, and so survives what the record survives.

    With a `transactional_id` it writes in transactions only: see `transaction`.  It is the only
    producer of that id: one that had it before is fenced, and what it left open is aborted.
    `transaction_timeout`: seconds after which a transaction that is still open is aborted.
    """

    def __init__(
        self,
        store: Store,
        transactional_id: str | None = None,
        *,
        batch_bytes: int = BATCH_BYTES,
        linger: float = LINGER,
        compression: str | None = None,
        compression_level: int | None = None,
        partitioner: Partitioner | str | None = None,
        key_serializer: str | Serializer | None = None,
        value_serializer: str | Serializer | None = None,
        interceptors: Iterable[object] = (),
        durability: str | None = None,
        idempotence: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        max_block: float = MAX_BLOCK,
        delivery_timeout: float = DELIVERY_TIMEOUT,
        transaction_timeout: float = TRANSACTION_TIMEOUT,
        dedupe_window: float = DEDUPE_WINDOW,
        dedupe_records: int = DEDUPE_RECORDS,
    ) -> None:
        self._closed = True  # until all is in place
        _positive(batch_bytes=batch_bytes, linger=linger, buffer_bytes=buffer_bytes)
        _positive(max_block=max_block, delivery_timeout=delivery_timeout)
        _positive(dedupe_window=dedupe_window, dedupe_records=dedupe_records)
        self._dedupe = (round(dedupe_window * 1000), dedupe_records)
        self._store = store
        self._linger = linger
        self._buffer_bytes = buffer_bytes
        self._max_block = max_block
        self._delivery_timeout = delivery_timeout
        self._router = Router(
            self, store, partitioner_of(partitioner), batch_bytes=batch_bytes,
            compression=compression, compression_level=compression_level,
        )  # fmt: skip
        self._key_serializer = serializer(key_serializer)
        self._value_serializer = serializer(value_serializer)
        self._interceptors = InterceptorChain(interceptors)
        self.fsync = wants_fsync(store.durability if durability is None else durability)
        self._generation = _native.fork_generation()
        self._making = threading.RLock()  # of routes, lanes and the thread
        self._failures: list[BaseException] = []  # since the last flush
        self._stuck_since: float | None = None  # the disk is full
        self._wake = Wake()
        self._thread: threading.Thread | None = None
        self._hurried = False
        self._delivery = Delivery
        self._held_max = min(buffer_bytes, 1 << 20)
        self._client: TransactionClient | None = None  # of a transactional id
        if transactional_id is None:
            self.identity = (store.producer_ids.take(), 0) if idempotence else (-1, -1)
            self._quick = self._is_plain()
        elif not idempotence:
            raise ConfigError("transactions need idempotence=True")
        else:
            timeout_ms = round(transaction_timeout * 1000)
            self._client = TransactionClient(self, store, transactional_id, timeout_ms)
        self._closed = False

    def _is_plain(self) -> bool:
        """Whether bytes may go straight into a batch."""
        if self._client is not None and self._client.current is None:
            return False
        return self._takes_bytes()

    def _takes_bytes(self) -> bool:
        """Whether neither serializers nor interceptors have to see the records."""
        chain = self._interceptors
        return not (
            self._key_serializer or self._value_serializer or chain.senders or chain.acknowledgers
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.pending} pending"
        return f"<Producer {self.identity[0]} of {str(self._store.path)!r} {state}>"

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    @property
    def producer_id(self) -> int:
        """Its id in the log; -1 when it is not idempotent."""
        return self.identity[0]

    @property
    def producer_epoch(self) -> int:
        """Its epoch in the log."""
        return self.identity[1]

    @property
    def pending(self) -> int:
        """Records that are not in the log yet."""
        return sum(lane.pending for lane in self._router.lanes())

    @property
    def held_bytes(self) -> int:
        """Bytes of records that are not in the log yet."""
        return sum(lane.held_bytes for lane in self._router.lanes())

    # ---- sending ----

    if TYPE_CHECKING:  # the method is the Sender's, in C, which does not know the class Delivery

        def send(
            self,
            topic: str,
            value: Any,
            *,
            key: Any = None,
            headers: Iterable[tuple[str, Buffer | None]] = (),
            timestamp: int | datetime.datetime | None = None,
            partition: int | None = None,
            callback: Callable[[Delivery], object] | None = None,
            dedupe_id: str | Buffer | None = None,
        ) -> Delivery: ...

    def append(
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
        """Append one record and return where it is, once it is as durable as asked for.

        All that was sent to the same partition before is written first.  Raises what
        `Partition.append` raises.
        """
        delivery = self._send(topic, value, key=key, headers=headers, timestamp=timestamp,
                              partition=partition, dedupe_id=dedupe_id)  # fmt: skip
        lane = delivery._pack.carrier
        if not delivery.done():  # asked after the carrier was read: a lane until then
            self._deliver(cast(Lane, lane))
        return delivery.result()

    def _deliver(self, lane: Lane) -> None:
        """Have a lane written and answered by this thread."""
        self._write_blocking(lane)
        if self.fsync and (self._client is None or self._client.current is None):
            lane.sync()

    def _send(
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
        """All that `send` does not do itself."""
        self._check_usable()
        if self._client is not None:
            self._client.check_begun()
        chain = self._interceptors
        if chain.senders:
            topic, value, key, headers, timestamp, partition = chain.on_send(
                Outgoing(topic, value, key, headers, timestamp, partition)
            )
        if self._key_serializer is not None and key is not None:
            key = _serialized(self._key_serializer, key, "key", topic)
        if self._value_serializer is not None and value is not None:
            value = _serialized(self._value_serializer, value, "value", topic)
        route = self._router.find(topic)
        if dedupe_id is None:
            delivery = self._put_on(route, value, key, headers, timestamp, partition)
        else:
            delivery = self._put_once(dedupe_id, route, value, key, headers, timestamp, partition)
        if chain.acknowledgers:
            delivery.add_done_callback(self._acknowledge)
        if callback is not None:
            delivery.add_done_callback(callback)
        return delivery

    def _put_on(self, route: Route, value: Any, key: Any, headers: _Headers, timestamp: Any,
                partition: int | None) -> Delivery:  # fmt: skip
        lane = self._router.lane(route, self._router.choose(route, key, value, partition))
        self._look_after()
        if self._held >= self._held_max:
            self._look_at_buffer()
        return cast(Delivery, self._put(lane, value, key, headers, timestamp))

    @answering
    def _put_once(self, dedupe_id: str | bytes, route: Route, value: Any, key: Any,
                  headers: _Headers, timestamp: Any, partition: int | None,
                  ) -> Delivery:  # fmt: skip
        owner = None
        if self._client is not None and self._client.current is not None:
            owner = (self._client.name, *self.identity)
        return DedupeWindows.of(self._store).once(
            route.topic, dedupe_id, *self._dedupe, owner, headers, timestamp,
            choose=lambda: self._router.choose(route, key, value, partition),
            put=lambda marked, stamp, to: self._put_on(route, value, key, marked, stamp, to),
        )  # fmt: skip

    def _acknowledge(self, delivery: Delivery) -> None:
        error = delivery.exception(0)
        self._interceptors.on_acknowledgement(None if error else delivery.result(0), error)

    # ---- what a lane asks for ----

    def enlist(self, lane: Lane) -> bool:
        """Whether what a lane is about to write belongs to a transaction, which knows of it now."""
        if self._client is None:
            return False
        self._client.enlist(lane)
        return True

    def make_room(self, lane: Lane) -> None:
        """A lane is full: written by whoever finds it so."""
        self._write_blocking(lane)

    def note_failure(self, error: BaseException) -> None:
        """Some records will not be delivered: `flush` and `close` tell, if nobody else does."""
        self._failures.append(error)

    def explain(self, error: BaseException) -> BaseException:
        """Return why an epoch is over: a partition knows that it is, the coordinator knows why."""
        return error if self._client is None else self._client.explain(error)

    def hurry(self) -> None:
        """Someone waits for an answer."""
        self._hurried = True
        self._look_after()
        self._wake.set()

    # ---- the buffer ----

    def _look_at_buffer(self) -> None:
        """Write when too much is held.  Lanes bound themselves; this bounds many of them."""
        held = self.held_bytes
        if held >= self._buffer_bytes:
            for lane in sorted(
                self._router.lanes(), key=lambda each: each.held_bytes, reverse=True
            ):
                self._write_blocking(lane)
            held = self.held_bytes
        # `send` comes here again after so many bytes more.
        self._held = 0
        self._held_max = max(1, min(self._buffer_bytes - held, 1 << 20))

    def _write_blocking(self, lane: Lane) -> None:
        """Write a lane; wait for room on a full disk, but not for ever."""
        try:
            self._blocking(lane.write_out)
        except DiskFullError as error:
            error.add_note(
                f"waited {self._max_block} s for room; {self.pending} records are held "
                f"and will be tried again, that of this call was not taken"
            )
            raise

    def _blocking(self, act: Callable[[], T]) -> T:
        """Do what a full disk may refuse, again and again, for `max_block` seconds."""
        deadline = time.monotonic() + self._max_block
        while True:
            try:
                return act()
            except DiskFullError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(RETRY, max(0.0, deadline - time.monotonic())))

    # ---- the thread ----

    def _look_after(self) -> None:
        """Have the thread look after what is about to be sent."""
        if self._idle:
            with self._making:
                busy.add(self)
                if self._thread is None:
                    self._thread = start_thread(self, self._wake, self._linger)
                # First: after an interrupt between these two, the next call does it again.
                self._wake.set()
                self._idle = False

    def _write_lingering(self) -> bool:
        """One round of the thread; whether anything is left to look after."""
        self._hurried = False
        full = False
        for lane in self._router.lanes():
            try:
                lane.write_out()
            except DiskFullError as error:
                full = True
                self._stuck(lane, error)
        if not full:  # a lane with nothing to write says nothing about the disk
            self._stuck_since = None
        for lane in self._router.lanes():
            if self.fsync:
                lane.sync()
            lane.settle_interrupted()
        self._went_round()
        if any(lane.unsettled for lane in self._router.lanes()):
            return True
        with self._making:
            self._idle = True
            # Whoever sent before this line is seen here; whoever comes after it, in `send`.
            if any(lane.unsettled for lane in self._router.lanes()) or self._hurried:
                self._idle = False
                return True
            busy.discard(self)
            return False

    def _went_round(self) -> None:
        """Wake the threads that wait for room: records may have been written."""

    def _go_round(self) -> bool:
        """The same, whatever happens: the thread goes on as long as the store is open."""
        try:
            return self._write_lingering()
        except BaseException:
            if not self._store.closed:
                log.exception("a producer's thread goes on after an error")
            return True

    def _stuck(self, lane: Lane, error: DiskFullError) -> None:
        now = time.monotonic()
        if self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > self._delivery_timeout:
            error.add_note(f"nothing could be written for {self._delivery_timeout} s")
            self.note_failure(error)
            lane.fail_unwritten(error)
            self._stuck_since = None

    # ---- transactions ----

    @property
    def transactional_id(self) -> str | None:
        """What its transactions are known by, over restarts; None: it has none."""
        return None if self._client is None else self._client.name

    def transaction(self) -> Transaction:
        """Begin a transaction: committed at the end of a ``with`` block, aborted if it raises.

        Raises FencedError when another producer has the transactional id by now.
        """
        self._check_usable()
        if self._client is None:
            raise ConfigError("transactions need a name: Producer(store, 'my-transactional-id')")
        return self._client.begin()

    # ---- ending ----

    def flush(self) -> None:
        """Return when all that was sent is answered, as durable as asked for.

        That includes what callbacks send meanwhile, unless it is a callback that flushes.

        Raises the first error of records that could not be delivered since the last flush, a
        BaseExceptionGroup when there were several: nothing is lost without an exception.
        """
        self._check_usable()
        self._flush()

    def _flush(self, deadline: float | None = None) -> None:
        """Write and answer all.  What callbacks send counts if they were called by `deadline`."""
        while True:
            before = self._called()
            for lane in self._router.lanes():
                self._write_blocking(lane)
            for lane in self._router.lanes():
                if self.fsync:
                    lane.sync()
                else:
                    lane.settle()
            for lane in self._router.lanes():
                lane.callbacks.wait()
            # Other threads may send without end, and are not waited for.
            if self._called() == before or not any(lane.unsettled for lane in self._router.lanes()):
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        self._raise_failures()

    def _called(self) -> int:
        return sum(lane.callbacks.count for lane in self._router.lanes())

    def _forget_failures(self) -> None:
        """Raise none of the failures since the last flush."""
        self._failures.clear()

    def _raise_failures(self) -> None:
        """Raise the failures since the last flush, once."""
        failures, self._failures = self._failures, []
        if self._client is not None:
            # An epoch that is over fails every pack alike: raise one error for the transaction.
            ends = (FencedError, TransactionAbortedError)
            over: list[BaseException] = [each for each in failures if isinstance(each, ends)]
            failures = over[:1] or failures
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise BaseExceptionGroup(f"{len(failures)} packs of records failed", failures)

    def close(self) -> None:
        """Flush, and take no more records.  Closing twice is harmless.

        Callbacks may send for `max_block` seconds more; then they get ClosedError.

        When records cannot be written (a full disk) it raises, and can be tried again; what has
        failed for good is raised once, and the producer is closed.
        """
        if self._closed:
            return
        self._check_fork()
        self._quick = False
        try:
            if self._client is not None and self._client.current is not None:
                self._client.abort(self._client.current)
            self._flush(time.monotonic() + self._max_block)
        except DiskFullError:
            if self.pending:
                self._quick = self._is_plain()
                raise
            self._close_now()
            raise
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                self._close_now()
                for failure in self._failures:
                    error.add_note(f"and then: {failure}")
            raise
        self._close_now()
        self._raise_failures()

    def _close_now(self) -> None:
        """Take no more, and write what came in since the flush; failures are noted."""
        with self._making:
            self._closed = True  # and no lane is made any more
        for lane in self._router.lanes():
            lane._close()  # from here on nothing comes in: whoever is late gets ClosedError
            try:
                self._blocking(lane.close)
            except Exception as error:  # noqa: BLE001  for the caller
                self.note_failure(error)
                lane.fail_unwritten(error)
        for lane in self._router.lanes():
            lane.callbacks.wait()
        busy.discard(self)
        self._wake.set()

    def _check_usable(self) -> None:
        self._check_fork()
        if self._closed:
            raise ClosedError("the producer is closed")

    def _check_fork(self) -> None:
        if self._generation != _native.fork_generation():
            raise ForkedHandleError(
                "this producer was made before a fork: make another in this process, on a store "
                "that was opened in it"
            )


def _positive(**settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ConfigError(f"{name} must be positive, not {value!r}")


def _serialized(serialize: Serializer, given: Any, part: str, topic: str) -> bytes | None:
    try:
        made: object = serialize(given)
    except Exception as error:
        raise SerializationError(error, part=part, topic=topic, data=given) from error
    if made is not None and not isinstance(made, bytes):
        wrong = TypeError(f"the serializer returned {type(made).__name__}, not bytes")
        raise SerializationError(wrong, part=part, topic=topic, data=given)
    return made
