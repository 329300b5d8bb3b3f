"""Membership: the session of a node with the metadata tree, and its registration there.

A node has one life for each registration, numbered by its broker epoch.  A life ends with the
session, or when the registration is gone from the tree.  Then the node registers again.

Used by the thread of the node only, except `start`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from logstore.errors import (
    ClusterMemberError,
    ClusterMismatchError,
    LogStoreError,
    MetadataUnavailableError,
    NodeIdInUseError,
)
from logstore.files.boot import boot_id
from logstore.files.lock import DirectoryLock
from logstore.replication.config import NodeConfig
from logstore.replication.hosting.adoption import adopted
from logstore.replication.machines.image import (
    CLUSTER_ID,
    ROOTS,
    ClusterImage,
    Key,
    Registration,
    as_json,
)
from logstore.replication.machines.registration import changed_registration, register
from logstore.replication.metadata import (
    Committed,
    Create,
    Metadata,
    Op,
    Outcome,
    SessionState,
    Unknown,
)
from logstore.root.member import ClusterMember
from logstore.store.store import Store, set_member
from logstore.waking import Gate

__all__ = ["Member", "Membership", "wall_ms"]

log = logging.getLogger("logstore.replication")

RETRY_MS = 50
CHECK_MS = 100  # how often a node looks whether its id is free
REOPEN_MS = 500


class Member(Protocol):
    """The node, as this module uses it."""

    id: int
    store: Store
    config: NodeConfig

    def now(self) -> int: ...
    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]: ...
    def post(self, call: Callable[[], object] | None = None) -> None:
        """Make a call in the thread of the node; then it does what the image asks for."""

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None: ...
    def path_changed(self, path: str) -> None: ...
    def use(self, image: ClusterImage) -> None:
        """Use the image of a new session."""

    def offline_keys(self) -> frozenset[Key]:
        """Return the partitions that the node cannot use."""

    def begin_life(self, epoch: int, incarnation: str) -> None: ...
    def end_life(self) -> None: ...
    def refuse(self, error: BaseException) -> None:
        """The node cannot start."""


class Membership:
    """One node of the tree."""

    def __init__(
        self, node: Member, sessions: Callable[[], Metadata], host: str, port: int
    ) -> None:
        self._node = node
        self._sessions = sessions
        self.session: Metadata | None = None
        self.image = ClusterImage()
        self.registration = Registration(
            id=node.id,
            epoch=-1,  # not registered
            host=host,
            port=port,
            rack=node.config.broker_rack or None,
            incarnation=uuid.uuid4().hex,
            boot=boot_id(),
            lock=_lock_of(node.store),
        )
        self.unwilling = False  # to lead: it is shutting down, or its disk is full
        self._registering = False
        self._changing = False
        self._held_since = -1  # another process is registered under our id since then
        self._ended = False

    @property
    def registered(self) -> bool:
        """Whether the node is in a life."""
        return self.registration.epoch >= 0

    # ---- the session ----

    def start(self, timeout: float) -> None:
        """Open the first session; agree with the tree about the cluster.

        The first node of a new tree names the cluster, and brings the topics of its store.
        """
        self._open(timeout)
        session, store, me = self.session, self._node.store, self._node.id
        assert session is not None
        mine = store.identity
        member = ClusterMember.read(store.path)
        if member is not None and not self.image.cluster_id:
            raise ClusterMemberError(
                *member, "the metadata tree is empty: correct the part of zookeeper.connect behind "
                f"the /.  If the tree is lost, `logstore cluster leave -s {store.path}` of the "
                "node with the most records lets it begin a new one", where=str(store.path),
            )  # fmt: skip
        if not self.image.cluster_id and (mine.node_id == me or not len(store)):
            self._name_cluster(session, timeout)
        found = self.image.cluster_id
        if mine.cluster_id != found or mine.node_id != me:
            if len(store):  # it belongs to another cluster, or to another node of this one
                node = mine.node_id if found in ("", mine.cluster_id) else None
                raise ClusterMismatchError(f"{mine.cluster_id}, node {mine.node_id}",
                                           f"{found or 'without a name'}, node {me}",
                                           where=str(store.path), node=node)  # fmt: skip
        elif member == (found, me):
            return
        set_member(store, ClusterMember(found, me))

    def _name_cluster(self, session: Metadata, timeout: float) -> None:
        """Write the cluster id and the topics of the store to the tree, unless it has an id."""
        answered, seen = Gate(), Gate()
        store = self._node.store
        data = as_json({"version": "1", "id": store.identity.cluster_id})
        ops = (Create(CLUSTER_ID, data), *adopted(store, self._node.id))
        session.commit(ops, lambda outcome: answered.open())
        if answered.wait(timeout):
            # Refused if another node was faster: only after a sync the mirror must have its id.
            session.sync(seen.open)
        if answered.opened and seen.wait(timeout):
            self.image.load(session)
        if not self.image.cluster_id:
            raise MetadataUnavailableError(
                f"the metadata tree did not show a cluster id within {timeout:g} s: start the node "
                "again when the tree can be reached",
                since=wall_ms() / 1000,
            )

    def _open(self, timeout: float) -> None:
        node = self._node
        session = self._sessions()

        def moved(state: SessionState) -> None:
            if state == "lost":
                node.post(lambda: self._lost(session))

        session.start(ROOTS, node.path_changed, moved, timeout=timeout)
        image = ClusterImage()
        image.load(session)
        self.session, self.image = session, image
        node.use(image)

    def _lost(self, session: Metadata) -> None:
        """The session has ended: lead and follow nothing, and begin another one."""
        if session is not self.session or self._ended:
            return
        log.warning("node %d: its session with the metadata service is lost", self._node.id)
        self.session = None
        self._registering = self._changing = False
        self._end_life()
        self._open_again()

    def _open_again(self) -> None:
        if self.session is None and not self._ended:
            try:
                self._open(1.0)
            except (OSError, LogStoreError) as error:
                log.warning("node %d: no session yet: %s", self._node.id, error)
                self._node.after(REOPEN_MS, lambda: self._node.post(self._open_again))

    def close(self) -> None:
        """End the session."""
        self._ended = True
        session, self.session = self.session, None
        if session is not None:
            session.close()

    # ---- the registration ----

    def keep(self) -> None:
        """Register, or have the registration say what it should."""
        if self.session is None:
            return
        if not self.registered:
            self._register(self.session)
            return
        mine = self.image.nodes.get(self._node.id)
        wanted = self.registration
        if mine is None or (mine.incarnation, mine.epoch) != (wanted.incarnation, wanted.epoch):
            log.warning("node %d: its registration is gone", self._node.id)
            self._end_life()
            self._register(self.session)
            return
        if not mine.lossy:  # the controller has done what follows from it
            self.registration = wanted._replace(lossy=False)
        offline = self._node.offline_keys()
        if (mine.unwilling, mine.offline) != (self.unwilling, offline) and not self._changing:
            self._change(mine, offline)

    def _change(self, mine: Registration, offline: frozenset[Key]) -> None:
        self._changing = True

        def changed(outcome: Outcome) -> None:
            self._changing = False
            if isinstance(outcome, Unknown):
                self._node.after(RETRY_MS, self._node.post)

        ops = changed_registration(mine, wall_ms(), unwilling=self.unwilling, offline=offline)
        self._node.commit(ops, changed)

    def _register(self, session: Metadata) -> None:
        if self._registering:
            return
        wanted = self.registration._replace(
            unwilling=self.unwilling, offline=self._node.offline_keys()
        )
        found = register(session, wanted, wall_ms())
        if isinstance(found, Registration):
            self._wait_for_id(found)
            return
        made, ops = found
        self._registering = True

        def registered(outcome: Outcome) -> None:
            if self.session is not session:
                return  # of a session that is lost
            self._registering = False
            if isinstance(outcome, Committed):
                self.registration = made
                self._held_since = -1
                log.info("node %d: registered with broker epoch %d", made.id, made.epoch)
                self._node.begin_life(made.epoch, made.incarnation)
            else:
                self._node.after(RETRY_MS, self._node.post)

        self._node.commit(ops, registered)

    def _wait_for_id(self, other: Registration) -> None:
        """Another process has our id: wait for its session to end, for two time-outs."""
        node, now = self._node, self._node.now()
        if self._held_since < 0:
            self._held_since = now
        if now - self._held_since > 2 * node.config.zookeeper_session_timeout_ms:
            node.refuse(NodeIdInUseError(node.id, f"{other.host}:{other.port}"))
        else:
            node.after(CHECK_MS, node.post)

    def _end_life(self) -> None:
        self.registration = self.registration._replace(epoch=-1)
        self._node.end_life()


def wall_ms() -> int:
    """Return the Unix time in milliseconds, for people who look at the tree."""
    return time.time_ns() // 1_000_000


def _lock_of(store: Store) -> tuple[int, int]:
    """Return device and inode of the store's lock file: a process that holds it is alone."""
    try:
        found = (store.path / DirectoryLock.NAME).stat()
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino
