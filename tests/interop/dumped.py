"""What kafka-dump-log printed, as objects: batches and records per .log file.

Keys and payloads are printed as text, so only records whose key and value are printable, single
lines can be compared; `Printed` of a Row is the line that is expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .rows import Row

_BATCH = re.compile(
    r"^baseOffset: (?P<base>\d+) lastOffset: (?P<last>\d+) count: (?P<count>\d+) .*"
    r"position: (?P<position>\d+) (?P<kind>CreateTime|LogAppendTime): (?P<timestamp>-?\d+)"
    r" size: (?P<size>\d+) magic: 2 compresscodec: (?P<codec>\w+) crc: \d+ isvalid: true$"
)
_RECORD = re.compile(
    r"^\| offset: (?P<offset>\d+) (?:CreateTime|LogAppendTime): (?P<timestamp>-?\d+)"
    r" keySize: (?P<key_size>-?\d+) valueSize: (?P<value_size>-?\d+) sequence: -?\d+"
    r" headerKeys: \[(?P<headers>.*?)\](?: key: (?P<key>.*?))?(?: payload: (?P<payload>.*))?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The visible part of a record: everything but the values of its headers."""

    offset: int
    timestamp: int
    key: str | None
    value: str | None
    header_names: tuple[str, ...]

    @classmethod
    def of(cls, row: Row) -> Printed:
        return cls(
            offset=row.offset,
            timestamp=row.timestamp,
            key=None if row.key is None else row.key.decode(),
            value=None if row.value is None else row.value.decode(),
            header_names=tuple(name for name, _ in row.headers),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedBatch:
    base_offset: int
    last_offset: int
    position: int
    size: int
    codec: str
    timestamp_type: str
    records: list[Printed] = field(default_factory=list)


def parse_dump(text: str) -> dict[Path, list[DumpedBatch]]:
    """The batches of each .log file in `text`; every line about a batch or record must parse."""
    files: dict[Path, list[DumpedBatch]] = {}
    batches: list[DumpedBatch] = []
    for line in text.splitlines():
        if line.startswith("Dumping "):
            batches = files.setdefault(Path(line.removeprefix("Dumping ")), [])
        elif line.startswith("baseOffset: "):
            batches.append(_batch(line))
        elif line.startswith("| offset: "):
            batches[-1].records.append(_record(line))
    return {path: batches for path, batches in files.items() if path.suffix == ".log"}


def batches_of(dump: dict[Path, list[DumpedBatch]], directory: Path) -> Iterator[DumpedBatch]:
    """The batches of one partition directory, in the order of their segments."""
    for path in sorted(dump):
        if path.parent == directory:
            yield from dump[path]


def _batch(line: str) -> DumpedBatch:
    found = _BATCH.match(line)
    assert found, f"not a batch of format 2 with a valid CRC: {line}"
    return DumpedBatch(
        base_offset=int(found["base"]),
        last_offset=int(found["last"]),
        position=int(found["position"]),
        size=int(found["size"]),
        codec=found["codec"].lower(),
        timestamp_type=found["kind"],
    )


def _record(line: str) -> Printed:
    found = _RECORD.match(line)
    assert found, f"not a record: {line}"
    key, payload = found["key"], found["payload"]
    for text, size in ((key, int(found["key_size"])), (payload, int(found["value_size"]))):
        assert (-1 if text is None else len(text.encode())) == size, f"size {size}: {line}"
    return Printed(
        offset=int(found["offset"]),
        timestamp=int(found["timestamp"]),
        key=key,
        value=payload,
        header_names=tuple(found["headers"].split(",")) if found["headers"] else (),
    )
