"""The metadata service of the simulation: one linearizable tree, and sessions with stale mirrors.

It keeps the rules of `logstore.replication.metadata` and nothing beyond them: commits and answers
are late, answers are lost (and the commit is done, is done later, or never), mirrors are old and
change path by path in any order, one notice stands for several changes, and sessions end by the
service's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from logstore.replication.metadata import (
    ANY,
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
)
from logstore.testing.simulation.network import MS

if TYPE_CHECKING:
    from logstore.testing.simulation.world import World

__all__ = ["Session", "Tree", "TreeFaults"]


class TreeFaults(NamedTuple):
    """How the service misbehaves; frozen."""

    lost: float = 0.0  # share of the commits whose answer is lost
    slow: float = 0.0  # share of commits and notices that are late
    scattered: float = 0.0  # share of the changed paths that a notice leaves for later


class Tree:
    """The tree.  Paths are in a dict: (contents, version, session that owns it or None)."""

    __slots__ = ("_children", "faults", "log", "nodes", "sessions", "timeout_ms", "world")

    def __init__(self, world: World, faults: TreeFaults, timeout_ms: int) -> None:
        self.world = world
        self.faults = faults
        self.timeout_ms = timeout_ms
        self.nodes: dict[str, tuple[bytes, int, Session | None]] = {}
        self._children: dict[str, int] = {}  # how many paths are directly below a path
        self.log: list[str] = []  # every path that changed, in the order of the commits
        self.sessions: list[Session] = []

    def apply(self, ops: Sequence[Op], session: Session | None = None) -> Committed | Refused:
        """Do all ops or none, now."""
        undo: list[tuple[str, tuple[bytes, int, Session | None] | None]] = []
        versions: list[int] = []
        for number, op in enumerate(ops):
            why = self._apply(op, session, undo, versions)
            if why is not None:
                for path, before in reversed(undo):
                    self._put(path, before)
                return Refused(number, why)
        for path in dict.fromkeys(path for path, _ in undo):
            self.log.append(path)
            self.world.oracle.written(path, self.nodes.get(path), session)
        if undo:
            self.world.oracle.applied()
            self._notify()
        return Committed(tuple(versions))

    def _apply(
        self,
        op: Op,
        session: Session | None,
        undo: list[tuple[str, tuple[bytes, int, Session | None] | None]],
        versions: list[int],
    ) -> Why | None:
        path = op.path
        found = self.nodes.get(path)
        if isinstance(op, Create):
            if found is not None:
                return "exists"
            parent = path.rpartition("/")[0]
            while parent and parent not in self.nodes:
                undo.append((parent, None))
                self._put(parent, (b"", 0, None))
                parent = parent.rpartition("/")[0]
            undo.append((path, None))
            self._put(path, (op.data, 0, session if op.ephemeral else None))
            versions.append(0)
            return None
        if found is None:
            return "missing"
        if op.version not in (ANY, found[1]):
            return "version"
        if isinstance(op, Set):
            undo.append((path, found))
            self.nodes[path] = (op.data, found[1] + 1, found[2])
            versions.append(found[1] + 1)
        elif isinstance(op, Delete):
            if self._children.get(path):
                return "not empty"
            undo.append((path, found))
            self._put(path, None)
            versions.append(-1)
        else:
            versions.append(found[1])
        return None

    def _put(self, path: str, node: tuple[bytes, int, Session | None] | None) -> None:
        parent = path.rpartition("/")[0]
        if node is None:
            del self.nodes[path]
            self._children[parent] -= 1
        else:
            if path not in self.nodes:
                self._children[parent] = self._children.get(parent, 0) + 1
            self.nodes[path] = node

    def _notify(self) -> None:
        for session in self.sessions:
            session.expect_news()

    def expire(self, session: Session, since: int) -> None:
        """End a session that was silent for too long: its ephemeral paths are deleted."""
        if session.silent_since != since or session.ended:
            return
        self.end(session)

    def end(self, session: Session) -> None:
        """End a session."""
        session.ended = True
        self.sessions.remove(session)
        owned = [path for path, node in self.nodes.items() if node[2] is session]
        if owned:
            self.apply([Delete(path) for path in owned])

    def heal(self) -> None:
        """Misbehave no longer."""
        self.faults = TreeFaults()


class Session:
    """One node's session: an implementation of the Protocol Metadata, in virtual time."""

    __slots__ = (
        *("_changed", "_commits", "_index", "_left", "_moved", "_position", "_waking", "ended"),
        *("lag_until", "mirror", "node", "number", "reachable", "silent_since", "state", "tree"),
    )

    def __init__(self, tree: Tree, node: int) -> None:
        self.tree = tree
        self.node = node
        self.number = tree.world.number()
        self.state: SessionState = "connected"
        self.mirror: dict[str, tuple[bytes, int]] = {}
        self._index: dict[str, list[str]] | None = None  # children, while the mirror is unchanged
        self._position = 0  # in the log of the tree
        self._left: dict[str, None] = {}  # paths whose change the mirror has not read yet
        self._waking = False
        self.ended = False  # at the service; the node learns it when it can reach the service
        self.reachable = True
        self.lag_until = -1  # until then its commits are late
        self.silent_since = -1  # when the service heard of it last; -1: it is heard of
        self._commits: list[Callable[[Outcome], None]] = []
        self._changed: Callable[[str], None] = lambda path: None
        self._moved: Callable[[SessionState], None] = lambda state: None

    # ---- the Protocol ----

    def start(
        self,
        roots: Sequence[str],
        changed: Callable[[str], None],
        moved: Callable[[SessionState], None],
        *,
        timeout: float | None = None,
    ) -> None:
        """Open the session; the mirror has everything."""
        self._changed, self._moved = changed, moved
        self.tree.sessions.append(self)
        self.mirror = {path: node[:2] for path, node in self.tree.nodes.items()}
        self._position = len(self.tree.log)

    def read(self, path: str) -> tuple[bytes, int] | None:
        """Return what the mirror has."""
        return self.mirror.get(path)

    def children(self, path: str) -> list[str]:
        """Return the names below a path in the mirror."""
        if self._index is None:
            self._index = {}
            for each in sorted(self.mirror):
                parent, _, name = each.rpartition("/")
                self._index.setdefault(parent, []).append(name)
        return self._index.get(path, [])

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Do all ops or none, later."""
        world, random = self.tree.world, self.tree.world.random
        self._commits.append(done)
        if self.state != "connected" or not self.reachable:
            world.at(MS + int(random() * 50 * MS), self._answer, done, Unknown(), ())
        elif random() < self.tree.faults.lost:
            # Never sent, done before the connection breaks, or done after that.
            fate = random()
            if fate < 0.66:
                world.at(int(random() * 300 * MS), self._arrive, tuple(ops), None)
            world.at(int(random() * 200 * MS), self._answer, done, Unknown(), ())
        else:
            world.at(self._delay(), self._arrive, tuple(ops), done)

    def sync(self, done: Callable[[], None]) -> None:
        """Bring the mirror up to date."""
        self.tree.world.at(self._delay(), self._synced, done)

    def close(self) -> None:
        """End the session."""
        if not self.ended:
            self.tree.end(self)
        self.state = "lost"

    # ---- commits ----

    def _delay(self) -> int:
        random = self.tree.world.random
        if self.tree.world.now < self.lag_until:
            return int(random() * 400 * MS)
        if random() < self.tree.faults.slow:
            return int(random() * 300 * MS)
        return 300 + int(random() * 3 * MS)

    def _arrive(self, ops: tuple[Op, ...], done: Callable[[Outcome], None] | None) -> None:
        """The commit is at the service."""
        if self.ended:
            return  # a session that has ended commits nothing
        outcome = self.tree.apply(ops, self)
        if done is not None:
            delay = 300 + int(self.tree.world.random() * 2 * MS)
            paths = tuple(op.path for op in ops) if isinstance(outcome, Committed) else ()
            self.tree.world.at(delay, self._answer, done, outcome, paths)

    def _answer(
        self, done: Callable[[Outcome], None], outcome: Outcome, paths: tuple[str, ...]
    ) -> None:
        if done not in self._commits:
            return  # the connection broke: it was answered with Unknown
        if not self._runs(self._answer, (done, outcome, paths)):
            return
        if not self.reachable:
            outcome, paths = Unknown(), ()
        self._commits.remove(done)
        for path in paths:  # the mirror has the session's own commit when it is answered
            self._left.pop(path, None)
            self._refresh(path)
        done(outcome)

    def _synced(self, done: Callable[[], None]) -> None:
        if self._runs(self._synced, (done,)) and self.reachable:
            self._catch_up(0.0)
            done()

    # ---- the mirror ----

    def expect_news(self) -> None:
        """The tree changed: the mirror follows later."""
        if not self._waking and self.reachable:
            self._waking = True
            self.tree.world.at(self._delay(), self._news)

    def _news(self) -> None:
        if not self._runs(self._news, ()):
            return
        self._waking = False
        if self.reachable:
            self._catch_up(self.tree.faults.scattered)

    def _catch_up(self, scattered: float) -> None:
        log, random = self.tree.log, self.tree.world.random
        self._left.update(dict.fromkeys(log[self._position :]))
        self._position = len(log)
        later: dict[str, None] = {}
        for path in list(self._left):
            if scattered and random() < scattered:
                later[path] = None
                continue
            if path in self._left:  # a callback may have read it
                del self._left[path]
                self._refresh(path)
        if later:
            self.expect_news()

    def _refresh(self, path: str) -> None:
        found = self.tree.nodes.get(path)
        after = None if found is None else found[:2]
        if self.mirror.get(path) == after:
            return
        if after is None:
            del self.mirror[path]
        else:
            self.mirror[path] = after
        self._index = None
        self._changed(path)

    # ---- the connection ----

    def _runs(self, call: Callable[..., None], arguments: tuple[object, ...]) -> bool:
        """Return whether the process of this session can be called; a paused one is later."""
        node = self.tree.world.nodes[self.node]
        if not node.up or node.session is not self:
            return False
        if node.paused:
            node.inbox.append((call, arguments))
            return False
        return True

    def go_silent(self) -> None:
        """The service does not hear of this session any more."""
        if self.silent_since < 0:
            world = self.tree.world
            self.silent_since = world.now
            margin = int(world.random() * 300 * MS)
            world.at(self.tree.timeout_ms * MS + margin, self.tree.expire, self, world.now)

    def cut(self) -> None:
        """Cut the connection between the node and the service."""
        if not self.reachable or self.ended:
            return
        self.reachable = False
        self.go_silent()
        self.tree.world.at(MS, self._lose_connection)

    def _lose_connection(self) -> None:
        if self.reachable or not self._runs(self._lose_connection, ()):
            return
        self._move("suspended")
        for done in list(self._commits):
            self._answer(done, Unknown(), ())

    def mend(self) -> None:
        """Repair the connection.  The node learns now whether its session has ended."""
        self.reachable = True
        node = self.tree.world.nodes[self.node]
        if not node.paused:
            self.silent_since = -1
        self._reconnect()

    def resumed(self) -> None:
        """The process continues after a pause."""
        if self.reachable:
            self.silent_since = -1
            self.tree.world.at(int(self.tree.world.random() * 20 * MS), self._reconnect)

    def _reconnect(self) -> None:
        if not self.reachable or not self._runs(self._reconnect, ()):
            return
        if self.ended:
            self._move("lost")
        else:
            self._move("connected")
            self.expect_news()

    def _move(self, state: SessionState) -> None:
        if self.state != state and self.state != "lost":
            self.state = state
            self._moved(state)
