"""open: opens a store, and finishes the transactions that an ended process left open.

If the commit or abort of a transaction was decided, it is written to all its partitions; other
transactions are aborted.  After a broker owned the directory, its clients may be alive: then only
transactions that have timed out are aborted.  After a clean shutdown no transaction is open, and
none is looked for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logstore.clock import Clock
from logstore.config import PartitionConfig
from logstore.coordinators.internal_topics import TRANSACTION_STATE
from logstore.errors import ClusterMemberError, LogStoreError
from logstore.files.disk_reserve import STORE_RESERVE_BYTES
from logstore.partitioner import Partitioner
from logstore.recovery.report import RecoveryProgress
from logstore.root.member import ClusterMember
from logstore.store.store import Store, open_store

__all__ = ["open", "open_member"]

log = logging.getLogger("logstore.store")


def open(
    path: str | os.PathLike[str],
    *,
    readonly: bool = False,
    create: bool = True,
    durability: str = "fsync",
    config: PartitionConfig | Mapping[str, Any] | None = None,
    clock: Clock | None = None,
    partitioner: Partitioner | None = None,
    progress: RecoveryProgress | None = None,
    reserve_bytes: int = STORE_RESERVE_BYTES,
    allow_unsafe_fs: bool = False,
) -> Store:
    """Open a directory of topics, creating it if it is missing.

    `config` has the settings of topics without their own.  `partitioner` chooses partitions for all
    topics.  Both are not stored.  `progress` is called with (bytes checked, bytes found so far)
    while partitions are recovered after a crash, from several threads.  `reserve_bytes` of the disk
    are kept for deleting, closing and recovering when the disk is full.

    Raises LockedError if another process, store, partition or broker writes there,
    FileNotFoundError if the directory is missing and ``create=False`` or ``readonly=True``,
    NotALogError if the directory is not a store's, UnsafeFileSystemError on a network file system
    unless ``allow_unsafe_fs=True``, and ClusterMemberError if it belongs to a node of a cluster and
    is not opened readonly.
    """
    if not readonly:
        _refuse_member(path)
    store = open_store(Path(path), readonly=readonly, create=create, durability=durability,
                       config=config, clock=clock, partitioner=partitioner,
                       progress=progress, reserve_bytes=reserve_bytes,
                       allow_unsafe_fs=allow_unsafe_fs,
                       check_transaction=_check_transaction)  # fmt: skip
    try:
        foreign = store.recovery.foreign
        if not readonly and TRANSACTION_STATE in store and (foreign or not store.recovery.clean):
            _finish_transactions(store, abort_ongoing=not foreign)
    except BaseException:
        store.close()
        raise
    return store


def _refuse_member(path: str | os.PathLike[str]) -> None:
    member = ClusterMember.read(path)
    if member is not None:
        raise ClusterMemberError(
            *member,
            "what is written here without the cluster is cut when the node starts again.  Start it "
            f"with `logstore serve --node {member.node_id} --zookeeper ...`, read it with "
            f"readonly=True, or make it a store of its own with `logstore cluster leave -s {path}`",
            where=str(path),
        )


def open_member(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    durability: str = "fsync",
    config: PartitionConfig | Mapping[str, Any] | None = None,
    progress: RecoveryProgress | None = None,
) -> Store:
    """Open the store of a node of a cluster; see `open`.

    Transactions stay open: the cluster's coordinators end them.
    """
    return open_store(Path(path), readonly=False, create=create, durability=durability,
                      config=config, clock=None, partitioner=None, progress=progress,
                      reserve_bytes=STORE_RESERVE_BYTES, allow_unsafe_fs=False)  # fmt: skip


def _check_transaction(
    store: Store, producer_id: int, producer_epoch: int, where: tuple[str, int]
) -> None:
    from logstore.coordinators.transaction_coordinator import Transactions

    Transactions.of(store).verify(producer_id, producer_epoch, where)


def _finish_transactions(store: Store, *, abort_ongoing: bool) -> None:
    from logstore.coordinators.transaction_coordinator import Transactions

    # As with a partition that cannot be opened, the rest of the store can be used.  While `failed`
    # is not empty, close() writes no marker of a clean shutdown: the next open tries again.
    failed: dict[str, BaseException] = {}
    try:
        transactions = Transactions.of(store)
        for number, error in transactions.unreadable.items():
            failed[f"{TRANSACTION_STATE}-{number}"] = error
        concerned = transactions.recover(abort_ongoing=abort_ongoing)
    except (LogStoreError, OSError) as error:
        failed[TRANSACTION_STATE] = error
    else:
        if concerned:
            log.info("finished or aborted transactions of %s", ", ".join(concerned))
    for name, fault in failed.items():
        store.recovery.failed.setdefault(name, fault)
        log.warning("%s: transactions could not be finished: %s; the next open tries again",
                    name, str(fault))  # fmt: skip
