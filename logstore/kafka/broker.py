"""Broker: what stands between the connections and a store.

It decodes requests, calls their handlers, encodes the answers, and owns what handlers share.  All
state of records, groups and transactions is the store's; the broker holds connections and fetch
sessions only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from logstore.clock import Clock, SystemClock
from logstore.coordinators.internal_topics import INTERNAL_TOPICS, internal_partitions
from logstore.coordinators.quorum.quorum import Coordination
from logstore.errors import ClosedError, IndeterminateAppendError, ReadOnlyError
from logstore.kafka.apis import APIS, INLINE, WORKER, handler, quick_handler
from logstore.kafka.calls import Call, NotNowError, Pending
from logstore.kafka.clustering.topology import Alone, NodeRow, Topology, replica_id
from logstore.kafka.config import KafkaConfig
from logstore.kafka.faults import Faults
from logstore.kafka.handlers.fetch_sessions import FetchSessions
from logstore.kafka.handlers.versions import unsupported
from logstore.kafka.metrics import ApiCounts, TopicCounts
from logstore.kafka.network.acceptor import parse_advertised
from logstore.kafka.network.connection import FETCH, PRODUCE, Connection, Slot
from logstore.kafka.network.memory import Memory
from logstore.kafka.network.outgoing import Outgoing, Pieces
from logstore.kafka.protocol.codec import MALFORMED, Hole, MalformedFrameError, decoder, encoder
from logstore.kafka.protocol.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.kafka.protocol.frames import (
    API_VERSIONS,
    SIZE_BYTES,
    is_flexible,
    read_header,
    response_head,
    skip_tags,
)
from logstore.kafka.protocol.refusal import error_codes, refusal
from logstore.kafka.request_log import RequestLog
from logstore.kafka.syncs import Syncs
from logstore.kafka.waiting import Waiting
from logstore.kafka.workers import LoopCalls, Workers
from logstore.store.store import Store
from logstore.store.topic import Topic

if TYPE_CHECKING:
    from logstore.coordinators.group_coordinator import GroupCoordinator
    from logstore.replication.node import Node

__all__ = ["Broker"]

log = logging.getLogger("logstore.kafka")

# A larger request is decoded by a worker.  Produce: what is larger is appended by a worker anyway.
LARGE_BYTES, LARGE_PRODUCE_BYTES = 16 << 10, 64 << 10
# A plain batch of this size takes 0.2 ms to be checked and written: as long as a hop to a worker.
QUICK_BYTES = 256 << 10
LINES_MAX = 10  # log lines a second about peers that were refused
SLOW_SECONDS = 1.0
MEMBERS_WAIT = frozenset({11, 14})  # JoinGroup and SyncGroup wait for other members
# The APIs of groups and transactions: a store that cannot write has no coordinator for them.
COORDINATED = frozenset({8, 9, *range(11, 17), 22, *range(24, 27), 28, 42, 47, 65, 66, 68, 69})


class Broker:
    """Serves the connections of one event loop."""

    def __init__(
        self,
        store: Store,
        config: KafkaConfig,
        loop: asyncio.AbstractEventLoop,
        faults: Faults | None = None,
        node: Node | None = None,
    ) -> None:
        self.store = store
        self.node = node
        self.topology = _topology(store, config, node)
        self.clock: Clock = store.clock or SystemClock()
        self.limits = self.config = config
        self.loop = loop
        self.memory = Memory(config.queued_max_request_bytes)
        self.unsent_bytes = 0
        self.calls = LoopCalls(loop)
        self.workers = Workers(config.num_io_threads, self.calls)
        self.waiting = Waiting(self.calls, loop)
        slots = config.max_incremental_fetch_session_cache_slots
        self.sessions = FetchSessions(slots, self.waiting, loop.time)
        self.syncs = Syncs(self.calls)
        self.connections: set[Connection] = set()
        self.by_ip: Counter[str] = Counter()
        self.faults = faults or Faults()
        self.began = loop.time()
        self.counts = {key: ApiCounts() for key in APIS}
        self.topics = TopicCounts()
        self.slow = 0  # requests with more than SLOW_SECONDS of own work
        self.request_log = RequestLog.if_wanted()
        self.errors: Counter[tuple[int, int]] = Counter()  # by API and code
        self.accepted = self.received = self.sent = 0  # bytes of connections that have ended
        self.lag_seconds = 0.0  # how late the last timer of the loop was
        self._lines = LINES_MAX  # of the log, that closed connections may still get this second
        self._lines_left_out = 0
        self._slow_logged = 0.0  # when a slow request was logged
        self.closed_for: Counter[str] = Counter()
        self.draining = False
        self._by_id: dict[bytes, Topic] = {}  # topics, as they were when an id was not found
        self._configured = False  # whether the groups have the settings of the listener
        self.when_room: Callable[[], object] = lambda: None  # a connection has ended
        # An append of `answer_now` may be in the log: `begin`, which follows, answers with this.
        self._indeterminate: IndeterminateAppendError | None = None

    def close(self) -> None:
        """Wait for the threads."""
        self.workers.close()
        self.syncs.close()

    # ---- what handlers ask for ----

    def groups(self) -> GroupCoordinator:
        """Return the groups of the store.  Imported and made when first used."""
        from logstore.coordinators.consumer_group.machine import ConsumerGroupConfig
        from logstore.coordinators.group_coordinator import GroupCoordinator

        groups = GroupCoordinator.of(self.store)
        if not self._configured:
            self._configured = True
            # The session time-out of clients is checked by the handler: members of this process
            # may have a shorter one.
            groups.config = dataclasses.replace(
                groups.config,
                initial_rebalance_delay_ms=self.config.group_initial_rebalance_delay_ms,
                max_size=self.config.group_max_size,
            )
            groups.consumer_config = ConsumerGroupConfig(
                session_timeout_ms=self.config.group_consumer_session_timeout_ms,
                heartbeat_interval_ms=self.config.group_consumer_heartbeat_interval_ms,
                max_size=self.config.group_consumer_max_size,
                assignors=tuple(self.config.group_consumer_assignors.split(",")),
                assignment_interval_ms=self.config.group_consumer_assignment_interval_ms,
            )
        return groups

    def take_producer_id(self) -> int:
        """Return a producer id that nothing else has."""
        return Coordination.of(self.store).take_producer_id(-1)

    def topic_by_id(self, id_bytes: bytes) -> Topic | None:
        """Return the topic with an id."""
        topic = self._by_id.get(id_bytes)
        if topic is None or topic.deleted:
            topics = self.store.values()
            self._by_id = {each.id.bytes: each for each in topics if each.id is not None}
            topic = self._by_id.get(id_bytes)
        return topic

    def topic_name(self, id_bytes: bytes) -> str | None:
        """Return the name of the topic with an id, of this store or of its cluster."""
        topic = self.topic_by_id(id_bytes)
        return self.topology.name_of(id_bytes) if topic is None else topic.name

    def local_partitions(self, topic: Topic) -> Sequence[int]:
        """Return the numbers of a topic's partitions that are here, or are made when used."""
        if self.node is None and topic.name in INTERNAL_TOPICS:
            return range(internal_partitions(topic.name))
        return topic.partition_numbers

    # ---- connections ----

    def connected(self, connection: Connection) -> None:
        """Count a connection."""
        self.accepted += 1
        self.connections.add(connection)
        self.by_ip[connection.peer[0]] += 1
        if self.draining:
            connection.close("drain")

    def disconnected(self, connection: Connection, reason: str) -> None:
        """Forget a connection."""
        if connection in self.connections:
            self.connections.discard(connection)
            ip = connection.peer[0]
            self.by_ip[ip] -= 1
            if not self.by_ip[ip]:
                del self.by_ip[ip]
            self.closed_for[reason] += 1
            self.received += connection.received
            self.sent += connection.sent
            if reason not in ("peer", "idle", "drain", "fault"):
                self._log_closed(connection, reason)
            self.when_room()

    def _log_closed(self, connection: Connection, reason: str) -> None:
        """Log why a peer was refused, a few times a second."""
        if self._lines > 0:
            self._lines -= 1
            log.info("closed %s:%d: %s %s", *connection.peer, reason, connection.detail)
        else:
            self._lines_left_out += 1

    def check_times(self) -> None:
        """Close the connections that are idle or too slow, and more.  Called once a second."""
        if self._lines_left_out:
            log.info("closed %d more connections", self._lines_left_out)
        self._lines, self._lines_left_out = LINES_MAX, 0
        self.request_log = RequestLog.if_wanted()
        now = self.loop.time()
        for connection in list(self.connections):
            connection.check_time(now)
        self.sessions.cool_unused()

    def load(self, outgoing: Outgoing, done: Callable[[BaseException | None], object]) -> None:
        """Read the next chunk of a response in a worker's thread."""
        self.workers.submit(outgoing.load, lambda _, error: done(error))

    # ---- requests ----

    def answer_now(
        self, connection: Connection, key: int, buffer: bytearray, at: int, size: int
    ) -> Pieces | None:
        """Carry out a Produce or Fetch request of the common shape; None for others.

        It is what `begin` does with such a request, in fewer steps.  A request that has a fault or
        a line of the request log is none of these.
        """
        if size > QUICK_BYTES or self.faults.rules is not None or self.request_log is not None:
            return None
        try:
            answered = quick_handler(key)(self, connection, buffer, at, size)
        except IndeterminateAppendError as error:
            self._indeterminate, answered = error, None
        if answered is None:
            return None
        pieces, sent = answered
        now = monotonic()
        own = now - connection.used_at
        counts = self.counts[key]
        counts.requests += 1
        counts.add_direct(SIZE_BYTES + size, sent, own)
        if own > SLOW_SECONDS:
            self._count_slow(key, connection, own, now)
        return pieces

    def begin(self, connection: Connection, slot: Slot, frame: memoryview) -> None:
        """Decode a request and call its handler."""
        try:
            header, at = read_header(frame)
            key, version = header.key, header.version
            api = APIS.get(key)
            if api is None or not api.first <= version <= api.last:
                if key == API_VERSIONS:
                    pieces, _ = _encoded(key, 0, header.correlation_id, unsupported())
                    connection.answer(slot, pieces)
                else:
                    connection.close("version", f"version {version} of API {key} is not served")
                connection.release()
                return
            if is_flexible(key, version):
                at = skip_tags(frame, at)
            connection.client_id = header.client_id
            call = Call(
                self, connection, slot, key, version, header.correlation_id, header.client_id, {},
                SIZE_BYTES + len(frame), connection.used_at, connection.used_at,
            )  # fmt: skip
            limit = LARGE_PRODUCE_BYTES if key == PRODUCE else LARGE_BYTES
            large = len(frame) > limit and self.faults.rules is None
            if not large:
                _decode(call, frame, at)
        except MALFORMED as error:
            connection.close("malformed", str(error))
            connection.release()
            return
        self.counts[key].requests += 1
        if large:
            self._submit(call, lambda: _decode(call, frame, at))
        elif self._indeterminate is not None:
            failure, self._indeterminate = self._indeterminate, None
            self._finish(call, failure)
        elif self.faults.rules is None or not self._has_fault(call):
            self._run(call)

    def _has_fault(self, call: Call) -> bool:
        """Act on the fault of a request; return whether the handler is not to be called now."""
        fault = self.faults.take(call)
        if fault is None:
            return False
        if fault.kind == "delay":
            self.loop.call_later(fault.seconds, self._run_late, call)
            return True
        if fault.kind == "fail":
            self._finish(call, KafkaError(fault.code, fault.text))
            return True
        call.dropped = True
        if not fault.after:
            self._finish(call, None)
        return not fault.after

    def _run_late(self, call: Call) -> None:
        call.started = monotonic()
        self._run(call)

    def _run(self, call: Call) -> None:
        """Call the handler of a request, here or in a worker's thread."""
        where = APIS[call.key].where
        if where == WORKER:
            self._submit(call)
            return
        try:
            result = handler(call.key)(call)
        except NotNowError:
            assert where != INLINE, call.key
            self._submit(call)
        except Exception as error:  # noqa: BLE001  answered with its code
            self._finish(call, error)
        else:
            self._finish(call, result)

    def _submit(self, call: Call, first: Callable[[], object] | None = None) -> None:
        """Call the handler in a worker's thread, after `first`; encode its answer there, too.

        A large request or answer would keep the loop from all other connections.
        """
        call.may_wait = True

        def act() -> object:
            call.started = monotonic()
            try:
                if first is not None:
                    first()
                result = handler(call.key)(call)  # may import the handler's module: not in the loop
                return _Encoded.of(call, result) if isinstance(result, dict) else result
            finally:
                call.handled = monotonic()

        self.workers.submit(act, lambda result, error: self._finish(call, error or result))

    def complete(self, call: Call, result: dict[str, Any] | BaseException | None) -> None:
        """Answer a call whose handler returned a Pending.  From any thread."""
        self.calls.put(lambda: self._finish(call, result))

    def _finish(self, call: Call, result: object) -> None:
        """Answer a call, in the loop's thread."""
        if isinstance(result, Pending):
            if call.over:
                return  # the answer was faster than the thread that brings the Pending
            call.handled = call.handled or monotonic()
            call.slot.resting = call.key in MEMBERS_WAIT
            if call.key != PRODUCE:
                call.connection.decoded()
            if result.early and not call.released:
                call.released = True
                call.connection.release()
            return
        call.over = True
        connection = call.connection
        if call.dropped:
            self._count(call, result, [])
            connection.abort("fault")
        elif isinstance(result, MalformedFrameError):
            connection.close("malformed", str(result))
        else:
            try:
                self._answer(call, result)
            except Exception as error:
                log.exception("the answer of %s cannot be sent", APIS[call.key].name)
                connection.close("error", str(error))
        if not call.released:
            call.released = True
            connection.release()

    def _answer(self, call: Call, result: object) -> None:
        connection = call.connection
        if isinstance(result, BaseException):
            result = self._refusal(call, result)
            if result is None:
                self._count(call, None, [])
                connection.close("error", "a request with acks=0 failed")
                return
        if result is None:
            self._count(call, None, [])
            connection.answer(call.slot, ())
            return
        if isinstance(result, dict):
            result = _Encoded.of(call, result)
        assert isinstance(result, _Encoded)
        call.sent = result.size_bytes
        for code in result.error_codes:
            self.errors[call.key, code] += 1
        self._count(call, result.body, result.error_codes)  # before the client sees the answer
        connection.answer(call.slot, result.pieces)

    def _count(self, call: Call, body: object, codes: list[int]) -> None:
        """Count a request that is being answered, and log it if that is wanted."""
        now = monotonic()
        own = self.counts[call.key].add(call, now)
        if call.appended:
            self.topics.appended(call.appended)
        elif call.key == FETCH and isinstance(body, dict) and replica_id(call.body) < 0:
            self.topics.fetched(self, body)
        if own > SLOW_SECONDS:
            self._count_slow(call.key, call.connection, own, now)
        if self.request_log is not None:
            self.request_log.write(call, body, codes, now)

    def _count_slow(self, key: int, connection: Connection, own: float, now: float) -> None:
        """Log a slow request, at most one a second."""
        self.slow += 1
        if now - self._slow_logged >= 1.0:
            self._slow_logged = now
            log.warning("%s of %r took %.1f s of own work", APIS[key].name, connection, own)

    def _refusal(self, call: Call, error: BaseException) -> dict[str, Any] | None:
        """Return the answer for an exception of a handler; None if its client awaits none."""
        code = error_code(error)
        if code is ErrorCode.UNKNOWN_SERVER_ERROR and not isinstance(error, KafkaError):
            log.error("%s of %r failed", APIS[call.key].name, call.connection, exc_info=error)
        if call.key == PRODUCE and call.body["acks"] == 0:
            return None
        if call.key in COORDINATED and isinstance(error, ReadOnlyError | ClosedError):
            code = ErrorCode.COORDINATOR_NOT_AVAILABLE
        return refusal(call.key, call.version, call.body, code, error_message(error))


def _topology(store: Store, config: KafkaConfig, node: Node | None) -> Topology:
    if node is not None:
        from logstore.kafka.clustering.clustered import Clustered

        return Clustered(node)
    advertised = None
    if config.advertised_listeners:
        advertised = NodeRow(store.identity.node_id, *parse_advertised(config.advertised_listeners))
    return Alone(store, advertised)


class _Encoded(NamedTuple):
    """An answer that is ready to be sent."""

    body: dict[str, Any]
    pieces: Pieces
    size_bytes: int
    error_codes: list[int]

    @classmethod
    def of(cls, call: Call, body: dict[str, Any]) -> _Encoded:
        """Encode the answer of a call."""
        pieces, size_bytes = _encoded(call.key, call.version, call.correlation_id, body)
        return cls(body, pieces, size_bytes, error_codes(call.key, body))


def _decode(call: Call, frame: memoryview, at: int) -> None:
    """Decode the body of a request; raise MalformedFrameError if its bytes are no request."""
    try:
        call.body, at = decoder(call.key, "request", call.version)(frame, at, len(frame))
    except MALFORMED as error:
        raise MalformedFrameError(str(error)) from error
    # Bytes after the request are ignored, as Kafka does: librdkafka sends three of them with the
    # Metadata request for all topics.
    if at > len(frame):
        raise MalformedFrameError("the request is cut off")


def _encoded(
    key: int, version: int, correlation_id: int, body: dict[str, Any]
) -> tuple[Pieces, int]:
    """Return a whole frame and its size: bytes, and slices of files that are read when sent."""
    out = bytearray()
    holes: list[tuple[int, Hole]] = []
    encoder(key, "response", version)(body, out, holes)
    size = len(out) + sum(hole.size_bytes for _, hole in holes)
    tagged = key != API_VERSIONS and is_flexible(key, version)
    head = response_head(size, correlation_id, tagged=tagged)
    size += len(head)
    if not holes:
        return (head + out,), size
    pieces: list[Any] = []
    at = 0
    for position, hole in holes:
        pieces.append((head if at == 0 else b"") + out[at:position])
        pieces.append(hole)
        at = position
    pieces.append(bytes(out[at:]))
    return pieces, size
