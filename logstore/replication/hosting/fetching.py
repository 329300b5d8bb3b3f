"""Fetchers: the fetches of this node's followers; FetchService: the fetches of followers elsewhere.

A Fetcher sends the fetches of the partitions that one node leads.  If a request costs much, as over
TCP, it sends one at a time with all partitions that are ready, and waits a moment for those that
still write the last answer: a request that waits at the leader would keep them out.  In one process
it sends one for each partition at once.

The throttle bounds what followers copy that are not in sync: such a partition is left out of the
requests until its node has tokens, and its part of an answer is empty until the leader's node has.

A fetch that finds no records waits at the leader until its log grows.  Then the thread that
appended answers it, and the follower copies the records in that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from logstore.replication.config import NodeConfig
from logstore.replication.hosting.hosted import HostedReplica, Served
from logstore.replication.hosting.later import later, run_later
from logstore.replication.hosting.throttling import Throttling
from logstore.replication.machines.follower import Fetched, Offer, Rotation
from logstore.replication.machines.image import Key
from logstore.replication.machines.leader import LeaderReplica
from logstore.replication.peers import Fetches, FetchRequest, FetchRow, Peers

__all__ = ["FetchService", "Fetcher"]

UNKNOWN_TOPIC_OR_PARTITION = 3
SETTLE_MS = 10  # how long a request waits for partitions that write the last answer

After = Callable[[int, Callable[[], object]], Callable[[], object]]


class Fetcher:
    """Fetches from one leader, for the partitions that it leads."""

    def __init__(
        self,
        me: int,
        leader: int,
        peers: Peers,
        config: NodeConfig,
        after: After,
        throttle: Throttling,
    ) -> None:
        self._me = me
        self._leader = leader
        self._peers = peers
        self._config = config
        self._after = after
        self._throttle = throttle
        self._lock = threading.Lock()
        self._ready: dict[Key, HostedReplica] = {}
        self._turn = Rotation()
        self._under_way = False
        self._settling: set[Key] = set()  # got records in the last answer, and write them
        self._deferred: dict[Key, HostedReplica] = {}  # wait for tokens of the throttle

    def ready(self, *replicas: HostedReplica) -> None:
        """Fetch for partitions.  Called without a lock."""
        if self._peers.direct:
            for replica in replicas:
                self._send([replica])
            return
        with self._lock:
            for replica in replicas:
                self._ready[replica.key] = replica
                self._turn.add(replica.key)
                self._settling.discard(replica.key)
            if self._under_way or self._settling:
                return
            rows = self._take_locked()
        self._send(rows)

    def _take_locked(self) -> list[HostedReplica]:
        self._under_way = True
        turn = self._turn.keys()
        rows = [self._ready[key] for key in turn if key in self._ready]
        self._ready.clear()
        return rows

    def _settled(self) -> None:
        """Do not wait longer for partitions that write the last answer."""
        with self._lock:
            self._settling.clear()
            if self._under_way or not self._ready:
                return
            rows = self._take_locked()
        self._send(rows)
        run_later()

    def _is_late(self, replica: HostedReplica) -> bool:
        """Whether the throttle delays the fetches of a partition that it binds."""
        view, follower = replica.machine.view, replica.machine.follower
        in_sync = view is not None and self._me in view.isr
        return not in_sync and follower is not None and not follower.is_level

    def _defer(self, replicas: list[HostedReplica]) -> int:
        """Ask for partitions when the throttle has tokens; return after how many ms."""
        wait = self._throttle.wait_ms()
        with self._lock:
            has_timer = bool(self._deferred)
            self._deferred.update((replica.key, replica) for replica in replicas)
        if not has_timer:
            self._after(wait, self._admit)
        return wait

    def _admit(self) -> None:
        with self._lock:
            deferred, self._deferred = self._deferred, {}
        self.ready(*deferred.values())
        run_later()

    def _send(self, replicas: list[HostedReplica]) -> None:
        config = self._config
        asked: dict[Key, tuple[HostedReplica, Offer]] = {}
        rows = []
        in_sync = True
        epoch = -1
        room: int | None = None  # of the throttle, for this request
        deferred: list[HostedReplica] = []
        for replica in replicas:
            most = config.replica_fetch_max_bytes
            if self._throttle.binds(replica.key) and self._is_late(replica):
                room = self._throttle.room() if room is None else room
                most = min(most, room)
                room -= most
                if not most:
                    deferred.append(replica)
                    continue
            offer = replica.poll()
            if offer is None:
                continue
            if offer.leader != self._leader:  # the leader has changed since
                replica.fetched(offer.token, None)
                continue
            asked[replica.key] = replica, offer
            epoch = replica.machine.broker_epoch
            view = replica.machine.view
            in_sync = in_sync and view is not None and self._me in view.isr
            rows.append(FetchRow(replica.key, replica.topic_id, offer, most))
        soon = self._defer(deferred) if deferred else None
        if not rows:
            self._answered(asked, {})
            return
        # One that is not in sync asks often: a fetch is when the leader may take it in.
        wait = config.replica_fetch_wait_max_ms * (10 if in_sync and self._peers.direct else 1)
        if soon is not None and not self._peers.direct:
            wait = min(wait, soon)  # the next request has those that were left out
        request = FetchRequest(
            self._me, epoch, wait, config.replica_fetch_response_max_bytes, tuple(rows)
        )
        self._peers.fetch(self._leader, request, lambda answers: self._answered(asked, answers))

    def _answered(
        self, asked: Mapping[Key, tuple[HostedReplica, Offer]], answers: Fetches | None
    ) -> None:
        if not self._peers.direct:
            with self._lock:
                self._under_way = False
                with_records = [key for key, each in (answers or {}).items() if each.raw]
                self._turn.served(with_records)
                self._settling = set(with_records) & asked.keys()
            if self._settling:
                self._after(SETTLE_MS, self._settled)
        for key, (replica, offer) in asked.items():
            answer = None if answers is None else answers.get(key)
            if answer is not None and answer.raw and self._throttle.binds(key):
                spend = self._throttle.spend if self._is_late(replica) else self._throttle.count
                spend(len(answer.raw))
            replica.fetched(offer.token, answer)
        if not self._peers.direct:
            later(self._go_on)
        run_later()

    def _go_on(self) -> None:
        with self._lock:
            if self._under_way or self._settling or not self._ready:
                return
            rows = self._take_locked()
        self._send(rows)


class _Look:
    """One row of a fetch that is served here."""

    __slots__ = ("dry", "replica", "row", "served")

    def __init__(self, replica: HostedReplica, row: FetchRow, served: Served, *, dry: bool) -> None:
        self.replica = replica
        self.row = row
        self.served = served
        self.dry = dry  # there are records, and the throttle has no tokens for them

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to answer yet."""
        return self.dry or self.served.end <= self.row.offer.offset


class FetchService:
    """Serves the fetches of followers."""

    def __init__(
        self, replicas: Mapping[Key, HostedReplica], after: After, throttle: Throttling
    ) -> None:
        self._replicas = replicas
        self._after = after
        self._throttle = throttle

    def fetch(
        self,
        request: FetchRequest,
        done: Callable[[Fetches], object],
        waits: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        """Serve a fetch; call `done` when a row has an answer, or its time is up.

        ``waits(wake)`` is called first if it has to wait; ``wake()`` then ends the wait.
        """
        looks, answers = self._look(request, again=False)
        run_later()
        if answers or request.max_wait_ms <= 0 or not all(look.is_empty for look in looks):
            done(self._read(request, looks, answers))
            return
        wait = request.max_wait_ms
        if any(look.dry for look in looks):
            wait = min(wait, self._throttle.wait_ms())
        _Waiting(self, request, looks, done, self._after, wait, waits)

    def _look(
        self, request: FetchRequest, *, again: bool
    ) -> tuple[list[_Look], dict[Key, Fetched]]:
        looks = []
        answers = {}
        for row in request.rows:
            replica = self._replicas.get(row.key)
            if replica is None:
                answers[row.key] = Fetched(UNKNOWN_TOPIC_OR_PARTITION)
                continue
            served = replica.serve(request.node, request.broker_epoch, row, again=again)
            if served.leader is None:
                answers[row.key] = served.answer
            else:
                dry = (
                    served.late
                    and served.end > row.offer.offset
                    and self._throttle.binds(row.key)
                    and not self._throttle.room()
                )
                looks.append(_Look(replica, row, served, dry=dry))
        return looks, answers

    def look_again(self, request: FetchRequest) -> Fetches:
        """Return the answer of a fetch that has waited: it is judged again, and not counted."""
        looks, answers = self._look(request, again=True)
        return self._read(request, looks, answers)

    def _read(
        self, request: FetchRequest, looks: list[_Look], answers: dict[Key, Fetched]
    ) -> Fetches:
        left = request.max_bytes
        for look in looks:
            answer = look.served.answer
            if left > 0 and not look.is_empty:
                answer = self._read_one(look, min(left, look.row.max_bytes))
            left -= len(answer.raw)
            answers[look.row.key] = answer
        return answers

    def _read_one(self, look: _Look, most: int) -> Fetched:
        served, offset, throttle = look.served, look.row.offer.offset, self._throttle
        if not throttle.binds(look.row.key):
            return look.replica.read(served, offset, most)
        if not served.late:
            answer = look.replica.read(served, offset, most)
            throttle.count(len(answer.raw))
            return answer
        taken = throttle.take(most)
        if not taken:
            return served.answer
        answer = look.replica.read(served, offset, taken)
        throttle.spend(len(answer.raw) - taken)
        return answer


class _Waiting:
    """A fetch that waits at the leader; ended once."""

    def __init__(
        self,
        service: FetchService,
        request: FetchRequest,
        looks: list[_Look],
        done: Callable[[Fetches], object],
        after: After,
        wait_ms: int,
        waits: Callable[[Callable[[], object]], object] | None,
    ) -> None:
        self._service = service
        self._request = request
        self._looks = looks
        self._done = [done]  # popped by the thread that ends it: exactly one
        self._cancel = after(wait_ms, self._wake)
        if waits is not None:
            waits(self._wake)
        for look in looks:
            if look.dry:
                continue  # woken when there are tokens
            leader = look.served.leader
            assert isinstance(leader, LeaderReplica)
            if not look.replica.wait(leader, look.row.offer.offset, self._wake):
                self._wake()
                break

    def _wake(self) -> None:
        try:
            done = self._done.pop()
        except IndexError:
            return
        self._cancel()
        for look in self._looks:
            look.replica.stop_waiting(self._wake)
        done(self._service.look_again(self._request))
        run_later()
