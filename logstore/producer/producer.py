"""Producer: records from an application into the topics of a store.

`append` returns after its record is durable.  `send` returns a Delivery at once; the Delivery has
the result later.  Each partition has a lane, which is a buffer of records.  The records of a lane
are written in batches, in the order in which they were sent.

The thread that calls `send` and finds a lane full writes the lane: that is the back-pressure.  One
thread of the producer writes the lanes that have lingered, syncs them and finishes the deliveries.
It sleeps while no record is pending.  A producer with pending records stays referenced, so its
records are written even if the program drops the producer or the interpreter exits.

If the producer is idempotent, every batch has the producer's id and a sequence.  The partition
answers a batch that is written again with the offsets of the first write.

Threads may share a producer.  A producer with a transactional id writes in transactions only, one
at a time, and a transaction is used by one thread.

Locks are taken in this order: a dedupe window's `lock`, `_making`, a lane's `_order`, the locks of
the transaction coordinator and of the partition, the lane's `_settling`, `delivery._changes`.  No
callback of a delivery is called while its thread holds one of them: see `delivery.answering`.
"""

from __future__ import annotations

import errno
import logging
import resource
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
    ForkedHandleError,
)
from logstore.interceptors import InterceptorChain, Outgoing
from logstore.partitioner import Partitioner
from logstore.producer.dedupe import DedupeWindows
from logstore.producer.delivery import Delivery, answering
from logstore.producer.failures import Failures
from logstore.producer.lane import Lane
from logstore.producer.lingering import busy, start_thread
from logstore.producer.routing import Route, Router, partitioner_of
from logstore.producer.transacting import TransactionClient
from logstore.producer.transaction import Transaction
from logstore.serialization import SerializationError, Serializer, serializer
from logstore.store.descriptors import FILES_PER_PARTITION
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
    - `buffer_bytes`: bytes of unwritten records in memory; above it, `send` writes first.
    - `max_block`: seconds that a call may wait for space on a full disk; then it raises
      DiskFullError, and the record of that call was not taken.
    - `delivery_timeout`: seconds of a full disk after which the records that wait fail, too.
    - `partitioner`: a callable of (key, value, partitions), "round_robin" or "random"; by default
      the topic's own.
    - `key_serializer`, `value_serializer`: a callable, or "json", "string", "integer", "long"...
    - `interceptors`: objects with `on_send` or `on_acknowledgement`, called in this order.
    - `durability`: "fsync" or "os"; the store's by default.
    - `idempotence`: number the batches, so that none is appended twice.

    A record that is sent with a `dedupe_id` (str or bytes) is appended once.  If the same id is
    sent to the same topic again, the delivery has the position of the first record.  This holds for
    `dedupe_window` seconds after the append, and while the record is among the `dedupe_records`
    newest of its partition.  The id is a header of the record, so it lasts as long as the record.

    With a `transactional_id` it writes in transactions only: see `transaction`.  It is the only
    producer of that id: an earlier producer of the id is fenced, and its open transaction aborted.
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
        self._closed = True  # until __init__ has succeeded: `__del__` then has nothing to close
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
        self._making = threading.RLock()  # held to make a route, a lane or the thread
        self._failures = Failures()  # since the last flush
        self._stuck_since: float | None = None  # monotonic time since which the disk is full
        self._wake = Wake()
        self._thread: threading.Thread | None = None
        self._hurried = False
        # The next three are read by the C half of `send`.  It puts bytes into a lane without a call
        # of Python while `_quick` is true, and calls `_look_at_buffer` after `_held_max` bytes.
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
        """Return whether `send` may put bytes into a batch without a call of Python."""
        if self._client is not None and self._client.current is None:
            return False
        return self._takes_bytes()

    def _takes_bytes(self) -> bool:
        """Return whether there are neither serializers nor interceptors."""
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
        """Its id in the log; -1 if it is not idempotent."""
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
        """Append one record and return its position, after it is as durable as `durability` asks.

        Records that were sent to the same partition earlier are written first.  Raises the errors
        of `Partition.append`.
        """
        delivery = self._send(topic, value, key=key, headers=headers, timestamp=timestamp,
                              partition=partition, dedupe_id=dedupe_id)  # fmt: skip
        lane = delivery._pack.carrier
        # `carrier` was read before `done`: if the pack is not done here, it was a lane.
        if not delivery.done():
            self._deliver(cast(Lane, lane))
        return delivery.result()

    def _deliver(self, lane: Lane) -> None:
        """Write a lane and finish its deliveries in this thread."""
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
        """Send a record that the C half of `send` does not handle: see `_quick`."""
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

    # ---- for lanes ----

    def enlist(self, lane: Lane) -> bool:
        """Add a lane's partition to the open transaction; return False without transactional id."""
        if self._client is None:
            return False
        self._client.enlist(lane)
        return True

    def make_room(self, lane: Lane) -> None:
        """Write a full lane in the thread that found it full."""
        self._write_blocking(lane)

    def note_failure(self, error: BaseException) -> None:
        """Keep the error of records that are not delivered; `flush` or `close` raises it."""
        self._failures.note(error)

    def explain(self, error: BaseException) -> BaseException:
        """Return the coordinator's reason for a FencedError; any other error itself.

        An error for want of file descriptors gets a note with the limit.
        """
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            error.add_note(
                f"the process's limit of open files is {limit}; a producer keeps each partition "
                f"that it has written open, with up to {FILES_PER_PARTITION} descriptors: raise "
                f"the limit (ulimit -n), or send to fewer partitions with one producer"
            )
        return error if self._client is None else self._client.explain(error)

    def hurry(self) -> None:
        """Make the thread write without lingering: a caller waits for a delivery."""
        self._hurried = True  # before the wake: the round after it clears the flag
        self._look_after()
        self._wake.set()

    # ---- the buffer ----

    def _look_at_buffer(self) -> None:
        """Write all lanes, the largest first, if together they hold `buffer_bytes`.

        One lane is bounded by its batch size; this bounds the sum.
        """
        held = self.held_bytes
        if held >= self._buffer_bytes:
            for lane in sorted(
                self._router.lanes(), key=lambda each: each.held_bytes, reverse=True
            ):
                self._write_blocking(lane)
            held = self.held_bytes
        # `send` calls this method again after `_held_max` more bytes.
        self._held = 0
        self._held_max = max(1, min(self._buffer_bytes - held, 1 << 20))

    def _write_blocking(self, lane: Lane) -> None:
        """Write a lane; on a full disk, wait for at most `max_block` seconds for space."""
        try:
            self._blocking(lane.write_out)
        except DiskFullError as error:
            error.add_note(
                f"waited {self._max_block} s for disk space; {self.pending} records are held "
                f"and will be tried again, the record of this call was not taken"
            )
            raise

    def _blocking(self, act: Callable[[], T]) -> T:
        """Call `act` until it does not raise DiskFullError, for at most `max_block` seconds."""
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
        """Wake the thread, or start it, before a record is sent."""
        if self._idle:
            with self._making:
                busy.add(self)
                if self._thread is None:
                    self._thread = start_thread(self, self._wake, self._linger)
                # `_idle` is cleared last: after an interrupt before it, the next call repeats all.
                self._wake.set()
                self._idle = False

    def _write_lingering(self) -> bool:
        """Do one round of the thread; return whether records are still pending."""
        self._hurried = False
        full = False
        for lane in self._router.lanes():
            try:
                lane.write_out()
            except DiskFullError as error:
                full = True
                self._stuck(lane, error)
        # Only a round in which no lane failed clears the time: a lane that wrote nothing succeeds.
        if not full:
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
            # `send` looks at `_idle` before it adds a record.  A record that was added before
            # `_idle` was set is found by the next line; a later `send` sees `_idle` and wakes us.
            if any(lane.unsettled for lane in self._router.lanes()) or self._hurried:
                self._idle = False
                return True
            busy.discard(self)
            return False

    def _went_round(self) -> None:
        """Hook after each round: AsyncProducer wakes tasks that wait for buffer space."""

    def _go_round(self) -> bool:
        """Do one round; log an error instead of raising it, because the thread has to live on."""
        try:
            return self._write_lingering()
        except BaseException:
            if not self._store.closed:
                log.exception("the thread of a producer continues after an error")
            return True

    def _stuck(self, lane: Lane, error: DiskFullError) -> None:
        """Fail the records of a lane if the disk has been full for `delivery_timeout` seconds."""
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
        """The name of its transactions, the same after a restart; None: it writes without them."""
        return None if self._client is None else self._client.name

    def transaction(self) -> Transaction:
        """Begin a transaction: committed at the end of a ``with`` block, aborted if it raises.

        Raises FencedError if another producer has the transactional id by now.
        """
        self._check_usable()
        if self._client is None:
            raise ConfigError("transactions need a name: Producer(store, 'my-transactional-id')")
        return self._client.begin()

    # ---- ending ----

    def flush(self) -> None:
        """Write all records that were sent; return after all their deliveries are done.

        Records that callbacks send during the flush are included, unless a callback calls `flush`.

        Raises the error of records that could not be delivered since the last flush, or a
        BaseExceptionGroup if there are several: no record is lost without an exception.
        """
        self._check_usable()
        self._flush()

    def _flush(self, deadline: float | None = None) -> None:
        """Write all and finish all deliveries.

        Records that callbacks send are included if the callbacks were called before `deadline`.
        """
        while True:
            before = self._called()  # before the writes, which call callbacks
            for lane in self._router.lanes():
                self._write_blocking(lane)
            for lane in self._router.lanes():
                if self.fsync:
                    lane.sync()
                else:
                    lane.settle()
            for lane in self._router.lanes():
                lane.callbacks.wait()
            # Repeat only if callbacks were called, which may have sent: other threads may send
            # without end, and `flush` does not wait for their records.
            if self._called() == before or not any(lane.unsettled for lane in self._router.lanes()):
                break
            if deadline is not None and time.monotonic() >= deadline:
                break
        self._raise_failures()

    def _called(self) -> int:
        """Return how many callbacks of deliveries were called so far."""
        return sum(lane.callbacks.count for lane in self._router.lanes())

    def _forget_failures(self) -> None:
        """Drop the failures since the last flush: an abort has made them meaningless."""
        self._failures.take()

    def _raise_failures(self) -> None:
        """Raise the failures since the last flush, once."""
        self._failures.raise_all(in_transaction=self._client is not None)

    def close(self) -> None:
        """Flush, and take no more records.  Closing twice is harmless.

        Callbacks may send for `max_block` seconds more; then they get ClosedError.

        If a full disk keeps records from being written, it raises DiskFullError, the producer stays
        open, and `close` can be called again.  After any other error the producer is closed.
        """
        if self._closed:
            return
        self._check_fork()
        self._quick = False  # `send` of other threads takes the slow way, which checks `_closed`
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
                self._failures.add_to(error)
            raise
        self._close_now()
        self._raise_failures()

    def _close_now(self) -> None:
        """Take no more records, and write those that were sent after the flush; keep failures."""
        with self._making:
            self._closed = True  # `_making` is held: no lane is made after this line
        for lane in self._router.lanes():
            lane._close()  # a record that is sent after this line gets ClosedError
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
