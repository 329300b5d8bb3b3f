"""Node: one member of a cluster: a store, a session with the metadata tree, and its replicas.

The thread ``logstore node N`` owns the image of the tree, the registration and the controller: it
takes every change of the tree, tells the replicas, makes and sets aside partitions, and, if this
node is the controller, decides.  Records do not pass through it: producers, fetches and syncs use
the replicas from any thread, and go on while the metadata service is out of reach.

A node leads only in the life in which it was elected.  If its session is lost, it stops to lead and
to follow, and registers again with a new broker epoch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from logstore.closeable import Closeable
from logstore.errors import ClosedError
from logstore.replication.config import NodeConfig
from logstore.replication.hosting.fetching import Fetcher, FetchService
from logstore.replication.hosting.hosted import HostedReplica
from logstore.replication.hosting.later import run_later
from logstore.replication.hosting.local import LocalPartitions
from logstore.replication.hosting.membership import Membership, wall_ms
from logstore.replication.hosting.metrics import Counts, metrics_of
from logstore.replication.hosting.produced import Produced
from logstore.replication.hosting.throttling import Throttling
from logstore.replication.machines.controller import Controller, Decided
from logstore.replication.machines.image import ClusterImage, Key, Registration, touches_node
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.machines.throttle import FOLLOWER, LEADER
from logstore.replication.metadata import Commit, Committed, Metadata, Op, Outcome, Unknown
from logstore.replication.peers import (
    Fetches,
    FetchRequest,
    LeaderOffsets,
    OffsetsRequest,
    Peers,
)
from logstore.store.store import Store, abandon_store, has_space
from logstore.timers import Timers
from logstore.waking import uninterrupted

__all__ = ["Node"]

log = logging.getLogger("logstore.replication")

NOT_LEADER_OR_FOLLOWER = 6
UNKNOWN_TOPIC_OR_PARTITION = 3
SPACE_MS = 5000  # how often a node with a full disk looks whether there is space again
REPAIR_MS = 1000  # before what failed is tried again


class Node(Closeable):
    """A member of a cluster.  It owns its store: `close` closes it.

    `metadata` returns a new session with the tree; it is called again after a session is lost.
    Threads may share a node.
    """

    def __init__(
        self,
        store: Store,
        *,
        node_id: int,
        metadata: Callable[[], Metadata],
        peers: Peers,
        config: NodeConfig | None = None,
        host: str = "localhost",
        port: int = -1,
    ) -> None:
        self.id = node_id
        self.store = store
        self.config = config or NodeConfig()
        self.peers = peers
        self.counts = Counts()
        self.image = ClusterImage()
        self.lock = threading.RLock()  # guards the image against its readers
        imbalance = self.config.leader_imbalance_per_broker_percentage / 100
        self.membership = Membership(self, metadata, host, port)
        self.controller = Controller(node_id, self.membership.registration.incarnation, imbalance)
        self._timers = Timers(name=f"logstore node {node_id} timers")
        self.partitions = LocalPartitions(self)
        self._sending = Throttling(
            LEADER, node_id, self.config.leader_replication_throttled_rate, self.now
        )
        self._copying = Throttling(
            FOLLOWER, node_id, self.config.follower_replication_throttled_rate, self.now
        )
        self._service = FetchService(self.partitions.replicas, self.after, self._sending)
        self._fetchers: dict[tuple[int, int], Fetcher] = {}
        self._events: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._touched: set[Key] | None = set()  # partitions that changed; None: all
        self._thread = threading.Thread(
            target=self._run, name=f"logstore node {node_id}", daemon=True
        )
        self._waiting: list[tuple[Callable[[], bool], Callable[[bool], object], float]] = []
        self._listeners: list[Callable[[Key, str], object]] = []
        self._in_doubt: list[Callable[[], object]] = []
        self._cut_since: int | None = None  # by `now`: the metadata service is out of reach
        self._started = threading.Event()
        self._error: BaseException | None = None
        # Nodes whose registration is gone, and since when, by the monotonic clock in seconds.
        self.departed: dict[int, tuple[Registration, float]] = {}
        self._stepped_down = False
        self._stopping = False  # no thread takes events any more
        self._closed = False

    def __repr__(self) -> str:
        return f"<Node {self.id} of {len(self.partitions.replicas)} replicas>"

    # ---- what replicas need: see Host ----

    @property
    def listens(self) -> bool:
        """Whether something listens to changes of replicas."""
        return bool(self._listeners)

    def now(self) -> int:
        """Return the milliseconds of a monotonic clock."""
        return time.monotonic_ns() // 1_000_000

    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]:
        """Make a call in `ms` milliseconds; return a function that cancels it."""
        timeout = self._timers.after(ms / 1000, call)
        return lambda: self._timers.cancel(timeout)

    def commit(self, ops: Sequence[Op], done: Callable[[Outcome], None]) -> None:
        """Change the tree; `done` is called by the thread of this node.

        The image has the change then.
        """

        began = time.monotonic()

        def answered(outcome: Outcome) -> None:
            self.counts.add("metadata_writes_total")
            self.counts.add("metadata_write_seconds_total", time.monotonic() - began)
            for op in ops:
                self._refresh(op.path)
            done(outcome)

        session = self.membership.session
        try:
            if session is None:
                raise ClosedError("there is no session")
            session.commit(ops, lambda outcome: self.post(lambda: answered(outcome)))
        except ClosedError:
            self.post(lambda: done(Unknown()))

    def fetch(self, replica: HostedReplica) -> None:
        """Fetch for a follower."""
        view = replica.machine.view
        if view is None or view.leader < 0 or self._stopping:
            return
        number = hash(replica.key) % self.config.num_replica_fetchers
        fetcher = self._fetchers.get((view.leader, number))
        if fetcher is None:
            made = Fetcher(self.id, view.leader, self.peers, self.config, self.after, self._copying)
            fetcher = self._fetchers.setdefault((view.leader, number), made)
        fetcher.ready(replica)

    def ask_offsets(self, replica: HostedReplica, token: int, leader: int, epoch: int) -> None:
        """Ask a leader for its offsets."""
        request = OffsetsRequest(self.id, replica.key, replica.topic_id, epoch)
        self.peers.offsets(leader, request, lambda found: replica.leader_offsets(token, found))

    def changed(self, replica: HostedReplica, what: str) -> None:
        """Tell the listeners of a change."""
        for listener in self._listeners:
            listener(replica.key, what)

    def went_offline(self, replica: HostedReplica, reason: str) -> None:
        """List a replica as offline, so that the controller elects another leader."""
        self.post(lambda: self.partitions.set_offline(replica.key, reason))

    def disk_is_full(self) -> None:
        """Lead nothing until there is space again."""
        self.post(lambda: self._set_unwilling(unwilling=True))
        self.after(SPACE_MS, lambda: self.post(self._look_for_space))

    def _look_for_space(self) -> None:
        if self.membership.unwilling and not self._stopping:
            if has_space(self.store):
                self._set_unwilling(unwilling=False)
            else:
                self.after(SPACE_MS, lambda: self.post(self._look_for_space))

    def _set_unwilling(self, *, unwilling: bool) -> None:
        self.membership.unwilling = unwilling

    # ---- for listeners and peers ----

    def listen(self, listener: Callable[[Key, str], object]) -> None:
        """Call ``listener(key, what)`` after changes of replicas here; what: hw, end, role, start.

        After the tree lists other deleted topics: ``listener(("", -1), "deleted")``.  It is called
        without a lock, from any thread, and must not wait.
        """
        self._listeners.append(listener)

    def when_in_doubt(self, call: Callable[[], object]) -> None:
        """Make a call again and again while other nodes have probably elected other leaders.

        That is: the metadata service is out of reach for longer than the session lasts, and no
        follower fetches from here.  The node cannot know it, and commits nothing; but clients that
        ask it alone would never hear of the new leaders.
        """
        self._in_doubt.append(call)

    def replica(self, key: Key) -> HostedReplica | None:
        """Return the replica of a partition on this node."""
        return self.partitions.replicas.get(key)

    def leader_of(self, key: Key) -> LeaderAndIsr | None:
        """Return the state of a partition that this node has seen: leader, epoch, in-sync set."""
        return self.image.states.get(key)

    def produce(
        self,
        key: Key,
        raw: bytes,
        acks: int,
        done: Callable[[Produced], object],
        *,
        timeout_ms: int | None = None,
        origin: str = "leader",
        wait: bool = True,
        leader_epoch: int | None = None,
    ) -> None:
        """Append batches to a partition that this node leads; see `HostedReplica.produce`."""
        replica = self.partitions.replicas.get(key)
        if replica is None:
            known = self.image.assignment(key) is not None
            done(Produced(NOT_LEADER_OR_FOLLOWER if known else UNKNOWN_TOPIC_OR_PARTITION))
            return
        replica.produce(raw, acks, done, timeout_ms=timeout_ms, origin=origin, wait=wait,
                        leader_epoch=leader_epoch)  # fmt: skip

    def append(
        self, key: Key, append: Callable[[], range], acks: int, done: Callable[[Produced], object]
    ) -> None:
        """As `produce`, for records that ``append()`` writes into the log of the leader."""
        replica = self.partitions.replicas.get(key)
        if replica is None:
            done(Produced(NOT_LEADER_OR_FOLLOWER))
        else:
            replica.append(append, acks, done)

    def serve_fetch(
        self,
        request: FetchRequest,
        done: Callable[[Fetches], object],
        waits: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        """Serve the fetch of a follower; see `FetchService.fetch`."""
        self._service.fetch(request, done, waits)

    def serve_offsets(self, request: OffsetsRequest) -> LeaderOffsets:
        """Return where the log of a partition starts and ends, for a follower."""
        replica = self.partitions.replicas.get(request.key)
        if replica is None:
            return LeaderOffsets(UNKNOWN_TOPIC_OR_PARTITION)
        return replica.offsets(request.topic_id, request.leader_epoch)

    def when(
        self, holds: Callable[[], bool], done: Callable[[bool], object], timeout: float
    ) -> None:
        """Call ``done(True)`` when `holds` is true after a change of the tree, else done(False).

        `holds` reads the image; both are called by the thread of this node.
        """
        until = time.monotonic() + timeout

        def add() -> None:
            self._waiting.append((holds, done, until))
            self.after(round(timeout * 1000), self.post)

        self.post(add)

    # ---- the life of a node ----

    def start(self, timeout: float = 30.0) -> None:
        """Register and serve; return when the node is registered.

        Raise ClusterMismatchError if the directory belongs to another cluster, NodeIdInUseError if
        another process has this id, MetadataUnavailableError if the tree cannot be reached.
        """
        try:
            self.membership.start(timeout)
            self._timers.start()
            self.store.topic_changes.keep_high_watermarks()
            self.partitions.open_all()
            self.membership.registration = self.membership.registration._replace(
                lossy=self.partitions.lossy
            )
            self.counts.add("lossy_restarts_total", self.partitions.lossy)
            self._thread.start()
            self._tick()
            self._checkpoint()
            self._balance()
            self.post()
            if not self._started.wait(timeout):
                raise TimeoutError(f"node {self.id} could not register within {timeout:g} s")
            if self._error is not None:
                raise self._error
        except BaseException:
            self.kill()
            raise

    def post(self, call: Callable[[], object] | None = None) -> None:
        """Make a call in the thread of this node; then it does what the image asks for."""
        if not self._stopping:
            self._events.put(call or _nothing)

    def path_changed(self, path: str) -> None:
        """A path of the tree has changed."""
        self.post(lambda: self._refresh(path))

    def use(self, image: ClusterImage) -> None:
        """Use the image of a new session."""
        with self.lock:
            self.image = image
            self._use_throttles()
        self._tell_deleted()

    def _use_throttles(self) -> None:
        self._sending.use(self.image)
        self._copying.use(self.image)

    def offline_keys(self) -> frozenset[Key]:
        """Return the partitions that this node cannot use."""
        return self.partitions.offline_keys

    def begin_life(self, epoch: int, incarnation: str) -> None:
        """This node is registered: its replicas may lead and follow."""
        self.controller = Controller(self.id, incarnation, self.controller.imbalance)
        self.partitions.begin_life(epoch, self.image)
        self._touched = None
        self._started.set()

    def end_life(self) -> None:
        """This node is not registered any more: it leads and follows nothing."""
        self.counts.add("session_expires_total")
        self.controller.resign()
        for replica in self.partitions.all():
            replica.session_lost()

    def refuse(self, error: BaseException) -> None:
        """The node cannot start."""
        self._error = error
        self._started.set()

    def _run(self) -> None:
        while True:
            event = self._events.get()
            while event is not None:
                self._call(event)
                event = self._events.get_nowait() if not self._events.empty() else None
                if event is None and self._stopping:
                    return
            if self._stopping:
                return
            if not self._call(self._step):
                self._touched = None
                self.after(REPAIR_MS, self.post)

    def _call(self, event: Callable[[], object]) -> bool:
        """Make a call; return False if it failed: the thread goes on."""
        try:
            event()
            run_later()
        except Exception as error:
            if not self._stopping:
                log.exception("node %d: an event failed", self.id)
            if not self._started.is_set():
                self.refuse(error)
            return False
        return True

    def _refresh(self, path: str) -> None:
        session = self.membership.session
        if session is None:
            return
        with self.lock:
            before = dict(self.image.nodes) if touches_node(path) else {}
            touched = self.image.refresh(session.read, path)
            if path.startswith("/config/"):
                self._use_throttles()
            now = time.monotonic()
            for node in before.keys() - self.image.nodes.keys():
                self.departed[node] = before[node], now
        self._touch(touched)
        self.controller.touched(touched, self.image)
        if path.startswith("/logstore/deleted/"):
            self._tell_deleted()

    def _tell_deleted(self) -> None:
        for listener in self._listeners:
            listener(("", -1), "deleted")

    def _touch(self, keys: Iterable[Key] | None) -> None:
        if keys is None:
            self._touched = None
        elif self._touched is not None:
            self._touched.update(keys)

    def _step(self) -> None:
        """Do what the image asks for.  Called after the events that were there."""
        self.membership.keep()
        if self.membership.registered:
            self._tell_replicas()
            self.membership.keep()  # a partition may be offline now, or not any more
            self._control()
        self._end_waits()

    # ---- replicas and the controller ----

    def _tell_replicas(self) -> None:
        touched, self._touched = self._touched, set()
        if touched is not None and not touched and not self.partitions.has_work(self.image):
            return
        self.partitions.follow(self.image)
        image = self.image
        for replica in self.partitions.all():
            if touched is not None and replica.key not in touched:
                continue
            state, topic = image.states.get(replica.key), image.topics.get(replica.key[0])
            assignment = image.assignment(replica.key)
            if state is not None and topic is not None and assignment is not None:
                replica.seen(state, assignment, topic.version)
                if self.id in state.isr and not self.membership.registration.lossy:
                    replica.log.clear_lossy()

    def _control(self) -> None:
        controller, image = self.controller, self.image
        won = controller.campaign(image, wall_ms())
        if won is not None:
            self.commit(won.ops, lambda outcome: controller.campaigned(outcome, self.image))
        for commit in controller.step(image):
            self._decide(controller, commit)

    def _decide(self, controller: Controller, commit: Commit) -> None:
        log.info("controller %d: %s", self.id, commit.tag)
        key = commit.tag.subject if isinstance(commit.tag, Decided) else ""
        before = None if isinstance(key, str) else self.image.states.get(key)

        def decided(outcome: Outcome) -> None:
            if isinstance(outcome, Committed) and not isinstance(key, str):
                self.counts.add_election(before, self.image.states.get(key))
            controller.decided(commit.tag, outcome, self.image)

        self.commit(commit.ops, decided)

    def _end_waits(self) -> None:
        now = time.monotonic()
        still = []
        for waiting in self._waiting:
            holds, done, until = waiting
            if holds():
                done(True)
            elif now >= until:
                done(False)
            else:
                still.append(waiting)
        self._waiting = still

    # ---- the clock ----

    def _tick(self) -> None:
        self.after(max(10, self.config.replica_lag_time_max_ms // 2), self._tick)
        for replica in self.partitions.all():
            replica.tick()
        if self._is_in_doubt():
            log.warning("node %d: cut off, others may lead: its clients have to ask them", self.id)
            for call in self._in_doubt:
                call()

    def _is_in_doubt(self) -> bool:
        session, now = self.membership.session, self.now()
        if session is None or session.state != "suspended":
            self._cut_since = None
            return False
        if self._cut_since is None:
            self._cut_since = now
        if now - self._cut_since < self.config.zookeeper_session_timeout_ms:
            return False
        leaders = (each.machine.leader for each in self.partitions.all())
        return any(leader is not None and leader.is_deserted(now) for leader in leaders)

    def _checkpoint(self) -> None:
        self.after(self.config.replica_high_watermark_checkpoint_interval_ms, self._checkpoint)
        if self._started.is_set():
            self.post(self.store.checkpoint)

    def _balance(self) -> None:
        if self.config.auto_leader_rebalance_enable:
            self.after(self.config.leader_imbalance_check_interval_seconds * 1000, self._balance)
            self.post(lambda: self.controller.balance(self.image))

    # ---- the end ----

    def leads(self) -> list[Key]:
        """Return the partitions that this node leads."""
        return [each.key for each in self.partitions.all() if each.machine.leader is not None]

    def _must_lead(self) -> bool:
        """Whether a partition is led here that another live member of its ISR could lead."""
        with self.lock:
            for key in self.leads():
                state = self.image.states.get(key)
                others = [] if state is None else [node for node in state.isr if node != self.id]
                willing = (each for each in map(self.image.nodes.get, others) if each is not None)
                if any(not each.unwilling for each in willing):
                    return True
        return False

    def close(self) -> None:
        """Move the leaderships to other nodes, close the store, and leave the cluster."""
        if not self._closed:
            uninterrupted(self._close)

    def step_down(self) -> None:
        """Move the leaderships to other nodes, and lead nothing from now on.

        Return when that is done, or after the time of `controlled.shutdown.*`.
        """
        config = self.config
        done, self._stepped_down = self._stepped_down, True
        if config.controlled_shutdown_enable and self.membership.registered and not done:
            self.post(lambda: self._set_unwilling(unwilling=True))
            moved = threading.Event()
            limit = config.controlled_shutdown_max_retries
            limit *= config.controlled_shutdown_retry_backoff_ms
            self.when(lambda: not self._must_lead(), lambda _: moved.set(), limit / 1000)
            moved.wait(limit / 1000 + 1)

    def _close(self) -> None:
        self.step_down()
        self.halt()
        self.end()

    def end(self) -> None:
        """Close the store and the session of a node that was halted."""
        try:
            self.store.close()
        finally:
            self.membership.close()

    def kill(self) -> None:
        """Stop as if the process were killed: nothing is written, and nobody is told.

        The session ends at once, not after its time-out.
        """
        if not self._closed:
            uninterrupted(self._kill)

    def _kill(self) -> None:
        self.halt()
        if not self.store.closed:
            abandon_store(self.store)
        self.membership.close()

    def halt(self) -> None:
        """End all work and all threads of the node.  The store and the session stay open."""
        self._closed = True
        for replica in self.partitions.all():
            replica.close()
        self._stopping = True
        self._events.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._timers.close()
        self.peers.close()
        waiting, self._waiting = self._waiting, []
        for _, done, _ in waiting:
            done(False)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this node's replication, by name."""
        return metrics_of(self)

    def status(self) -> dict[str, Any]:
        """Return what this node has: broker epoch, role and offsets of each replica."""
        return {
            "node": self.id,
            "broker_epoch": self.membership.registration.epoch,
            "controller": self.controller.active,
            "leads": self.leads(),
            "offline": self.partitions.offline_reasons(),
        }


def _nothing() -> None:
    """An event that only has the node look at its image again."""
