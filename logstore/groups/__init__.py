"""Consumer groups, and the consumers in them.

protocol: what members tell each other.  assignors: who reads what.
machine: one group, without any I/O.  coordinator: the groups of a store.
membership: a consumer's side of its group.  source: one partition as a consumer reads it.
consumer, async_consumer: what reads.  bell: what wakes it.
lag: how far behind.  administration: groups seen from outside.
"""

from logstore.groups.administration import (
    GroupDescription,
    GroupMemberDescription,
    Groups,
    OffsetReset,
)
from logstore.groups.assignors import ASSIGNORS, Assignor, GroupMember
from logstore.groups.async_consumer import AsyncConsumer
from logstore.groups.consumer import ConsumedRecord, Consumer, ReceivedRecord
from logstore.groups.coordinator import GroupCoordinator
from logstore.groups.lag import Lag
from logstore.groups.machine import GroupConfig, GroupMachine, GroupState, Transition

__all__ = [
    "ASSIGNORS",
    "Assignor",
    "AsyncConsumer",
    "ConsumedRecord",
    "Consumer",
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
    "ReceivedRecord",
    "Transition",
]
