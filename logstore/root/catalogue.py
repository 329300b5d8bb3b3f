"""Catalogue: the topics of a store, their ids and settings, in ``logstore.topics`` of the root.

Invariant: a topic is created and deleted as a whole.  The catalogue has the partitions that are
being created or deleted before the first of their directories is made or renamed; after a crash the
next open undoes the creation or finishes the deletion.  A partition directory whose topic is not in
the catalogue is a broker's.  A broker ignores the file.
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

# The log of KRaft's metadata: never a topic.
CLUSTER_METADATA = "__cluster_metadata"
NEVER_TOPICS = (".", "..", CLUSTER_METADATA)
PARTITIONS_MAX = 1 << 16
_SET_ASIDE = re.compile(r".+-\d+\.[0-9a-f]{32}-(delete|future|stray)\Z")


def is_deleted(name: str) -> bool:
    """Return whether a directory is a partition that is being deleted."""
    match = _SET_ASIDE.match(name)
    return match is not None and match[1] == "delete"


def stray_of(name: str) -> tuple[str, int] | None:
    """Return topic and number of a partition that was set aside as ``-stray``; None for others.

    The topic is shortened if the name of the directory would have been too long.
    """
    match = _SET_ASIDE.match(name)
    if match is None or match[1] != "stray":
        return None
    topic, _, number = name.rpartition(".")[0].rpartition("-")
    return topic, int(number)


def partition_directories(names: list[str]) -> dict[str, list[int]]:
    """Return the sorted partition numbers of each topic, from the names of directories at a root.

    Left out: partitions that are being deleted, moved (``-future``) or are not in a broker's
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
    """A topic in the catalogue: its id, number of partitions, and the settings of its own."""

    id: uuid.UUID
    partitions: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Partitions from this number on are being created: removed after a crash.  -1: none.
    creating_from: int = -1
    deleting: bool = False
    # If partitions are made on demand: those that exist.  None: all partitions exist.
    made: tuple[int, ...] | None = None

    @property
    def numbers(self) -> Iterable[int]:
        """The partitions that must exist."""
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
        # A broker's topic that is being deleted may have a partition of any number.
        if entry.partitions < 1 or (entry.partitions > PARTITIONS_MAX and not entry.deleting):
            raise ValueError(f"a topic has 1 to {PARTITIONS_MAX} partitions")
        if not -1 <= entry.creating_from < entry.partitions:
            raise ValueError(f"creating_from is {entry.creating_from} of {entry.partitions}")
        return entry


class Catalogue:
    """The topics of a root by name.  A change is durable before `entries` shows it."""

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
        # Topics that were deleted and still have committed offsets.
        self.deleted = deleted
        self._texts: dict[str, tuple[TopicEntry, str]] = {}  # of the entries encoded last

    @classmethod
    def read(cls, directory: Directory) -> Catalogue:
        """Return the catalogue; an empty one if there is no file.

        Raises ConfigError if the file cannot be read: retention with default settings could delete
        records.
        """
        try:
            content = directory.read(cls.NAME, 1 << 30)
        except FileNotFoundError:
            return cls(directory, {})
        try:
            found = json.loads(content)
            topics = found["topics"]
            deleted = tuple(str(name) for name in found.get("deleted", ()))
            for name in topics:  # names become paths
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
        """As `put`; if `noted`, also add the name to `deleted`, until `forget_deleted`."""
        deleted = (*self.deleted, name) if noted and name not in self.deleted else self.deleted
        self._replace({**self.entries, name: entry}, deleted)

    def forget_deleted(self, names: Collection[str]) -> None:
        """Remove names from `deleted`."""
        self._replace(self.entries, tuple(name for name in self.deleted if name not in names))

    def _replace(self, entries: dict[str, TopicEntry], deleted: tuple[str, ...]) -> None:
        encoded = self._encode(entries, deleted)
        try:
            self._directory.replace(self.NAME, encoded)
        except OSError:
            # If only the sync of the directory failed, the file has the new content, which the
            # caller takes to be absent.  Put the old content back.
            with contextlib.suppress(OSError):
                self._restore()
            raise
        # Last: if the write failed, memory still has what the file has.
        self._content, self.entries, self.deleted = encoded, entries, deleted

    def _encode(self, entries: dict[str, TopicEntry], deleted: tuple[str, ...]) -> bytes:
        """Return the file's contents: JSON with an indent of 1.

        A change of one topic writes the whole file, because one rename replaces it.  But only the
        topics that changed are encoded: encoding 2,000 of them takes longer than the fsyncs.
        """
        texts: dict[str, tuple[TopicEntry, str]] = {}
        for name in sorted(entries):
            entry, kept = entries[name], self._texts.get(name)
            # The same object has the same text: an entry is replaced, never changed.
            texts[name] = kept if kept and kept[0] is entry else (entry, _indented(entry.as_json()))
        self._texts = texts
        rows = ",\n".join(f"  {json.dumps(name)}: {text}" for name, (_, text) in texts.items())
        more = f',\n "deleted": {_indented(list(deleted), 1)}' if deleted else ""
        topics = f"{{\n{rows}\n }}" if rows else "{}"
        return f'{{\n "version": 1,\n "topics": {topics}{more}\n}}\n'.encode()

    def _restore(self) -> None:
        if self._content is None:
            self._directory.unlink(self.NAME)
        # Compared first: usually the failed write left the old file, and a full disk has no space
        # for another.
        elif self._directory.read(self.NAME, 1 << 30) != self._content:
            self._directory.replace(self.NAME, self._content)


def _indented(value: object, depth: int = 2) -> str:
    """Return `value` as JSON, at a depth in a document with an indent of 1."""
    return json.dumps(value, indent=1).replace("\n", "\n" + " " * depth)
