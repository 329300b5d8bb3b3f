"""Controller: the one node that elects leaders and moves replicas.

A node becomes the controller by creating ``/controller`` and raising ``/controller_epoch`` in one
commit.  Every write checks that epoch, so the write of a node that is not the controller any more
is refused as a whole.  The controller keeps no state of the cluster: it decides from the image, and
decides a partition again after each change that concerns it.

A machine without I/O: `step` returns commits, and the owner calls `decided` with each outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from logstore.replication.machines.decisions import (
    Decision,
    decide,
    deletion,
    holds_damaged,
    is_move_done,
    preferred_imbalance,
)
from logstore.replication.machines.image import (
    CONTROLLER,
    CONTROLLER_EPOCH,
    PREFERRED,
    REASSIGN,
    ClusterImage,
    Key,
    as_json,
    broker_path,
    epoch_path,
    topic_path,
)
from logstore.replication.machines.throttle import end_throttle
from logstore.replication.metadata import (
    Check,
    Commit,
    Committed,
    Create,
    Delete,
    Op,
    Outcome,
    Refused,
    Set,
)

__all__ = ["Controller", "Decided"]

UNDER_WAY_MAX = 500  # commits without an answer


class Decided(NamedTuple):
    """The tag of a commit: what is decided, and why."""

    subject: Key | str  # a partition's key; a path
    reason: str
    epoch: int = -1  # the controller epoch in which it was decided


class Controller:
    """Campaigns for the controllership; decides while it has it."""

    __slots__ = (
        *("_campaigning", "_dirty", "_elections", "_lost_version", "_under_way", "_won_version"),
        *("active", "epoch", "imbalance", "incarnation", "me"),
    )

    def __init__(self, me: int, incarnation: str, imbalance: float = 0.1) -> None:
        self.me = me
        self.incarnation = incarnation  # tells our registration from one of an earlier life
        self.imbalance = imbalance  # share of partitions led elsewhere that `balance` accepts
        self.active = False
        self.epoch = -1
        self._won_version = -1
        self._lost_version = -1  # of the controller epoch that was found to be over
        self._campaigning: Commit | None = None
        self._dirty: dict[Key, None] = {}  # partitions to decide, in the order of the changes
        self._elections: dict[Key, int | None] = {}  # asked for: a node: unclean; None: preferred
        self._under_way: set[Key | str] = set()

    # ---- the campaign ----

    def campaign(self, image: ClusterImage, now: int) -> Commit | None:
        """Return the commit that makes this node the controller, if there is none."""
        if self.active or self._campaigning is not None:
            return None
        if image.controller is not None:
            # Ours although this node resigned: it read the two paths of one commit one by one.
            if self.is_ours(image) and image.controller_epoch_version > self._lost_version:
                self._win(image.controller_epoch, image.controller_epoch_version, image)
            return None
        fields = {
            "version": 1,
            "brokerid": self.me,
            "timestamp": str(now),
            "logstore": {"incarnation": self.incarnation},
        }
        epoch = image.controller_epoch + 1
        version = image.controller_epoch_version
        raised: Op = (
            Set(CONTROLLER_EPOCH, str(epoch).encode(), version)
            if version >= 0
            else Create(CONTROLLER_EPOCH, str(epoch).encode())
        )
        ops = (Create(CONTROLLER, as_json(fields), ephemeral=True), raised)
        self._campaigning = Commit(ops, Decided(CONTROLLER, f"controller epoch {epoch}"))
        return self._campaigning

    def campaigned(self, outcome: Outcome, image: ClusterImage) -> None:
        """The campaign has an outcome; the image has the tree after it.

        If the answer was lost, the tree shows whether it was won.
        """
        commit, self._campaigning = self._campaigning, None
        if commit is None:
            return
        raised = commit.ops[1]
        assert isinstance(raised, Set | Create)
        epoch = int(raised.data)
        if isinstance(outcome, Committed):
            self._win(epoch, outcome.versions[1], image)
        elif (
            not isinstance(outcome, Refused)
            and self.is_ours(image)
            and image.controller_epoch == epoch
        ):
            self._win(epoch, image.controller_epoch_version, image)

    def is_ours(self, image: ClusterImage) -> bool:
        """Return whether the tree names this life of this node as the controller."""
        found = image.controller
        return (
            found is not None
            and found.get("brokerid") == self.me
            and found.get("logstore", {}).get("incarnation") == self.incarnation
        )

    def _win(self, epoch: int, version: int, image: ClusterImage) -> None:
        self.active = True
        self.epoch = epoch
        self._won_version = version
        self._under_way.clear()
        self.touched(None, image)

    def resign(self) -> None:
        """Stop deciding: the session is lost, or another node is the controller."""
        self.active = False
        self._campaigning = None
        self._dirty.clear()
        self._elections.clear()
        self._under_way.clear()

    # ---- deciding ----

    def touched(self, keys: Iterable[Key] | None, image: ClusterImage) -> None:
        """Decide these partitions again; None: all."""
        if not self.active:
            return
        # A controller path that was deleted by hand moves the controllership.
        if not self.is_ours(image) and image.controller_epoch >= self.epoch:
            self.resign()
            return
        self._dirty.update(dict.fromkeys(image.keys() if keys is None else keys))

    def balance(self, image: ClusterImage) -> None:
        """Ask for preferred elections for the nodes that lead too few of their partitions."""
        keys = image.keys()
        shares = preferred_imbalance(image, keys)
        for key in keys:
            assignment = image.assignment(key)
            if assignment is not None and shares.get(assignment.replicas[0], 0) > self.imbalance:
                self._elections.setdefault(key, None)
                self._dirty[key] = None

    def step(self, image: ClusterImage) -> list[Commit]:
        """Return the commits that are to be made now."""
        if not self.active:
            return []
        commits = []
        for subject, decision in self._decisions(image):
            if len(self._under_way) >= UNDER_WAY_MAX:
                break
            if subject in self._under_way:
                continue
            self._under_way.add(subject)
            check = Check(CONTROLLER_EPOCH, self._won_version)
            tag = Decided(subject, decision.reason, self.epoch)
            commits.append(Commit((check, *decision.ops), tag))
        return commits

    def _decisions(self, image: ClusterImage) -> Iterator[tuple[Key | str, Decision]]:
        self._read_elections(image)
        for topic in list(image.deleting):
            found = deletion(image, topic)
            if found is not None:
                yield topic_path(topic), found
        busy: set[str] = set()
        for key in list(self._dirty):
            if key in self._under_way:
                continue  # decided again after its outcome
            preferred = key in self._elections
            decision = decide(image, key, preferred=preferred, unclean=self._elections.get(key))
            if decision is not None:
                # Two writes of one topic's assignment would refuse each other.
                writes_topic = isinstance(decision.ops[0], Set)
                if writes_topic and key[0] in busy:
                    continue
                if writes_topic:
                    busy.add(key[0])
                yield key, decision
            else:
                self._elections.pop(key, None)
            if len(self._under_way) < UNDER_WAY_MAX:
                self._dirty.pop(key, None)
        yield from self._cleared(image)

    def _cleared(self, image: ClusterImage) -> Iterator[tuple[Key | str, Decision]]:
        """End what is done: marks of lossy nodes, and requests."""
        for node in image.nodes.values():
            if node.lossy and not any(holds_damaged(image, key, node.id) for key in image.states):
                data = node._replace(lossy=False).encode()
                path = broker_path(node.id)
                # The versions of a registration start again with each life of the node.
                same = Check(epoch_path(node.id), node.epoch)
                yield path, Decision((same, Set(path, data, node.version)), "lossy is handled")
        if image.reassign is not None and not self._dirty:
            rows = image.reassign[0].get("partitions", ())
            if all(is_move_done(image, (row["topic"], row["partition"])) for row in rows):
                gone = Delete(REASSIGN, image.reassign[1])
                yield REASSIGN, Decision((gone, *end_throttle(image)), "every move is done")
        if image.preferred is not None and not self._elections:
            gone = Delete(PREFERRED, image.preferred[1])
            yield PREFERRED, Decision((gone,), "every election is done")

    def _read_elections(self, image: ClusterImage) -> None:
        if image.preferred is None or PREFERRED in self._under_way:
            return
        for row in image.preferred[0].get("partitions", ()):
            key = row["topic"], row["partition"]
            unclean = row.get("logstore", {}).get("unclean")
            if key not in self._elections and decide(image, key, preferred=True, unclean=unclean):
                self._elections[key] = unclean
                self._dirty[key] = None

    def decided(self, tag: object, outcome: Outcome, image: ClusterImage) -> None:
        """A commit has an outcome.  The partition is decided again, whatever it is."""
        if not isinstance(tag, Decided) or tag.subject not in self._under_way:
            return
        if tag.epoch != self.epoch:
            return  # of an earlier time as the controller: its refusal does not end this one
        self._under_way.discard(tag.subject)
        if isinstance(outcome, Refused) and outcome.op == 0:
            self._lost_version = self._won_version
            self.resign()  # another node was elected as the controller
            return
        if not isinstance(tag.subject, str):
            self._dirty[tag.subject] = None
