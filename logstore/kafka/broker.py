"""Broker: what stands between the connections and a store.

It decodes requests, calls their handlers, encodes the answers, and owns what handlers share.  All
state of records, groups and transactions is the store's; the broker holds connections only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from logstore.clock import Clock, SystemClock
from logstore.coordinators.internal_topics import INTERNAL_TOPICS, PARTITIONS
from logstore.errors import ClosedError, ReadOnlyError
from logstore.kafka.acceptor import parse_address
from logstore.kafka.apis import APIS, INLINE, WORKER, handler
from logstore.kafka.calls import Call, NotNowError, Pending
from logstore.kafka.codec import MALFORMED, Hole, MalformedFrameError, decoder, encoder
from logstore.kafka.config import KafkaConfig
from logstore.kafka.connection import PRODUCE, Connection, Slot
from logstore.kafka.errors import ErrorCode, KafkaError, error_code, error_message
from logstore.kafka.faults import Faults
from logstore.kafka.frames import API_VERSIONS, is_flexible, read_header, response_head, skip_tags
from logstore.kafka.memory import Memory
from logstore.kafka.outgoing import Outgoing
from logstore.kafka.refusal import error_codes, refusal
from logstore.kafka.syncs import Syncs
from logstore.kafka.versions import unsupported
from logstore.kafka.waiting import Waiting
from logstore.kafka.workers import LoopCalls, Workers
from logstore.store.store import Store
from logstore.store.topic import Topic

if TYPE_CHECKING:
    from logstore.coordinators.group_coordinator import GroupCoordinator

__all__ = ["Broker"]

log = logging.getLogger("logstore.kafka")

LINES_MAX = 10  # log lines a second about peers that were refused
MEMBERS_WAIT = frozenset({11, 14})  # JoinGroup and SyncGroup wait for other members
# The APIs of groups and transactions: a store that cannot write has no coordinator for them.
COORDINATED = frozenset({8, 9, *range(11, 17), 22, *range(24, 27), 28, 42, 47, 65, 66})


class Broker:
    """Serves the connections of one event loop."""

    def __init__(
        self,
        store: Store,
        config: KafkaConfig,
        loop: asyncio.AbstractEventLoop,
        faults: Faults | None = None,
    ) -> None:
        self.store = store
        self.clock: Clock = store.clock or SystemClock()
        self.limits = self.config = config
        self.loop = loop
        self.memory = Memory(config.queued_max_request_bytes)
        self.calls = LoopCalls(loop)
        self.workers = Workers(config.num_io_threads, self.calls)
        self.waiting = Waiting(self.calls, loop)
        self.syncs = Syncs(self.calls)
        self.connections: set[Connection] = set()
        self.by_ip: Counter[str] = Counter()
        self.faults = faults or Faults()
        self.requests: Counter[int] = Counter()
        self.errors: Counter[tuple[int, int]] = Counter()  # by API and code
        self.accepted = self.received = self.sent = 0  # bytes of connections that have ended
        self.lag_seconds = 0.0  # how late the last timer of the loop was
        self._lines = LINES_MAX  # of the log, that closed connections may still get this second
        self._lines_left_out = 0
        self.closed_for: Counter[str] = Counter()
        self.draining = False
        self._by_id: dict[bytes, Topic] = {}  # topics, as they were when an id was not found
        self._configured = False  # whether the groups have the settings of the listener
        self.when_room: Callable[[], object] = lambda: None  # a connection has ended

    def close(self) -> None:
        """Wait for the threads."""
        self.workers.close()
        self.syncs.close()

    # ---- what handlers ask for ----

    def groups(self) -> GroupCoordinator:
        """Return the groups of the store.  Imported and made when first used."""
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
        return groups

    def take_producer_id(self) -> int:
        """Return a producer id that nothing else has."""
        return self.store.producer_ids.take()

    def address_for(self, connection: Connection) -> tuple[str, int]:
        """Return the address that a client is sent to."""
        if self.config.advertised_listeners:
            _, host, port = parse_address(self.config.advertised_listeners)
            return host, port
        return connection.local

    def topic_by_id(self, id_bytes: bytes) -> Topic | None:
        """Return the topic with an id."""
        topic = self._by_id.get(id_bytes)
        if topic is None or topic.deleted:
            topics = self.store.values()
            self._by_id = {each.id.bytes: each for each in topics if each.id is not None}
            topic = self._by_id.get(id_bytes)
        return topic

    def declared_partitions(self, topic: Topic) -> Sequence[int]:
        """Return the numbers of a topic's partitions, made or not."""
        if topic.name in INTERNAL_TOPICS:
            return range(PARTITIONS)
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
        """Close the connections that are idle or too slow.  Called once a second."""
        if self._lines_left_out:
            log.info("closed %d more connections", self._lines_left_out)
        self._lines, self._lines_left_out = LINES_MAX, 0
        now = self.loop.time()
        for connection in list(self.connections):
            connection.check_time(now)

    def load(self, outgoing: Outgoing, done: Callable[[BaseException | None], object]) -> None:
        """Read the next chunk of a response in a worker's thread."""
        self.workers.submit(outgoing.load, lambda _, error: done(error))

    # ---- requests ----

    def begin(self, connection: Connection, slot: Slot, frame: memoryview) -> None:
        """Decode a request and call its handler."""
        try:
            header, at = read_header(frame)
            key, version = header.key, header.version
            api = APIS.get(key)
            if api is None or not api.first <= version <= api.last:
                if key == API_VERSIONS:
                    self._send(connection, slot, key, 0, header.correlation_id, unsupported())
                    connection.release()
                else:
                    connection.close("version", f"version {version} of API {key} is not served")
                    connection.release()
                return
            if is_flexible(key, version):
                at = skip_tags(frame, at)
            body, at = decoder(key, "request", version)(frame, at, len(frame))
            # Bytes after the request are ignored, as Kafka does: librdkafka sends three of them
            # with the Metadata request for all topics.
            if at > len(frame):
                raise MalformedFrameError("the request is cut off")
        except MALFORMED as error:
            connection.close("malformed", str(error))
            connection.release()
            return
        connection.client_id = header.client_id
        self.requests[key] += 1
        call = Call(
            self, connection, slot, key, version, header.correlation_id, header.client_id, body
        )
        if self.faults.rules is None or not self._has_fault(call):
            self._run(call)

    def _has_fault(self, call: Call) -> bool:
        """Act on the fault of a request; return whether the handler is not to be called now."""
        fault = self.faults.take(call)
        if fault is None:
            return False
        if fault.kind == "delay":
            self.loop.call_later(fault.seconds, self._run, call)
            return True
        if fault.kind == "fail":
            self._finish(call, KafkaError(fault.code, "a fault that was asked for"))
            return True
        call.dropped = True
        if not fault.after:
            self._finish(call, None)
        return not fault.after

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

    def _submit(self, call: Call) -> None:
        call.may_wait = True
        self.workers.submit(
            lambda: handler(call.key)(call),  # may import the handler's module: not in the loop
            lambda result, error: self._finish(call, error or result),
        )

    def complete(self, call: Call, result: dict[str, Any] | BaseException | None) -> None:
        """Answer a call whose handler returned a Pending.  From any thread."""
        self.calls.put(lambda: self._finish(call, result))

    def _finish(self, call: Call, result: object) -> None:
        """Answer a call, in the loop's thread."""
        if isinstance(result, Pending):
            call.slot.resting = call.key in MEMBERS_WAIT
            if result.early and not call.released:
                call.released = True
                call.connection.release()
            return
        connection = call.connection
        if call.dropped:
            connection.abort("fault")
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
                connection.close("error", "a request with acks=0 failed")
                return
        if result is None:
            connection.answer(call.slot, ())
            return
        assert isinstance(result, dict)
        for code in error_codes(call.key, result):
            self.errors[call.key, code] += 1
        self._send(connection, call.slot, call.key, call.version, call.correlation_id, result)

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

    def _send(
        self,
        connection: Connection,
        slot: Slot,
        key: int,
        version: int,
        correlation_id: int,
        body: dict[str, Any],
    ) -> None:
        out = bytearray()
        holes: list[tuple[int, Hole]] = []
        encoder(key, "response", version)(body, out, holes)
        size = len(out) + sum(hole.size_bytes for _, hole in holes)
        tagged = key != API_VERSIONS and is_flexible(key, version)
        head = response_head(size, correlation_id, tagged=tagged)
        if not holes:
            connection.answer(slot, (head + out,))
            return
        pieces: list[Any] = []
        at = 0
        for position, hole in holes:
            pieces.append((head if at == 0 else b"") + out[at:position])
            pieces.append(hole)
            at = position
        pieces.append(bytes(out[at:]))
        connection.answer(slot, pieces)
