"""ZooKeeperMetadata: a session with the metadata tree of a ZooKeeper ensemble.

One thread of ours does everything: calls of the user, answers, watches and states of kazoo are
events in its queue, and kazoo's threads only add events.  So the mirror has one writer.

Invariant: the mirror is applied in the order of the answers.  ZooKeeper answers the requests of a
session in order, and no server that is older than the last answer accepts the session.  So an
answer is never older than the mirror.  What was under way when the connection broke is forgotten,
and everything is read again after it is made again: kazoo drops all watches then.

kazoo would open a new session after the end of the first.  This one ends for good: its handler
makes no more connections, so nothing that kazoo still has in its queue is ever sent.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from logstore.errors import ClosedError, MetadataUnavailableError
from logstore.record import needed
from logstore.replication.metadata import (
    Check,
    Committed,
    Create,
    Delete,
    Op,
    Outcome,
    Refused,
    SessionState,
    Set,
    Unknown,
    Why,
    call_back,
)
from logstore.replication.tree import EMPTY, Nodes, is_below, parent_of

__all__ = ["ZooKeeperMetadata"]

log = logging.getLogger("logstore.zookeeper")
# kazoo has a line for each connection that is refused.  Without a handler Python would print them.
of_kazoo = logging.getLogger("logstore.zookeeper.client")
of_kazoo.addHandler(logging.NullHandler())

# Requests that kazoo has at a time.  It writes one byte for each into a socket pair, which blocks
# after about 270 of them while it has no connection.
UNDER_WAY_MAX = 100
RECONNECT = {"max_tries": -1, "delay": 0.1, "backoff": 2, "max_delay": 1.0}

# ZooKeeper's codes for the ops of a transaction.  0 and -2: another op failed.
_WHY: dict[int, Why | None] = {
    **{0: None, -2: None, -101: "missing", -103: "version", -108: "no parent"},
    **{-110: "exists", -111: "not empty"},
}

# The answer is not known.  kazoo may tell this of a request before it tells that it is suspended.
_BROKEN = ConnectionError("the connection broke")
_CONNECTION_CODES = (-4, -112, -118)  # connection lost, session expired, session moved
_NO_NODE = -101


class _Request(NamedTuple):
    """Something to ask kazoo for; `finish` gets the answer, or the exception."""

    ask: Callable[[Any], Any]
    finish: Callable[[Any], None]


class _Reading(NamedTuple):
    """A read that also sets a watch: `kind` is data, names or exists."""

    path: str
    kind: str


class ZooKeeperMetadata:
    """A session with ``host:port,host:port/chroot``: see `Metadata` for its methods.

    `options` are those of KazooClient for authentication and TLS: auth_data, sasl_options,
    default_acl, use_ssl, ca, certfile, keyfile, keyfile_password, verify_certs, check_hostname.
    """

    def __init__(self, servers: str, *, session_timeout_ms: int = 6000, **options: Any) -> None:
        needed("kazoo", "ZooKeeperMetadata", "zookeeper")
        from kazoo.client import KazooClient
        from kazoo.handlers.threading import SequentialThreadingHandler

        self.servers = servers
        self.state: SessionState = "suspended"
        handler = SequentialThreadingHandler()
        self._connect = handler.create_connection
        handler.create_connection = self._connect_unless_lost
        self._ended = False  # set by kazoo's thread, before it can connect again
        self._client = KazooClient(
            servers,
            timeout=session_timeout_ms / 1000,
            handler=handler,
            connection_retry=dict(RECONNECT),
            logger=of_kazoo,
            **options,
        )
        self._client.add_listener(self._listen)
        self._roots: tuple[str, ...] = ()
        self._changed: Callable[[str], None] | None = None
        self._moved: Callable[[SessionState], None] | None = None
        self._closed = False
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="logstore-zookeeper", daemon=True)
        # Used by the thread only, but `read` and `children` look at the mirror.
        self._mirror: Nodes = {}
        self._over = False
        self._based = False  # whether the chroot exists
        self._started: threading.Event | None = None
        self._writes: deque[_Request] = deque()
        self._reads: deque[_Request] = deque()
        self._under_way: dict[int, _Request] = {}
        self._number = 0
        self._reading: set[_Reading] = set()
        self._again: set[_Reading] = set()  # asked for while it was under way
        self._watched: set[_Reading] = set()
        self._asked: list[_Reading] = []  # since the last answer
        self._settling: list[tuple[set[_Reading], Callable[[], None]]] = []
        self._making: set[str] = set()  # parents that commits under way create

    def start(
        self,
        roots: Sequence[str],
        changed: Callable[[str], None],
        moved: Callable[[SessionState], None],
        *,
        timeout: float | None = None,
    ) -> None:
        self._check_open()
        since, began = time.time(), time.monotonic()
        self._roots = tuple(roots)
        self._started = threading.Event()
        self._changed, self._moved = changed, moved
        self._thread.start()
        self._client.start_async()
        if not self._started.wait(timeout) or self.state == "lost":
            self.close()
            raise MetadataUnavailableError(
                f"no ZooKeeper server of {self.servers} answered within "
                f"{time.monotonic() - began:.0f} s: do they run, and can this machine reach them?",
                since=since,
            )

    def read(self, path: str) -> tuple[bytes, int] | None:
        node = self._mirror.get(path)
        return None if node is None else (node.data, node.version)

    def children(self, path: str) -> list[str]:
        node = self._mirror.get(path)
        return [] if node is None else sorted(node.names)

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        self._check_open()
        self._events.put(partial(self._commit, tuple(ops), done, {}))

    def sync(self, done: Callable[[], None]) -> None:
        self._check_open()
        self._events.put(partial(self._sync, done))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._changed = self._moved = None
        if threading.current_thread() is self._thread:
            self._end()
        elif self._thread.ident is None:
            self.state = "lost"
        else:
            self._events.put(None)
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the metadata session is closed")

    # ---- in threads of kazoo ----

    def _connect_unless_lost(self, *arguments: Any, **options: Any) -> Any:
        if self._ended:
            raise ConnectionError("the session has ended")
        return self._connect(*arguments, **options)

    def _listen(self, state: str) -> None:
        if state == "LOST":
            self._ended = True
        self._events.put(partial(self._turn, state))

    def _fire(self, event: Any) -> None:
        self._events.put(partial(self._fired, event.type, event.path))

    # ---- the thread: events, requests and their answers ----

    def _run(self) -> None:
        while not self._over:
            event = self._events.get()
            if event is None:
                self._end()
                continue
            try:
                event()
            except Exception:
                # The mirror may be wrong.  Without the session others can take over.
                log.exception("a fault of the session: it is given up")
                self._ended = True
                self._turn("LOST")

    def _end(self) -> None:
        """End the session; answer all commits."""
        self._over = True
        self.state = "lost"
        self._client.stop()
        self._client.close()
        self._break(self._writes)
        while not self._events.empty():
            event = self._events.get()
            # A commit that was called before the close: its answer is Unknown.
            if isinstance(event, partial) and event.func == self._commit:
                event()

    def _turn(self, state: str) -> None:
        """Note a new state of kazoo."""
        if self.state == "lost":
            return
        if state == "CONNECTED":
            self.state = "connected"
            self._reload()
        else:
            self.state = "lost" if state == "LOST" else "suspended"
            self._break(self._writes if state == "LOST" else ())
        moved = self._moved
        if moved is not None and not self._is_starting:
            call_back(moved, self.state)
        if state == "LOST":
            self._client.stop()
            self._client.close()
            if self._started is not None:
                self._started.set()  # a start that waits fails

    @property
    def _is_starting(self) -> bool:
        return self._started is not None and not self._started.is_set()

    def _send(self, requests: deque[_Request], request: _Request) -> None:
        requests.append(request)
        self._pump()

    def _pump(self) -> None:
        """Give requests to kazoo, those of the user first."""
        while (
            self.state == "connected"
            and len(self._under_way) < UNDER_WAY_MAX
            and (requests := self._writes or self._reads)
        ):
            request = requests.popleft()
            self._number += 1
            self._under_way[self._number] = request
            answered = partial(self._post, partial(self._answer, self._number))
            try:
                request.ask(self._client).rawlink(answered)
            except (TypeError, ValueError) as error:  # kazoo cannot encode it
                del self._under_way[self._number]
                request.finish(error)

    def _post(self, event: Callable[[Any], None], argument: Any) -> None:
        self._events.put(partial(event, argument))

    def _answer(self, number: int, result: Any) -> None:
        request = self._under_way.pop(number, None)
        if request is None:
            return  # of an earlier connection
        answer = result.value if result.successful() else result.exception
        if isinstance(answer, Exception) and _code(answer) in _CONNECTION_CODES:
            answer = _BROKEN
        request.finish(answer)
        self._pump()

    def _break(self, unsent: Sequence[_Request] | deque[_Request]) -> None:
        """Forget what is under way; the requests in `unsent` will not be sent either."""
        broken = [*self._under_way.values(), *unsent]
        self._under_way.clear()
        self._reads.clear()
        self._reading.clear()
        self._again.clear()
        if unsent:
            self._writes.clear()
        for request in broken:
            request.finish(_BROKEN)

    # ---- commits ----

    def _commit(
        self, ops: tuple[Op, ...], done: Callable[[Outcome], None], exists: dict[str, bool]
    ) -> None:
        """Send a commit, with the parents that are missing; `exists` has those that are known."""
        if self.state == "lost":
            call_back(done, Unknown())
            return
        steps = list(self._with_parents(ops, exists))
        made = {op.path for op, _ in steps if isinstance(op, Create)} - self._making
        self._making |= made

        def finish(result: Any) -> None:
            self._making -= made
            self._committed(ops, steps, result, done, exists)

        self._send(self._writes, _Request(partial(_transaction, steps), finish))

    def _with_parents(
        self, ops: tuple[Op, ...], exists: dict[str, bool]
    ) -> Iterator[tuple[Op, int]]:
        """Yield the ops with their numbers, and before a Create those of its missing parents."""
        made: set[str] = set()
        for number, op in enumerate(ops):
            if isinstance(op, Create):
                missing = []
                path = parent_of(op.path)
                while path != "/" and path not in made and not self._exists(path, exists):
                    missing.append(path)
                    path = parent_of(path)
                for path in reversed(missing):
                    yield Create(path, b""), number
                made.update(missing, [op.path])
            yield op, number

    def _exists(self, path: str, exists: dict[str, bool]) -> bool:
        """Return whether a parent is there, as far as is known: a wrong guess is corrected."""
        if path in exists:
            return exists[path]
        return path in self._mirror or path in self._making or not is_below(path, self._roots)

    def _committed(
        self,
        ops: tuple[Op, ...],
        steps: list[tuple[Op, int]],
        result: Any,
        done: Callable[[Outcome], None],
        exists: dict[str, bool],
    ) -> None:
        outcome: Outcome = Unknown()
        if isinstance(result, Exception):
            if result is not _BROKEN:
                log.error("a commit failed, and may be done or not: %r", result)
        else:
            failed = next((n for n, each in enumerate(result) if _why(each)), None)
            if failed is None:
                versions = self._apply(steps, result)
                outcome = Committed(tuple(versions))
            else:
                op, number = steps[failed]
                why = _why(result[failed])
                assert why is not None
                # Nothing was done.  If a guess about a parent was wrong, try again.
                if op is not ops[number] and why == "exists":
                    self._commit(ops, done, exists | {op.path: True})
                    return
                if isinstance(op, Create) and why == "missing":
                    self._commit(ops, done, exists | {parent_of(op.path): False})
                    return
                if why == "other":
                    log.error("ZooKeeper refuses %s: %r", op, result[failed])
                else:
                    outcome = Refused(number, why)
        call_back(done, outcome)

    def _apply(self, steps: list[tuple[Op, int]], results: list[Any]) -> Iterator[int]:
        """Put a commit into the mirror; return the versions of the ops without those of parents."""
        versions: dict[int, int] = {}
        paths: list[str] = []
        for (op, number), result in zip(steps, results, strict=False):
            versions[number] = 0 if isinstance(op, Create) else -1
            if isinstance(op, Check):
                versions[number] = op.version
            elif isinstance(op, Set):
                versions[number] = result.version
            if isinstance(op, Delete):
                paths += self._remove(op.path)
            elif isinstance(op, (Create, Set)):
                paths += self._put(op.path, op.data, versions[number])
        self._tell(paths)
        return iter(versions.values())

    def _sync(self, done: Callable[[], None]) -> None:
        """Commit nothing, then wait for the reads that older changes have caused.

        A commit, and not the `sync` of ZooKeeper: that may be answered by a leader that has been
        replaced without knowing it.
        """
        if self.state == "lost":
            return

        def finish(result: Any) -> None:
            if isinstance(result, Exception):
                self._sync(done)
                return
            # The watches of all earlier changes have arrived before this answer, but kazoo calls
            # them in another thread: queue behind them.
            from kazoo.protocol.states import Callback

            settle = partial(self._events.put, partial(self._settle, done))
            self._client.handler.dispatch_callback(Callback("watch", settle, ()))

        self._send(self._writes, _Request(partial(_transaction, ()), finish))

    def _settle(self, done: Callable[[], None]) -> None:
        if self._reading:
            self._settling.append((set(self._reading), done))
        else:
            call_back(done)

    # ---- the mirror ----

    def _reload(self) -> None:
        """Read everything again after a connection was made."""
        self._watched.clear()
        waiting = [done for _, done in self._settling]
        self._settling.clear()
        if not self._based:
            self._send(
                self._reads, _Request(lambda client: client.ensure_path_async("/"), self._found)
            )
            return
        for path in {*self._roots, *self._mirror}:
            self._want(path, "data")
        for done in waiting:
            self._sync(done)
        self._pump()

    def _found(self, result: Any) -> None:
        """The chroot exists: read the roots."""
        if isinstance(result, Exception):
            if result is not _BROKEN:
                log.error("%s: the chroot cannot be made: %r", self.servers, result)
            return
        self._based = True
        self._reload()
        started = self._started
        assert started is not None
        self._sync(started.set)

    def _want(self, path: str, kind: str) -> None:
        key = _Reading(path, kind)
        self._asked.append(key)
        if key in self._reading:
            self._again.add(key)
            return
        self._reading.add(key)
        finish = {"data": self._got, "names": self._listed, "exists": self._seen}[kind]

        def ask(client: Any) -> Any:
            calls = {
                "data": client.get_async,
                "names": client.get_children_async,
                "exists": client.exists_async,
            }
            return calls[kind](path, watch=self._fire)

        self._send(self._reads, _Request(ask, partial(self._read_done, key, finish)))

    def _read_done(self, key: _Reading, finish: Callable[[str, Any], None], result: Any) -> None:
        if isinstance(result, Exception) and _code(result) != _NO_NODE:
            # Nothing is known of the path: the mirror stays as it is, and no sync ends, until
            # everything is read again.
            if result is not _BROKEN:
                log.error("ZooKeeper refuses to read %s: %r", key.path, result)
            return
        self._reading.discard(key)
        self._asked.clear()
        if not isinstance(result, Exception):
            self._watched.add(key)
        finish(key.path, result)
        if key in self._again:
            self._again.discard(key)
            self._want(*key)
        for keys, done in list(self._settling):
            if key in keys:
                keys.discard(key)
                keys.update(self._asked)
                if not keys:
                    self._settling.remove((keys, done))
                    call_back(done)

    def _fired(self, kind: str, path: str | None) -> None:
        """A watch has fired: read again."""
        if path is None or self.state != "connected":
            return
        if kind != "CHILD":
            self._watched.discard(_Reading(path, "data"))
        if kind in ("CHILD", "DELETED"):
            self._watched.discard(_Reading(path, "names"))
        self._want(path, "names" if kind == "CHILD" else "data")

    def _got(self, path: str, result: Any) -> None:
        if isinstance(result, Exception):
            # It was deleted.  Its parent has a watch, unless it is a root.
            self._tell(self._remove(path))
            if path in self._roots:
                self._want(path, "exists")
            return
        data, stat = result
        self._tell(self._put(path, data, stat.version))
        if _Reading(path, "names") not in self._watched:
            self._want(path, "names")

    def _listed(self, path: str, result: Any) -> None:
        if isinstance(result, Exception):
            return  # it was deleted: the watch on its contents fires
        if path not in self._mirror:
            self._watched.discard(_Reading(path, "names"))  # its contents come first
            return
        for name in self._mirror[path].names - set(result):
            self._tell(self._remove(_join(path, name)))
        for name in result:
            child = _join(path, name)
            if child in self._mirror:
                self._name(child, present=True)  # the parent may be another one than before
            if _Reading(child, "data") not in self._watched:
                self._want(child, "data")

    def _seen(self, path: str, result: Any) -> None:
        if result is not None and not isinstance(result, Exception):
            self._want(path, "data")

    def _put(self, path: str, data: bytes, version: int) -> list[str]:
        """Put contents into the mirror; return the path if that changes it."""
        old = self._mirror.get(path)
        if not is_below(path, self._roots) or (old is not None and old[:2] == (data, version)):
            return []
        self._mirror[path] = (old or EMPTY)._replace(data=data, version=version)
        self._name(path, present=True)
        return [path]

    def _remove(self, path: str) -> list[str]:
        """Remove a path and all below it from the mirror; return the paths that were there."""
        node = self._mirror.get(path)
        self._watched -= {_Reading(path, kind) for kind in ("data", "names", "exists")}
        if node is None:
            return []
        removed = [each for name in node.names for each in self._remove(_join(path, name))]
        del self._mirror[path]
        self._name(path, present=False)
        return [*removed, path]

    def _name(self, path: str, *, present: bool) -> None:
        above = parent_of(path)
        parent = self._mirror.get(above)
        if parent is not None and path != "/":
            name = {path.rpartition("/")[2]}
            names = parent.names | name if present else parent.names - name
            self._mirror[above] = parent._replace(names=names)

    def _tell(self, paths: list[str]) -> None:
        for path in paths:
            changed = self._changed
            if changed is not None and not self._is_starting:
                call_back(changed, path)


def _join(path: str, name: str) -> str:
    return f"{path.rstrip('/')}/{name}"


def _transaction(steps: Sequence[tuple[Op, int]], client: Any) -> Any:
    """Send ops as one transaction; without ops one that does nothing."""
    transaction = client.transaction()
    for op, _ in steps:
        if isinstance(op, Create):
            transaction.create(op.path, op.data, ephemeral=op.ephemeral)
        elif isinstance(op, Set):
            transaction.set_data(op.path, op.data, op.version)
        elif isinstance(op, Delete):
            transaction.delete(op.path, op.version)
        else:
            transaction.check(op.path, op.version)
    if not steps:
        transaction.check("/", -1)
    return transaction.commit_async()


def _why(result: Any) -> Why | Literal["other"] | None:
    """Return why an op failed; None if it did not, or only because another op failed."""
    return _WHY.get(_code(result), "other") if isinstance(result, Exception) else None


def _code(error: Exception) -> int:
    """Return ZooKeeper's code of an error; 1 if it has none."""
    code: int | None = getattr(error, "code", None)
    return 1 if code is None else code
