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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from logstore.closeable import Closeable
from logstore.errors import ClosedError, LockedError
from logstore.kafka.acceptor import Acceptor, Listener, bind
from logstore.kafka.broker import Broker
from logstore.kafka.config import KafkaConfig
from logstore.kafka.connection import Connection
from logstore.kafka.faults import Faults
from logstore.kafka.metrics import metrics
from logstore.store.store import Store
from logstore.waking import Gate, uninterrupted

if TYPE_CHECKING:
    from logstore.upkeep.maintenance import Maintenance

__all__ = ["KafkaServer"]

log = logging.getLogger("logstore.kafka")

SWEEP_SECONDS = 1.0
DRAIN_SECONDS = 10.0
SEND_SECONDS = 1.0

_servers: weakref.WeakSet[KafkaServer] = weakref.WeakSet()
_abandoned: list[object] = []  # loops of the parent, in a child: they are never closed there


class KafkaServer(Closeable):
    """Serves a store to Kafka's clients.

    `listen` is ``host:port`` or several of them; port 0 takes a free port.  `config` has the
    settings of the listener, see KafkaConfig.  `maintain`: run Maintenance of the store, too.

    A readonly store is served as well: requests that write are answered with an error.  `faults`
    has errors, delays and lost answers on demand, for tests of clients.
    """

    def __init__(
        self,
        store: Store,
        listen: str | Sequence[str] = "127.0.0.1:0",
        *,
        config: KafkaConfig | Mapping[str, Any] | None = None,
        maintain: bool = False,
    ) -> None:
        self.store = store
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
        self._lock = threading.Lock()
        self._ended = Gate()
        self._closing = False
        self._failure: BaseException | None = None  # of the thread, before it was ready
        self._maintenance: Maintenance | None = None

    # ---- life ----

    def start(self) -> Self:
        """Bind the addresses and accept connections.  Return when clients can connect.

        Raise OSError with the address if it is taken, and LockedError with the address of the
        store's server if the store has one.
        """
        with self._lock:
            if self._closing:
                raise ClosedError("the server is closed")
            if self._started:
                return self
            first = self.store.companions.attach(self)
            if first is not self:
                served = ", ".join(first._listen if not first._addresses else first._shown())
                raise LockedError(self.store.path, pid=os.getpid(), served=served)
            try:
                self._start()
            except BaseException:
                self._forget()
                raise
        _servers.add(self)
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
            broker = self._broker = Broker(self.store, self.config, loop, self.faults)
            self.faults.broker = broker
            self._acceptor = Acceptor(
                self._listeners,
                loop,
                lambda name: Connection(broker, name, loop.time),
                self._may_accept,
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
        if len(self._broker.connections) >= self.config.max_connections:
            return None
        if not peer or peer.startswith("127.") or peer == "::1":
            return True
        return self._broker.by_ip[peer] < self.config.max_connections_per_ip

    def _sweep(self, due: float) -> None:
        assert self._loop is not None
        assert self._broker is not None
        now = self._loop.time()
        self._broker.lag_seconds = max(0.0, now - due)
        self._broker.check_times()
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
        if now < deadline and not all(each.finished for each in broker.connections):
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

    def serve_forever(self) -> None:
        """Serve until `close` is called, for example by a signal handler."""
        self.start()
        self._ended.wait()

    # ---- what it is ----

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closing

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

        Requests and errors by API, bytes, connections, clients by software, waiting fetches,
        memory of requests, fsyncs.
        """
        return {} if self._broker is None else metrics(self._broker)

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
        self._lock = threading.Lock()
        self._closing = True
        self._thread = self._loop = self._broker = None
        self.faults.broker = None


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server._abandon_in_child()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
