"""The root of a store: its own files, beside the directories of the partitions.

Kafka's: ``meta.properties`` names the node, ``.kafka_cleanshutdown`` says that the last owner
closed in order.  Ours, which a broker ignores: ``logstore.topics`` lists topics and their settings,
``logstore.clean`` is the twin of the marker and says that it was us who closed.

Invariant: the catalogue is what makes a topic exist as a whole.  Partitions that are being created
or deleted are named in it before the first of their directories appears or goes, so that a crash in
between is undone or finished by the next open.  A directory that no catalogue names is a broker's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from logstore.config import ConfigError, PartitionConfig
from logstore.errors import InvalidNameError
from logstore.files.directory import Directory
from logstore.files.names import TOPIC, parse_partition_name
from logstore.files.small_file import MISREAD
from logstore.log.topic_id import parse_uuid, uuid_text

__all__ = ["Catalogue", "TopicEntry", "partition_directories"]

# Owned by KRaft itself: never a topic.
CLUSTER_METADATA = "__cluster_metadata"
NEVER_TOPICS = (".", "..", CLUSTER_METADATA)
PARTITIONS_MAX = 1 << 16
_SET_ASIDE = re.compile(r".+-\d+\.[0-9a-f]{32}-(delete|future|stray)\Z")


def is_deleted(name: str) -> bool:
    """Whether a directory is a partition on its way out."""
    match = _SET_ASIDE.match(name)
    return match is not None and match[1] == "delete"


def partition_directories(names: list[str]) -> dict[str, list[int]]:
    """Topics and their partition numbers, in order, by the names of directories at a root.

    Left out: partitions on their way out, being moved (``-future``) or unknown to a broker's
    metadata (``-stray``), and the metadata log, which is no topic.
    """
    found: dict[str, list[int]] = {}
    for name in names:
        if "-" not in name or name.startswith(".") or _SET_ASIDE.match(name):
            continue
        try:
            topic, number = parse_partition_name(name)
        except InvalidNameError:
            continue
        if topic != CLUSTER_METADATA:
            found.setdefault(topic, []).append(number)
    for numbers in found.values():
        numbers.sort()
    return found


# ---- topics ----


@dataclasses.dataclass(frozen=True, slots=True)
class TopicEntry:
    """What is known of a topic: its id, number of partitions, settings that were asked for."""

    id: uuid.UUID
    partitions: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Partitions from this number on are being created: swept after a crash.  -1: none.
    creating_from: int = -1
    deleting: bool = False
    # Of a topic whose partitions are made on demand: those that are there.  None: all of them.
    made: tuple[int, ...] | None = None

    @property
    def numbers(self) -> Iterable[int]:
        """The partitions that must be there."""
        return range(self.partitions) if self.made is None else self.made

    def as_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"id": uuid_text(self.id), "partitions": self.partitions}
        if self.settings:
            content["config"] = dict(self.settings)
        if self.creating_from >= 0:
            content["creating_from"] = self.creating_from
        if self.deleting:
            content["deleting"] = True
        if self.made is not None:
            content["made"] = list(self.made)
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TopicEntry:
        settings = dict(content.get("config", ()))
        if settings:
            PartitionConfig.of(settings)
        entry = cls(
            parse_uuid(content["id"]),
            int(content["partitions"]),
            settings,
            int(content.get("creating_from", -1)),
            bool(content.get("deleting", False)),
            tuple(int(number) for number in content["made"]) if "made" in content else None,
        )
        if not all(0 <= number < entry.partitions for number in entry.made or ()):
            raise ValueError(f"{entry.made} are not among {entry.partitions} partitions")
        # A broker's topic that is being deleted may have any number.
        if entry.partitions < 1 or (entry.partitions > PARTITIONS_MAX and not entry.deleting):
            raise ValueError(f"a topic has 1 to {PARTITIONS_MAX} partitions")
        if not -1 <= entry.creating_from < entry.partitions:
            raise ValueError(f"creating_from is {entry.creating_from} of {entry.partitions}")
        return entry


class Catalogue:
    """The topics of a root by name; every change is on disk before it counts."""

    NAME = "logstore.topics"

    def __init__(
        self,
        directory: Directory,
        entries: Mapping[str, TopicEntry],
        deleted: tuple[str, ...] = (),
        content: bytes | None = None,
    ) -> None:
        self._directory = directory
        self._content = content  # of the file; None: there is no file
        self.entries = dict(entries)
        # Topics that were deleted, and whose committed offsets are still to go.
        self.deleted = deleted

    @classmethod
    def read(cls, directory: Directory) -> Catalogue:
        """The catalogue; an empty one when there is none.

        One that cannot be read is an error: to go on with default settings could delete records.
        """
        try:
            content = directory.read(cls.NAME, 1 << 30)
        except FileNotFoundError:
            return cls(directory, {})
        try:
            found = json.loads(content)
            topics = found["topics"]
            deleted = tuple(str(name) for name in found.get("deleted", ()))
            for name in topics:  # they become paths
                if name in NEVER_TOPICS or not TOPIC.match(name):
                    raise ValueError(f"{name!r} is not a topic's name")
            entries = {name: TopicEntry.from_json(entry) for name, entry in topics.items()}
        except MISREAD as error:
            raise ConfigError(
                f"{directory.path / cls.NAME} cannot be read ({error}): mend it, or remove it to "
                f"go on with default settings for every topic"
            ) from None
        return cls(directory, entries, deleted, content)

    def put(self, name: str, entry: TopicEntry) -> None:
        self._replace({**self.entries, name: entry}, self.deleted)

    def remove(self, name: str) -> None:
        left = {other: entry for other, entry in self.entries.items() if other != name}
        self._replace(left, self.deleted)

    def begin_deletion(self, name: str, entry: TopicEntry, *, noted: bool) -> None:
        """As `put`; when it is to be `noted`, the name stays in `deleted` until it is taken out."""
        deleted = (*self.deleted, name) if noted and name not in self.deleted else self.deleted
        self._replace({**self.entries, name: entry}, deleted)

    def forget_deleted(self, names: Collection[str]) -> None:
        """What depended on these topics is gone."""
        self._replace(self.entries, tuple(name for name in self.deleted if name not in names))

    def _replace(self, entries: dict[str, TopicEntry], deleted: tuple[str, ...]) -> None:
        topics = {name: entries[name].as_json() for name in sorted(entries)}
        content: dict[str, Any] = {"version": 1, "topics": topics}
        if deleted:
            content["deleted"] = list(deleted)
        encoded = json.dumps(content, indent=1).encode() + b"\n"
        try:
            self._directory.replace(self.NAME, encoded)
        except OSError:
            # If only the sync of the directory failed, the file has the new content, which the
            # caller takes to be absent.  Put the old content back.
            with contextlib.suppress(OSError):
                self._restore()
            raise
        self._content, self.entries, self.deleted = encoded, entries, deleted

    def _restore(self) -> None:
        if self._content is None:
            self._directory.unlink(self.NAME)
        elif self._directory.read(self.NAME, 1 << 30) != self._content:
            self._directory.replace(self.NAME, self._content)
