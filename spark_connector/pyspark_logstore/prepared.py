"""Prepared files: what a task has encoded, invisible until the driver appends it.

A prepared file holds raw Kafka batches with their checksums, in stretches of one partition each.
It is a plain file in the root of the store, so every process that can open the store can read it,
also if the store is a mount.  Stores and brokers ignore it: they use only directories there.

    logstore.sink.<owner>.<batch>.<random>.prepared

The owner is a query or a job; the batch is the number of its micro-batch, or ``x`` when that is
not known.  A file is complete and synced before its task reports it.  A file that no plan names is
garbage once its owner's batch is done, or after a time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from logstore import BatchEncoder, BatchHeader, BytesColumn, GuardedClock

__all__ = ["Extent", "PreparedFile", "PreparedWriter", "owner_of", "prepared_names"]

PREFIX = "logstore.sink."
SUFFIX = ".prepared"
BUFFER_BYTES = 64 << 20  # of all partitions a task writes to, together
STRETCH_BYTES = 1 << 20  # of one partition, at most
_NAME = re.compile(r"logstore\.sink\.([0-9a-f]{16})\.(\d+|x)\.[0-9a-f]{32}\.prepared\Z")


def owner_of(application: str) -> str:
    """The part of a file name that stands for a query or job."""
    return hashlib.sha256(application.encode()).hexdigest()[:16]


def prepared_names(root: Path) -> Iterator[tuple[str, str, int]]:
    """(name, owner, batch) of every prepared file at a root; batch -1: not known."""
    for name in sorted(os.listdir(root)):
        match = _NAME.match(name)
        if match:
            yield name, match[1], -1 if match[2] == "x" else int(match[2])


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of a prepared file: batches of one partition."""

    topic: str
    partition: int
    position: int
    size: int
    records: int


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedFile:
    """A prepared file as its task describes it: all that the driver has to know."""

    name: str
    size: int
    extents: tuple[Extent, ...]
    keyless: tuple[str, ...] = ()  # topics that got a record without a key
    least_timestamp: int = -1
    greatest_timestamp: int = -1

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "size": self.size,
            "extents": [dataclasses.astuple(extent) for extent in self.extents],
            "keyless": list(self.keyless),
            "times": [self.least_timestamp, self.greatest_timestamp],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PreparedFile:
        extents = tuple(Extent(*fields) for fields in content["extents"])
        times = content["times"]
        return cls(
            content["name"], content["size"], extents, tuple(content["keyless"]), times[0], times[1]
        )

    def batches(self, root: Path, extent: Extent) -> list[bytes]:
        """The raw batches of a stretch.

        Their checksums are looked at when they are appended.
        """
        with open(root / self.name, "rb") as file:
            data = os.pread(file.fileno(), extent.size, extent.position)
        if len(data) != extent.size:
            raise ValueError(
                f"{root / self.name} is shorter than it was: byte {extent.position + extent.size} "
                f"is missing; it was cut or damaged after it was prepared"
            )
        found, at = [], 0
        while at < len(data):
            size = BatchHeader.parse(data, at).size_bytes
            found.append(data[at : at + size])
            at += size
        return found


class PreparedWriter:
    """Encodes the rows of one task into one prepared file, which is made with the first row.

    ``with`` removes the file unless `finish` has been reached.
    """

    def __init__(
        self,
        root: Path,
        application: str,
        batch_id: int | None,
        *,
        compression: str | None = None,
        batch_bytes: int = 1 << 18,
        fsync: bool = True,
    ) -> None:
        batch = "x" if batch_id is None else str(batch_id)
        self.name = f"{PREFIX}{owner_of(application)}.{batch}.{uuid.uuid4().hex}{SUFFIX}"
        self._path = root / self.name
        self._compression = compression
        self._batch_bytes = batch_bytes
        self._fsync = fsync
        self._encoders: dict[tuple[str, int], BatchEncoder] = {}
        self._records: dict[tuple[str, int], int] = {}
        self._extents: list[Extent] = []
        self._keyless: set[str] = set()
        self._times: list[int] = []
        self._file: Any = None
        self._position = 0
        self._finished = False

    def __enter__(self) -> PreparedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            if not self._finished:
                self._path.unlink(missing_ok=True)

    def encoder(self, topic: str, partition: int, config: Any = None) -> BatchEncoder:
        """The encoder of a partition; its topic's settings bound sizes and times."""
        place = (topic, partition)
        found = self._encoders.get(place)
        if found is None:
            found = self._encoders[place] = BatchEncoder(
                batch_bytes=self._batch_bytes, compression=self._compression, config=config
            )
            self._records[place] = 0
        return found

    def added(self, topic: str, partition: int, records: int, *, keyless: bool) -> None:
        """Rows went into an encoder: put its batches into the file when there are many."""
        place = (topic, partition)
        self._records[place] += records
        if keyless:
            self._keyless.add(topic)
        limit = max(1 << 16, min(STRETCH_BYTES, BUFFER_BYTES // len(self._encoders)))
        if self._encoders[place].size_bytes >= limit:
            self._write(place)

    def append_columns(
        self,
        topic: str,
        partition: int,
        values: BytesColumn,
        *,
        keys: BytesColumn | None,
        timestamps: Any,
        rows: Any,
        config: Any = None,
    ) -> None:
        """Add rows of columns to a partition; all rows when `rows` is None."""
        encoder = self.encoder(topic, partition, config)
        encoder.append_columns(values, keys=keys, timestamps=timestamps, rows=rows)
        count = len(values) if rows is None else len(rows)
        keyless = keys is None or (
            keys.nulls > 0 and bool((keys.is_null if rows is None else keys.is_null[rows]).any())
        )
        self.added(topic, partition, count, keyless=keyless and count > 0)

    def finish(self) -> PreparedFile | None:
        """Sync the file; return the report for the driver.  None if there was no row."""
        for place in list(self._encoders):
            self._write(place)
        self._finished = True
        if self._file is None:
            return None
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())
        return PreparedFile(
            self.name,
            self._position,
            tuple(self._extents),
            tuple(sorted(self._keyless)),
            min(self._times, default=-1),
            max(self._times, default=-1),
        )

    def _write(self, place: tuple[str, int]) -> None:
        data = self._encoders[place].take()
        if not data:
            return
        if self._file is None:
            self._file = open(self._path, "xb")  # noqa: SIM115  closed by __exit__
        at = 0
        while at < len(data):
            header = BatchHeader.parse(data, at)
            self._times += (header.base_timestamp, header.max_timestamp)
            at += header.size_bytes
        self._times = [min(self._times), max(self._times)]
        self._file.write(data)
        records, self._records[place] = self._records[place], 0
        self._extents.append(Extent(*place, self._position, len(data), records))
        self._position += len(data)


def age_of(path: Path) -> float:
    """Return the seconds since a file was last changed, less leaps of the clock; 0: it is gone."""
    try:
        return max(0.0, GuardedClock.of(None).now_ms() / 1000 - path.stat().st_mtime)
    except FileNotFoundError:
        return 0.0


def remove(root: Path, names: Sequence[str]) -> None:
    """Remove files at a root; one that is gone already is no fault."""
    for name in names:
        (root / name).unlink(missing_ok=True)
