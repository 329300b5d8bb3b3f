"""Consumer groups, and the consumers in them.

protocol: what members tell each other.  assignors: who reads what.
machine: one group, without any I/O.  coordinator: the groups of a store.
lag: how far behind.  administration: groups seen from outside.
"""

from logstore.groups.administration import (
    GroupDescription,
    GroupMemberDescription,
    Groups,
    OffsetReset,
)
from logstore.groups.assignors import ASSIGNORS, Assignor, GroupMember
from logstore.groups.coordinator import GroupCoordinator
from logstore.groups.lag import Lag
from logstore.groups.machine import GroupConfig, GroupMachine, GroupState, Transition

__all__ = [
    "ASSIGNORS",
    "Assignor",
    "GroupConfig",
    "GroupCoordinator",
    "GroupDescription",
    "GroupMachine",
    "GroupMember",
    "GroupMemberDescription",
    "GroupState",
    "Groups",
    "Lag",
    "OffsetReset",
    "Transition",
]
