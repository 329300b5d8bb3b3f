"""The functions through which partitions and the disk reserve reach other parts of their store.

Each refers to its store or table weakly: a partition that outlives its store does not keep the
store open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from logstore.partition.durability import Durability
from logstore.root.checkpoints import TopicPartition
from logstore.store.topic_table import TopicTable

if TYPE_CHECKING:
    from logstore.store.store import Store

__all__ = ["TransactionCheck", "check_transaction_of", "reclaimable_of", "suspect_others_of"]

# Raises unless the producer (id, epoch) has a transaction open in the partition.
TransactionCheck = Callable[["Store", int, int, TopicPartition], None]


def suspect_others_of(table: TopicTable) -> Callable[[Durability], None]:
    """Return what a partition calls after a failed fsync.

    Every other open partition then ends its next append with an fsync: the files of all may be on
    the device that failed.
    """
    weak = weakref.ref(table)

    def suspect(failed: Durability) -> None:
        held = weak()
        for partition in [] if held is None else held.opened_partitions():
            # Only sets a flag, without `view.lock`: this thread holds the turn to sync of the
            # failed log.
            durability = partition.parts.active.durability
            if durability is not failed and not partition.closed and not partition.readonly:
                durability.suspect()

    return suspect


def reclaimable_of(table: TopicTable) -> Callable[[], int]:
    """Return what the reserve calls to learn how many bytes retention could free."""
    weak = weakref.ref(table)

    def reclaimable() -> int:
        held = weak()
        # Open ones only: to open a partition may need space, and the disk is full.
        partitions = [] if held is None else held.opened_partitions()
        return sum(p.parts.cutter.reclaimable_bytes() for p in partitions if not p.closed)

    return reclaimable


def check_transaction_of(
    store: Store, check: TransactionCheck, where: TopicPartition
) -> Callable[[int, int], None]:
    """Return what a partition calls before it appends a raw batch of a transaction."""
    weak = weakref.ref(store)

    def check_transaction(producer_id: int, producer_epoch: int) -> None:
        held = weak()
        if held is not None:
            check(held, producer_id, producer_epoch, where)

    return check_transaction
