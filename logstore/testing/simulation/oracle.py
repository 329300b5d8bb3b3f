"""Oracle: what must hold at every moment of a run, and at its end.

`truth` is the list of committed batches of each partition.  The leader that first moves its high
watermark over a batch adds it; every other leader is held to the same list, a deposed one too.

Names in capital letters are those of the invariants in Kafka's TLA+ models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from logstore.replication.machines.controller import Decided
from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import (
    CONTROLLER_EPOCH,
    PREFERRED,
    REASSIGN,
    Key,
    TopicImage,
)
from logstore.replication.machines.leader import FetchVerdict
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from logstore.testing.simulation.disk import Batch, SimulatedLog

if TYPE_CHECKING:
    from logstore.testing.simulation.clients import Pending
    from logstore.testing.simulation.metadata import Session
    from logstore.testing.simulation.node import SimulatedNode
    from logstore.testing.simulation.partition import PartitionShell, Wait
    from logstore.testing.simulation.world import World

__all__ = ["Oracle", "Violation"]


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Truth:
    """The committed batches of one partition, and what its clients saw."""

    __slots__ = ("batches", "end", "ends", "epochs", "lossy", "read", "rounds")

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.ends: dict[int, Batch] = {}  # by the offset after the batch
        self.end = 0
        self.epochs: dict[int, tuple[int, int]] = {}  # leader epoch -> (node, broker epoch)
        # Nodes whose log may miss committed records, until a leader takes them into the set again.
        self.lossy: set[int] = set()
        self.read: dict[int, Batch] = {}  # by base offset
        self.rounds: dict[int, int] = {}  # truncations of a node in its present leader epoch


class Oracle:
    """The invariants of one run."""

    __slots__ = (
        *("_controllers", "_outcomes", "assignments", "failed", "states", "truths", "views"),
        "world",
    )

    def __init__(self, world: World) -> None:
        self.world = world
        self.states: dict[Key, LeaderAndIsr] = {}  # of the tree, now
        self.assignments: TopicImage | None = None
        self.truths: dict[Key, Truth] = {key: Truth() for key in world.keys}
        self.views: dict[tuple[int, int, Key], int] = {}
        self._controllers: dict[int, Session | None] = {}
        self._outcomes: dict[object, tuple[str, Key, int]] = {}  # value -> outcome, place
        self.failed: set[object] = set()  # values that were refused

    def log_of(self, node: int, key: Key) -> SimulatedLog | None:
        """Return the log of a node, also of one that is down."""
        return self.world.nodes[node].disk.logs.get(key)

    def holds(self, node: int, key: Key) -> bool:
        """Return whether a replica has all of truth, durably if it promises that."""
        truth = self.truths[key]
        log = self.log_of(node, key)
        if log is None or truth.end == 0:
            return truth.end == 0
        if log.damaged:
            return False
        end = log.durable_offset if self.world.settings.fsync else log.end_offset
        if end < truth.end:
            return False
        # The same last batch: high_watermark compares those before it.
        last = log.batch_ending_at(truth.end)
        return last is truth.batches[-1] or (last is None and log.start_offset >= truth.end)

    # ---- the tree ----

    def written(self, path: str, node: Any, session: Session | None) -> None:
        """A commit changed a path of the tree."""
        if path.endswith("/state") and node is not None:
            parts = path.split("/")
            key = parts[3], int(parts[5])
            self._state_written(key, LeaderAndIsr.decode(node[0], node[1]))
        elif path == "/brokers/topics/t" and node is not None:
            before, self.assignments = self.assignments, TopicImage.decode(node[0], node[1])
            for number, assignment in self.assignments.partitions.items():
                was = None if before is None else before.partitions[number]
                if was is not None and was.moving and not assignment.moving:
                    done = assignment.replicas == was.target
                    self.world.mark("reassigned" if done else "move cancelled")
        elif path == CONTROLLER_EPOCH:
            epoch = int(node[0])
            if epoch in self._controllers:
                raise Violation("I16", f"controller epoch {epoch} was won twice")
            self._controllers[epoch] = session

    def _state_written(self, key: Key, state: LeaderAndIsr) -> None:
        world = self.world
        before = self.states.get(key)
        self.states[key] = state
        world.note("state of", key, state)
        truth = self.truths[key]
        if before is not None:
            if state.leader_epoch < before.leader_epoch:
                raise Violation("I2", f"the leader epoch of {key} went back: {before} {state}")
            if state.leader_epoch == before.leader_epoch and (
                state.leader != before.leader
                or state.leader_broker_epoch != before.leader_broker_epoch
            ):
                raise Violation("I1", f"{key} has another leader in one epoch: {before} {state}")
            if state.leader_epoch > before.leader_epoch:
                self._count_election(before, state)
        if len(state.isr) < state.min_isr:
            world.mark("isr below minimum")
        if state.elr:
            world.mark("elr")
        members = {*state.isr, *state.elr}
        known = {*before.isr, *before.elr} if before is not None else members
        # A lossy replica that left both sets must be complete before it is taken in again.  One
        # whose last life is taken in after its crash is still lossy.
        truth.lossy -= {node for node in members - known if self._is_whole(node, key)}
        self._check_members(key, state, "I4 StrongIsr")

    def _is_whole(self, node: int, key: Key) -> bool:
        found = self.world.nodes[node]
        log, shell = found.disk.logs.get(key), found.shells.get(key)
        return (
            not found.disk.lossy
            and log is not None
            and not log.damaged
            and (shell is None or not shell.machine.offline)
        )

    def _count_election(self, before: LeaderAndIsr, state: LeaderAndIsr) -> None:
        world = self.world
        if state.leader == NO_LEADER:
            world.mark("leaderless")
        elif state.leader != before.leader:
            world.mark("leader change")
            if state.leader in before.elr:
                world.mark("elected from elr")
        elif state.leader_broker_epoch != before.leader_broker_epoch:
            world.mark("restarted leader")

    def applied(self) -> None:
        """A commit is done: check what holds for every state of the tree (I2)."""
        if self.assignments is None:
            return
        for key, state in self.states.items():
            try:
                state.check(self.assignments.partitions[key[1]].replicas)
            except AssertionError as error:
                raise Violation("I2 LeaderInIsr, ValidControllerIsrAndElr", str(error)) from None

    def _check_members(self, key: Key, state: LeaderAndIsr, name: str) -> None:
        truth = self.truths[key]
        for node in (*state.isr, *state.elr):
            if node not in truth.lossy and not self.holds(node, key):
                raise Violation(
                    name,
                    f"node {node} of {key} misses committed records: truth ends at {truth.end}, "
                    f"its log is {self.log_of(node, key)}, the state is {state}",
                )

    def _epoch(self, key: Key) -> int:
        return self.states[key].leader_epoch

    # ---- replicas ----

    def seen(self, shell: PartitionShell, view: LeaderAndIsr) -> None:
        """A node has seen a state (I14)."""
        assert shell.node.session is not None
        at = (shell.node.id, shell.node.session.number, shell.key)
        if view.version < self.views.get(at, -1):
            raise Violation("I14 MetadataLogMatching", f"the view of {shell} went back to {view}")
        self.views[at] = view.version

    def became_leader(self, shell: PartitionShell) -> None:
        """A node begins to lead (I1, I3)."""
        leader = shell.machine.leader
        assert leader is not None
        epoch, me = leader.view.leader_epoch, (shell.node.id, leader.broker_epoch)
        truth = self.truths[shell.key]
        if truth.epochs.setdefault(epoch, me) != me:
            raise Violation("I1", f"epoch {epoch} of {shell.key}: {truth.epochs[epoch]} and {me}")
        self.world.note(shell, "leads in epoch", epoch, "from", leader.end, "hw", leader.hw)
        state = self.states[shell.key]
        # A lossy node leads only in an election of its life before the loss, which it does not see.
        if epoch == state.leader_epoch:
            log = shell.log
            if log.end_offset < truth.end or (
                truth.end
                and log.start_offset < truth.end
                and log.batch_ending_at(truth.end) is not truth.batches[-1]
            ):
                raise Violation(
                    "I3 LeaderCompleteness",
                    f"{shell} leads in epoch {epoch} with {log}; truth ends at {truth.end}",
                )

    def high_watermark(self, shell: PartitionShell, offset: int) -> None:
        """A replica shows records to its readers (I5 to I8)."""
        truth, log = self.truths[shell.key], shell.log
        leader = shell.machine.leader
        if offset < shell.shown:
            raise Violation("I8", f"{shell}: the high watermark went back to {offset}")
        shell.shown = offset
        if offset > log.end_offset:
            raise Violation("I8", f"{shell}: high watermark {offset} is above the end of {log}")
        if offset > truth.end:
            if leader is None:
                raise Violation("I7", f"follower {shell} shows {offset}, truth ends at {truth.end}")
            self._commit(shell, truth, offset)
        else:
            last = log.batch_ending_at(offset)
            if last is not None and truth.ends.get(offset) is not last:
                raise Violation(
                    "I7 LogMatching",
                    f"{shell}: {last} below the high watermark {offset}, truth has "
                    f"{truth.ends.get(offset)}",
                )
        # A deposed leader may learn late what the next one has committed.
        reigns = leader is not None and leader.view.leader_epoch == self._epoch(shell.key)
        if leader is not None and reigns and leader.is_settled and offset < truth.end:
            raise Violation("I8", f"{shell}: high watermark {offset} is below {truth.end}")

    def _commit(self, shell: PartitionShell, truth: Truth, offset: int) -> None:
        """The first leader commits batches up to an offset."""
        log, key = shell.log, shell.key
        added = log.read(truth.end, offset)
        # The batch before them must be the last one of truth.
        before = log.batch_ending_at(truth.end) if truth.end > log.start_offset else None
        if truth.end > log.start_offset and before is not truth.batches[-1]:
            raise Violation(
                "I7 LogMatching", f"{shell} commits {added} after {before}, which is no truth"
            )
        for batch in added:
            if any(value in self.failed for value in batch.values):
                raise Violation("I11", f"{shell} commits {batch}, which was refused")
            truth.batches.append(batch)
            truth.ends[batch.next_offset] = batch
        truth.end = offset
        leader = shell.machine.leader
        assert leader is not None
        state = self.states[key]
        self._check_members(key, state, "I4 StrongIsr")
        assert self.assignments is not None
        replicas = self.assignments.partitions[key[1]].replicas
        for node in leader.view.isr:
            # One that was reassigned away has set its log aside.
            if node in replicas and node not in truth.lossy and not self.holds(node, key):
                raise Violation(
                    "I5 WeakIsr",
                    f"{shell} commits up to {offset}; node {node} of its in-sync set has "
                    f"{self.log_of(node, key)}",
                )
        if leader.view.leader_epoch == state.leader_epoch:
            maximal = leader.maximal_isr
            if not {*state.isr, *state.elr} <= maximal:
                raise Violation(
                    "I6 ReplicationQuorumSuperset",
                    f"{shell} commits with {sorted(maximal)}, the state is {state}",
                )

    def truncating(self, shell: PartitionShell, offset: int) -> None:
        """A follower cuts its log (I13)."""
        log, world = shell.log, self.world
        truth = self.truths[shell.key]
        if offset < log.end_offset:
            world.mark("truncation")
            world.note(shell, "cuts", log, "at", offset)
            follower = shell.machine.follower
            assert follower is not None
            epoch = follower.view.leader_epoch if follower.view is not None else -1
            at = shell.node.id * 100_000 + epoch
            truth.rounds[at] = truth.rounds.get(at, 0) + 1
            if truth.rounds[at] > 1:
                world.mark("truncation rounds")
        if offset < shell.machine.high_watermark:
            raise Violation("I13", f"{shell} cuts {log} at {offset}, below its high watermark")

    def fetching(self, node: SimulatedNode, leader: int, rows: list[tuple[Key, Offer]]) -> None:
        """A node sends a fetch (I15)."""
        for key, offer in rows:
            shell = node.shells[key]
            if shell.machine.leader is not None or shell.fetched_from != leader:
                raise Violation("I15 ValidFetcherState", f"{shell} fetches from {leader}: {offer}")

    # ---- clients ----

    def acknowledging(self, shell: PartitionShell, wait: Wait) -> None:
        """A leader acknowledges a batch (I12)."""
        if wait.acks != -1:
            return
        key, leader = shell.key, shell.machine.leader
        if leader is None:
            raise Violation("I12", f"{shell} acknowledges without leading")
        batch = shell.log.batch_ending_at(wait.end)
        copies = 0
        for node in self.world.nodes.values():
            log = node.disk.logs.get(key)
            if log is None or log.damaged:
                continue
            end = log.durable_offset if node.disk.fsync else log.end_offset
            if end >= wait.end and (batch is None or log.batch_ending_at(wait.end) is batch):
                copies += 1
        lost = len(self.truths[key].lossy)
        if copies + lost < leader.view.min_isr:
            raise Violation(
                "I12", f"{shell} acknowledges {batch} with {copies} copies: {leader.view}"
            )

    def outcome(self, pending: Pending, outcome: str, offset: int, acks: int) -> None:
        """A send of a client has an outcome (I10, I11)."""
        key = pending.key
        truth = self.truths[key]
        self.world.mark({"ok": "acknowledged", "fail": "refused"}.get(outcome, "indeterminate"))
        if outcome == "ok" and acks == -1:
            batch = truth.ends.get(offset + len(pending.values))
            if batch is None or batch.values != pending.values:
                raise Violation(
                    "I10 NoCommittedRecordLost",
                    f"{pending.values} was acknowledged at {offset} of {key}, truth has {batch}",
                )
        elif outcome == "fail":
            self.failed.update(pending.values)
            for value in pending.values:
                if any(value in batch.values for batch in truth.batches):
                    raise Violation("I11", f"{value} was refused and is committed in {key}")

    def consumed(self, key: Key, batches: tuple[Batch, ...]) -> None:
        """A consumer got batches (I9)."""
        truth = self.truths[key]
        for batch in batches:
            if truth.ends.get(batch.next_offset) is not batch:
                raise Violation("I9 ConsistentRead", f"a consumer got {batch}, which is no truth")

    # ---- coverage ----

    def answered(self, shell: PartitionShell, answer: Fetched) -> None:
        """A follower has an answer."""
        if answer.code:
            self.world.mark(f"F5 {answer.code}")
        elif answer.diverging is not None:
            self.world.mark("F4")

    def judged(self, verdict: FetchVerdict) -> None:
        """A leader judged a fetch."""
        if verdict.code:
            self.world.mark(f"L5 {verdict.code}")
        elif verdict.diverging is not None:
            self.world.mark("L5 diverging")

    def decided(self, tag: Decided) -> None:
        """A decision of the controller is committed."""
        self.world.mark(_row_of(tag.reason))

    # ---- the end ----

    def unsettled(self) -> str:
        """Return what is not as it must be at the end, or an empty string (I18)."""
        world = self.world
        if self.assignments is None:
            return "there is no topic"
        for path in (REASSIGN, PREFERRED):
            if path in world.tree.nodes:
                return f"{path} is left"
        for key in world.keys:
            state = self.states.get(key)
            assignment = self.assignments.partitions[key[1]]
            if state is None or state.leader == NO_LEADER:
                return f"{key} has no leader: {state}"
            if assignment.moving or set(state.isr) != set(assignment.replicas) or state.elr:
                return f"{key} is not in sync: {state} {assignment}"
            shell = world.nodes[state.leader].shells.get(key)
            leader = shell.machine.leader if shell is not None else None
            if shell is None or leader is None or leader.is_changing or shell.waits:
                return f"the leader of {key} is not idle: {state}"
            for node in assignment.replicas:
                replica = world.nodes[node].shells.get(key)
                if replica is None or replica.waits:
                    return f"node {node} does not have {key}, or a producer waits there"
                ends = replica.log.end_offset, replica.machine.high_watermark
                if ends != (leader.end, leader.end):
                    return f"node {node} of {key} ends at {ends}, the leader at {leader.end}"
        return ""

    def finish(self) -> None:
        """Compare all logs at the end (I7, I10, I11)."""
        world = self.world
        for key in world.keys:
            truth = self.truths[key]
            assert self.assignments is not None
            for node in self.assignments.partitions[key[1]].replicas:
                log = world.nodes[node].shells[key].log
                kept = [b for b in truth.batches if b.next_offset > log.start_offset]
                mine = [b for b in log.batches if b.next_offset > log.start_offset]
                if kept != mine:
                    raise Violation(
                        "I7 LogMatching", f"node {node} of {key} has {mine}, truth is {kept}"
                    )
            values = [value for batch in truth.batches for value in batch.values]
            if len(values) != len(set(values)):
                raise Violation("I10", f"a value is twice in {key}")
            refused = self.failed.intersection(values)
            if refused:
                raise Violation("I11", f"{sorted(map(str, refused))} was refused, and is in {key}")


_ROWS = (
    ("is new", "R2"),
    ("may miss", "R3"),
    ("cannot lead", "R4"),
    ("had no leader", "R4"),
    ("no replica in sync", "R4 none"),
    ("wants to lead nothing", "R5"),
    ("are not registered", "R6"),
    ("move", "R7"),
    ("min.insync.replicas", "R8"),
    ("were removed", "R9"),
    ("preferred leader", "R10"),
    ("lossy is handled", "lossy handled"),
)


def _row_of(reason: str) -> str:
    return next((row for words, row in _ROWS if words in reason), reason)
