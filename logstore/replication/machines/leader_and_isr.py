"""LeaderAndIsr: who leads a partition and who is in sync, as the metadata tree has it.

The state changes only by the transitions below.  The leader of a partition uses `without` and
`with_member`; the controller uses all of them.  Each writes the result conditionally on `version`.

`elr` has the nodes that are out of the in-sync set and still have every committed record.  The
high watermark moves only while the in-sync set has `min_isr` members.  So a member that leaves a
set that becomes smaller than `min_isr` cannot miss a committed record, until the set has `min_isr`
members again: then `elr` is emptied in the same write.

`min_isr` is part of the state and is not looked up in the settings: leader and controller could
otherwise disagree for a moment about a setting that is being changed.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["NO_LEADER", "LeaderAndIsr"]

NO_LEADER = -1


class LeaderAndIsr(NamedTuple):
    """The state of one partition; frozen."""

    version: int  # of the path in the tree: a condition of the next write
    leader: int
    leader_epoch: int
    leader_broker_epoch: int  # of the leader's registration: a restarted leader does not lead
    isr: tuple[int, ...]
    elr: tuple[int, ...] = ()
    min_isr: int = 1
    controller_epoch: int = 0
    recovering: bool = False  # the leader was elected although it may miss committed records
    last_known: tuple[int, ...] = ()  # who was in sync before all of them lost records

    def check(self, replicas: Collection[int]) -> None:
        """Assert what holds for every state of a partition with these replicas."""
        assert not set(self.isr) & set(self.elr), self
        assert set(self.isr) | set(self.elr) <= set(replicas), (self, replicas)
        assert not self.elr or len(self.isr) < self.min_isr, self
        assert self.leader == NO_LEADER or self.leader in self.isr, self
        assert (self.leader == NO_LEADER) == (self.leader_broker_epoch == -1), self

    # ---- transitions ----

    def without(self, gone: Collection[int], lossy: Collection[int] = ()) -> LeaderAndIsr:
        """Remove members from the in-sync set.  Those in `lossy` may miss committed records."""
        isr = tuple(node for node in self.isr if node not in gone)
        elr: tuple[int, ...] = ()
        if len(isr) < self.min_isr:
            left = (node for node in self.isr if node in gone)
            elr = tuple(node for node in (*self.elr, *left) if node not in lossy)
        return self._replace(isr=isr, elr=elr)

    def with_member(self, node: int) -> LeaderAndIsr:
        """Add a member to the in-sync set."""
        isr = self.isr if node in self.isr else (*self.isr, node)
        return self._replace(isr=isr, elr=self._elr_beside(isr), recovering=False)

    def led_by(self, node: int, broker_epoch: int) -> LeaderAndIsr:
        """Elect a leader.  One from neither set is alone in sync: an unclean election."""
        unclean = node not in self.isr and node not in self.elr
        if unclean:
            isr: tuple[int, ...] = (node,)
        else:
            isr = self.isr if node in self.isr else (*self.isr, node)
        return self._replace(
            leader=node,
            leader_epoch=self.leader_epoch + 1,
            leader_broker_epoch=broker_epoch,
            isr=isr,
            elr=() if unclean else self._elr_beside(isr),
            recovering=unclean,
            last_known=(),
        )

    def leaderless(self) -> LeaderAndIsr:
        """Take the leadership away."""
        return self._replace(
            leader=NO_LEADER, leader_epoch=self.leader_epoch + 1, leader_broker_epoch=-1
        )

    def with_minimum(self, min_isr: int) -> LeaderAndIsr:
        """Use another `min.insync.replicas`."""
        return self._replace(min_isr=min_isr, elr=() if len(self.isr) >= min_isr else self.elr)

    def within(self, replicas: Collection[int]) -> LeaderAndIsr:
        """Keep only members of a new assignment.  The epoch grows: progress is counted again."""
        return self._replace(
            isr=tuple(node for node in self.isr if node in replicas),
            elr=tuple(node for node in self.elr if node in replicas),
            leader_epoch=self.leader_epoch + 1,
        )

    def _elr_beside(self, isr: tuple[int, ...]) -> tuple[int, ...]:
        if len(isr) >= self.min_isr:
            return ()
        return tuple(node for node in self.elr if node not in isr)

    # ---- Kafka's JSON ----

    def encode(self) -> bytes:
        """Return the contents of the path `.../state`.  Ours is below the key `logstore`."""
        ours: dict[str, object] = {
            "leader_broker_epoch": self.leader_broker_epoch,
            "elr": self.elr,
            "min_isr": self.min_isr,
        }
        if self.last_known:
            ours["last_known"] = self.last_known
        fields: dict[str, object] = {
            "version": 1,
            "leader": self.leader,
            "leader_epoch": self.leader_epoch,
            "controller_epoch": self.controller_epoch,
            "isr": self.isr,
        }
        if self.recovering:
            fields["leader_recovery_state"] = 1
        return json.dumps({**fields, "logstore": ours}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, version: int) -> LeaderAndIsr:
        """Parse the contents of a path; raise ValueError if they are not a state."""
        try:
            fields = json.loads(data)
            ours = fields.get("logstore", {})
            return cls(
                version=version,
                leader=int(fields["leader"]),
                leader_epoch=int(fields["leader_epoch"]),
                leader_broker_epoch=int(ours.get("leader_broker_epoch", -1)),
                isr=tuple(map(int, fields["isr"])),
                elr=tuple(map(int, ours.get("elr", ()))),
                min_isr=int(ours.get("min_isr", 1)),
                controller_epoch=int(fields.get("controller_epoch", 0)),
                recovering=bool(fields.get("leader_recovery_state", 0)),
                last_known=tuple(map(int, ours.get("last_known", ()))),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the state of a partition: {data[:200]!r}") from error
