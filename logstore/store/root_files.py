"""The files of a root directory, before a store becomes its owner."""

from __future__ import annotations

from logstore.errors import (
    NotALogError,
)
from logstore.files.directory import Directory
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.log.segment_digest import DIGEST_SUFFIX
from logstore.log.state import CleanerCheckpoint, DurableMark, PartitionState
from logstore.root.catalogue import (
    Catalogue,
    is_deleted,
    partition_directories,
)
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.root.checkpoints import CHECKPOINTS
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.producer_ids import ProducerIds

__all__ = ["forget_state", "refuse_foreign", "sweep_temporary"]


def forget_state(directory: Directory) -> None:
    """Delete logstore's own side files of a partition: a broker has changed its log since."""
    directory.unlink(PartitionState.NAME)
    directory.unlink(DurableMark.NAME)
    directory.unlink(CleanerCheckpoint.NAME)
    for name in directory.names():
        if name.endswith(DIGEST_SUFFIX):
            directory.unlink(name)
    directory.sync()


def refuse_foreign(directory: Directory) -> None:
    """Raise NotALogError if the directory is not a store's.  Called before any file is created."""
    names = directory.names()
    known = {NodeIdentity.NAME, Catalogue.NAME, CheckpointTwin.NAME, *CHECKPOINTS}
    if known & set(names):
        return
    if any(name.endswith(".log") and name[:-4].isdigit() for name in names):
        raise NotALogError(
            f"{directory.path} is a partition, not a store: open the directory above it, or this "
            f"one with Partition.open"
        )
    for name in sorted(names):
        there = partition_directories([name]) or is_deleted(name) or name.endswith(".tmp")
        if not there and not name.startswith(".") and name not in ("lost+found", RESERVE_NAME):
            raise NotALogError(
                f"{directory.path} is not a store: it holds {name!r}; choose an empty or a new "
                f"directory"
            )


def sweep_temporary(directory: Directory) -> None:
    """Remove the temporary files of writes that a crash interrupted."""
    ours = (NodeIdentity.NAME, Catalogue.NAME, ProducerIds.NAME, CheckpointTwin.NAME)
    names = (*CHECKPOINTS, *ours, *CleanShutdown.NAMES)
    for name in directory.names():
        if name.endswith(".tmp") and name.startswith(names):
            directory.unlink(name)
