"""RootInspection: checks the files of a store's root and lists the problems.

It writes nothing and takes no lock.  `partition_check` checks the files of the partitions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from logstore.checking.partition_check import RECEIPT
from logstore.checking.problem import Problem, ProblemKind
from logstore.errors import LogStoreError, NotALogError
from logstore.files.directory import Directory
from logstore.files.disk_reserve import RESERVE_NAME
from logstore.files.lock import DirectoryLock, has_writer
from logstore.log.topic_id import PARTITION_METADATA, read_topic_id
from logstore.root.catalogue import Catalogue, TopicEntry, is_deleted, partition_directories
from logstore.root.checkpoint_twin import CheckpointTwin
from logstore.root.checkpoints import CHECKPOINTS
from logstore.root.clean_shutdown import CleanShutdown
from logstore.root.identity import NodeIdentity
from logstore.root.producer_ids import ProducerIds

__all__ = ["RootInspection"]

# Files whose contents are not checked: only their type is.
_WITHOUT_CHECK = (DirectoryLock.NAME, RESERVE_NAME, ProducerIds.NAME)


class RootInspection:
    """One inspection of the root of a store."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._problems: list[Problem] = []

    def run(self) -> list[Problem]:
        """Return the problems of the root's own files."""
        # Listed once, without a lock: a file may disappear before its check, which is no problem.
        names = sorted(self._directory.names())
        entries = self._inspect_catalogue()
        self._inspect_identity()
        directories = sorted(self._directory.directories())
        self._inspect_checkpoints(has_topics=bool(partition_directories(directories)))
        self._inspect_marker()
        self._inspect_partitions(entries, directories)
        # A writer removes these when it opens the store: those that exist now are in use.
        in_use = has_writer(self._directory)
        for name in directories:
            if is_deleted(name) and self._is_left(name, in_use=in_use):
                self._note(ProblemKind.STRAY_FILE, name, "a partition that is being deleted")
        for name in names:
            if name in _WITHOUT_CHECK and not self._is_regular(name):
                self._note(ProblemKind.UNREADABLE_FILE, name, "not a regular file")
            elif name.endswith(".tmp") and self._is_left(name, in_use=in_use):
                self._note(ProblemKind.STRAY_FILE, name, "an unfinished change left it")
            elif RECEIPT.match(name):
                self._note(ProblemKind.KEPT_ASIDE, name, "the receipt of a repair")
        return self._problems

    def _note(self, kind: ProblemKind, name: str, detail: str) -> None:
        self._problems.append(Problem(kind, self._directory.path / name, detail))

    def _inspect_catalogue(self) -> Mapping[str, TopicEntry]:
        try:
            return Catalogue.read(self._directory).entries
        except LogStoreError as error:
            self._note(ProblemKind.DAMAGED_CATALOGUE, Catalogue.NAME, str(error))
        except OSError as error:
            self._note(ProblemKind.UNREADABLE_FILE, Catalogue.NAME, str(error))
        return {}

    def _inspect_identity(self) -> None:
        try:
            identity = NodeIdentity.read(self._directory)
        except NotALogError as error:
            self._note(ProblemKind.DAMAGED_IDENTITY, NodeIdentity.NAME, str(error))
            return
        except OSError as error:
            self._note(ProblemKind.UNREADABLE_FILE, NodeIdentity.NAME, str(error))
            return
        if identity is not None and (identity.node_id < 0 or not identity.cluster_id):
            self._note(
                ProblemKind.DAMAGED_IDENTITY,
                NodeIdentity.NAME,
                f"node.id {identity.node_id}, cluster.id {identity.cluster_id!r}",
            )

    def _inspect_checkpoints(self, *, has_topics: bool) -> None:
        try:
            twin = CheckpointTwin.read(self._directory)
        except OSError as error:
            self._note(ProblemKind.UNREADABLE_FILE, CheckpointTwin.NAME, str(error))
            twin = None
        if twin is not None and not twin.readable:
            self._note(ProblemKind.DAMAGED_CHECKPOINT, CheckpointTwin.NAME, "it cannot be read")
            twin = None
        if (
            twin is not None
            and twin.has_catalogue
            and has_topics
            and not self._directory.exists(Catalogue.NAME)
        ):
            self._note(
                ProblemKind.MISSING_CATALOGUE,
                Catalogue.NAME,
                f"there is no such file, but {CheckpointTwin.NAME} has a record of one",
            )
        for name in CHECKPOINTS:
            try:
                found = CheckpointTwin.reconcile(twin, self._directory, name)
            except OSError as error:
                self._note(ProblemKind.UNREADABLE_FILE, name, str(error))
                continue
            if found.fault:
                self._note(ProblemKind.DAMAGED_CHECKPOINT, name, found.fault)
            elif found.foreign:
                self._note(ProblemKind.STALE_CHECKPOINT, name, "its twin has other contents")

    def _inspect_marker(self) -> None:
        try:
            left = CleanShutdown.read(self._directory)
        except OSError as error:
            name = Path(error.filename or "").name
            self._note(ProblemKind.UNREADABLE_FILE, name, str(error))
            return
        # The next open for writing then deletes logstore's own state: see Store._take_over.
        if left.foreign:
            self._note(ProblemKind.DAMAGED_MARKER, CleanShutdown.MARKER, "its twin does not match")

    def _is_left(self, name: str, *, in_use: bool) -> bool:
        return not in_use and self._directory.exists(name)

    def _is_regular(self, name: str) -> bool:
        with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
            return self._directory.is_regular(name)
        return True

    def _inspect_partitions(
        self, entries: Mapping[str, TopicEntry], directories: list[str]
    ) -> None:
        """Check that the partitions of the catalogue exist, and have the id of their topic."""
        found = partition_directories(directories)
        for topic, entry in entries.items():
            # A topic that is being created or deleted has some of its directories only.
            if entry.deleting or entry.creating_from >= 0:
                self._note(
                    ProblemKind.UNFINISHED_PLAN,
                    Catalogue.NAME,
                    f"topic {topic!r} is being {'deleted' if entry.deleting else 'made'}",
                )
                continue
            for number in sorted(set(entry.numbers) - set(found.get(topic, ()))):
                self._note(
                    ProblemKind.MISSING_PARTITION,
                    f"{topic}-{number}",
                    f"{topic!r} has {entry.partitions} partitions in {Catalogue.NAME}",
                )
            for number in found.get(topic, ()):
                self._inspect_topic_id(f"{topic}-{number}", entry)

    def _inspect_topic_id(self, name: str, entry: TopicEntry) -> None:
        directory = self._directory.below(name)
        try:
            topic_id = read_topic_id(directory)
        except (NotALogError, OSError):
            return  # the inspection of the partition notes this problem
        finally:
            directory.close()
        if topic_id is not None and topic_id != entry.id:
            self._note(
                ProblemKind.DAMAGED_METADATA,
                f"{name}/{PARTITION_METADATA}",
                f"it names {topic_id}; the catalogue has {entry.id}",
            )
