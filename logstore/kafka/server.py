"""KafkaServer: a listener in front of a store.

    with logstore.open("data") as store, KafkaServer(store) as server:
        print(server.bootstrap_servers)

One daemon thread runs the event loop; it never waits for the disk.  Handlers that wait run in a few
more threads.  The server may be closed from any thread.  The store closes its server before it
closes anything else.  A store has one server at a time.

After a fork, the server belongs to the parent; the child closes its copies of the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from logstore.closeable import Closeable
from logstore.errors import ClosedError, LockedError
from logstore.kafka.broker import Broker
from logstore.kafka.config import KafkaConfig
from logstore.kafka.faults import Faults
from logstore.kafka.metrics import metrics
from logstore.kafka.network.acceptor import Acceptor, Listener, Pace, bind, is_loopback
from logstore.kafka.network.connection import Connection
from logstore.store.companions import expect_store
from logstore.store.store import Store
from logstore.waking import Gate, uninterrupted

if TYPE_CHECKING:
    from logstore.replication.node import Node
    from logstore.upkeep.maintenance import Maintenance

__all__ = ["KafkaServer"]

log = logging.getLogger("logstore.kafka")

SWEEP_SECONDS = 1.0
DRAIN_SECONDS = 10.0
SEND_SECONDS = 1.0
HEALTH_SECONDS = 1.0

_servers: weakref.WeakSet[KafkaServer] = weakref.WeakSet()
_abandoned: list[object] = []  # loops of the parent, in a child: they are never closed there


class KafkaServer(Closeable):
    """Serves a store to Kafka's clients.

    `listen` is ``host:port`` or several of them; port 0 takes a free port.  A socket that listens
    is taken, too.  `config` has the settings of the listener, see KafkaConfig.  `maintain`: run
    Maintenance of the store, too.

    `node`: the member of a cluster that owns the store.  Clients are sent to the leaders of
    partitions; see Node.

    A readonly store is served as well: requests that write are answered with an error.  `faults`
    has errors, delays and lost answers on demand, for tests of clients.
    """

    def __init__(
        self,
        store: Store,
        listen: str | Sequence[str | socket.socket] = "127.0.0.1:0",
        *,
        config: KafkaConfig | Mapping[str, Any] | None = None,
        maintain: bool = False,
        node: Node | None = None,
    ) -> None:
        self.store = expect_store(store, "KafkaServer")
        self.node = node
        self.config = KafkaConfig.of(config)
        self._listen = [listen] if isinstance(listen, str) else list(listen)
        self._maintain = maintain
        self.faults = Faults()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listeners: list[Listener] = []
        self._addresses: dict[str, tuple[str, int]] = {}
        self._broker: Broker | None = None
        self._acceptor: Acceptor | None = None
        self._pace = Pace(self.config.max_connection_creation_rate)
        # Reentrant: a signal handler may call `close` while its thread is in `start` or `close`.
        self._lock = threading.RLock()
        self._ended = Gate()
        self._closing = False
        self._failure: BaseException | None = None  # of the thread, before it was ready
        self._maintenance: Maintenance | None = None

    # ---- life ----

    def start(self) -> Self:
        """Bind the addresses and accept connections.  Return when clients can connect.

        Raise OSError with the address if it is taken, LockedError with the address of the store's
        server if the store has one, and ClosedError if a signal handler closes it here.
        """
        with self._lock:
            if self._closing:
                raise ClosedError("the server is closed")
            if self._started:
                return self
            first = self.store.companions.attach(self)
            if first is not self:
                served = ", ".join(first._shown() or map(str, first._listen))
                raise LockedError(self.store.path, pid=os.getpid(), served=served)
            try:
                self._start()
            except BaseException:
                self._forget()
                raise
            closed = self.closed  # by a signal handler, before there was a thread to end
        _servers.add(self)
        if closed:
            self._closing = False
            self.close()
            raise ClosedError("the server was closed while it started")
        log.info("serving %s on %s", self.store.path, self.bootstrap_servers)
        return self

    @property
    def _started(self) -> bool:
        return self._thread is not None

    def _start(self) -> None:
        self._listeners = bind(self._listen, self.config.socket_listen_backlog_size)
        self._addresses = {each.name: each.address for each in self._listeners}
        if self._maintain:
            from logstore.upkeep.maintenance import Maintenance  # slow to import

            self._maintenance = Maintenance(self.store)
            self._maintenance.start()
        self._failure, self._ended, ready = None, Gate(), Gate()
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._run, args=(loop, ready), name="logstore kafka", daemon=True
        )
        uninterrupted(thread.start)
        try:
            ready.wait()
        except BaseException:  # an interrupt
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(loop.stop)
            raise
        if self._failure is not None:
            raise self._failure
        self._thread = thread

    def _forget(self) -> None:
        """Release what `start` took: the server has ended, or did not begin."""
        if self._maintenance is not None:
            self._maintenance.stop()
        for each in self._listeners:
            each.socket.close()
        self.faults.broker = None
        self.store.companions.detach(self)
        _servers.discard(self)

    def __enter__(self) -> Self:
        return self.start()

    def _run(self, loop: asyncio.AbstractEventLoop, ready: Gate) -> None:
        try:
            broker = self._broker = Broker(self.store, self.config, loop, self.faults, self.node)
            self.faults.broker = broker
            self._acceptor = Acceptor(
                self._listeners,
                loop,
                lambda name: Connection(broker, name, loop.time),
                self._may_accept,
                self._pace,
            )
            broker.when_room = self._acceptor.start
            self._acceptor.start()
            loop.call_later(SWEEP_SECONDS, self._sweep, loop.time() + SWEEP_SECONDS)
            loop.call_soon(ready.open)
            loop.run_forever()
        except BaseException as error:
            if ready.opened:
                raise
            self._failure = error
        finally:
            ready.open()
            loop.close()
            self._ended.open()

    def _may_accept(self, peer: str) -> bool | None:
        assert self._broker is not None
        assert self._acceptor is not None
        accepted = len(self._broker.connections) + self._acceptor.connecting()
        if accepted >= self.config.max_connections:
            return None
        if not peer or is_loopback(peer):
            return True
        accepted = self._broker.by_ip[peer] + self._acceptor.connecting(peer)
        return accepted < self.config.max_connections_per_ip

    def _sweep(self, due: float) -> None:
        assert self._loop is not None
        assert self._broker is not None
        now = self._loop.time()
        self._broker.lag_seconds = max(0.0, now - due)
        self._broker.check_times()
        self._pace.forget(now)
        self._loop.call_later(SWEEP_SECONDS, self._sweep, now + SWEEP_SECONDS)

    def close(self, timeout: float = DRAIN_SECONDS) -> None:
        """Stop accepting, finish the requests under way, and close the connections.

        Requests get `timeout` seconds.  Open transactions and members of groups stay: clients may
        go on with them when the store is served again.  A second call during the first closes the
        connections at once; after it, it does nothing.
        """
        with self._lock:
            again, self._closing = self._closing, True
            loop, thread = self._loop, self._thread
        if thread is None or loop is None:
            return
        step = self._abort if again else functools.partial(self._drain, loop.time() + timeout)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(step)
        self._ended.wait()
        if not again:  # a signal handler inside of `join` must not call `join`
            thread.join()
        self._forget()

    def abort(self) -> None:
        """Close all connections at once.  For a signal handler: it waits for nothing."""
        loop, broker = self._loop, self._broker
        if loop is not None and broker is not None and not self._ended.opened:
            loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        assert self._broker is not None
        for connection in list(self._broker.connections):
            connection.abort("drain")

    def _drain(self, deadline: float) -> None:
        """Stop reading, then end when all requests are answered or the time is up."""
        assert self._loop is not None
        assert self._broker is not None
        assert self._acceptor is not None
        broker = self._broker
        if not broker.draining:
            broker.draining = True
            broker.when_room = lambda: None
            self._acceptor.close()
            for connection in broker.connections:
                connection.finish()
            broker.waiting.end_all()
        now = self._loop.time()
        # A socket that was accepted before is connected some turns of the loop later, and closed.
        under_way = self._acceptor.connecting() or not all(
            each.finished for each in broker.connections
        )
        if now < deadline and under_way:
            self._loop.call_later(0.01, self._drain, deadline)
            return
        for connection in list(broker.connections):
            connection.close("drain")
        self._loop.call_later(0 if not broker.connections else 0.05, self._end, now + SEND_SECONDS)

    def _end(self, deadline: float) -> None:
        assert self._loop is not None
        assert self._broker is not None
        if self._broker.connections and self._loop.time() < deadline:
            self._loop.call_later(0.01, self._end, deadline)
            return
        for connection in list(self._broker.connections):
            connection.abort("drain")
        self._broker.close()
        self._loop.call_soon(self._loop.stop)

    def call_every(self, seconds: float, act: Callable[[], object]) -> None:
        """Have `act` called again and again by the event loop, until the server is closed.

        If the loop is stuck, `act` is not called: for a watchdog.  `act` must not wait.
        """
        loop = self._loop
        if loop is None:
            raise ClosedError("the server is not started")

        def again() -> None:
            act()
            loop.call_later(seconds, again)

        loop.call_soon_threadsafe(again)

    def trouble(self, timeout: float = HEALTH_SECONDS) -> str:
        """Return why clients are not served as they should be; "" if they are.

        The event loop must answer within `timeout` seconds, and no partition may have failed, see
        FailedLogError.
        """
        broker = self._broker
        if broker is None or self._closing or self._ended.opened:
            return "the server is closed"
        answered = threading.Event()
        broker.calls.put(answered.set)
        if not answered.wait(timeout):
            return f"the event loop did not answer within {timeout:g} s"
        for topic in self.store.values():
            for number in topic.partition_numbers:
                partition = topic.opened(number)
                if partition is not None and partition.parts.active.durability.commit.failed:
                    return f"an fsync of {partition.name} failed: open the store again"
        return ""

    def serve_forever(self) -> None:
        """Serve until `close` is called, for example by a signal handler."""
        closed = self.closed
        try:
            self.start()
        except ClosedError:
            if closed or not self.closed:
                raise
            return  # closed by a signal handler before it was started
        self._ended.wait()

    # ---- what it is ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closing

    @property
    def ended(self) -> bool:
        """Whether the event loop has ended: after `close`, or by an error of its own."""
        return self._ended.opened

    @property
    def addresses(self) -> Mapping[str, tuple[str, int]]:
        """Host and port of every listener, by its name."""
        return dict(self._addresses)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first listener."""
        if not self._addresses:
            raise ClosedError("the server is not started")
        return next(iter(self._addresses.values()))

    @property
    def bootstrap_servers(self) -> str:
        """The address as Kafka's clients take it, such as ``127.0.0.1:9092``."""
        if not self._addresses:
            raise ClosedError("the server is not started")
        return self._shown()[0]

    def _shown(self) -> list[str]:
        return [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            for host, port in self._addresses.values()
        ]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return 0 if self._broker is None else len(self._broker.connections)

    def metrics(self) -> dict[str, float]:
        """Return the counters since the start, by Prometheus' names.  From any thread.

        Requests, errors, bytes and times by API, connections, clients by software, bytes by topic,
        waiting fetches, memory of requests, fsyncs, groups, transactions.
        """
        if self._broker is None or self._acceptor is None:
            return {}
        held = self._acceptor.held_by_ip.total()
        return metrics(self._broker) | {"connections_held": held}

    def __repr__(self) -> str:
        state = "closed" if self._closing else "not started"
        if self._addresses and not self._closing:
            state = f"on {self.bootstrap_servers}"
        return f"<KafkaServer of {str(self.store.path)!r} {state}>"

    def _abandon_in_child(self) -> None:
        """After a fork: the sockets are the parent's.

        Nothing of the loop may be called or closed here: its selector is shared with the parent.
        """
        for each in self._listeners:
            each.socket.close()
        if self._broker is not None:
            spare = socket.socket()  # never connected
            for connection in self._broker.connections:
                # The socket object would close its number again when it is collected: the number
                # stays valid, for a socket that harms no other.
                if connection.fileno() >= 0:
                    os.dup2(spare.fileno(), connection.fileno(), inheritable=False)
            spare.close()
        _abandoned.append((self._loop, self._broker))
        self._lock = threading.RLock()
        self._closing = True
        self._thread = self._loop = self._broker = None
        self.faults.broker = None


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server._abandon_in_child()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
