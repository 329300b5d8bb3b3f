"""Row: one record as both sides see it, and its form in expected.json.

Bytes are hex there.  Long periodic bytes are "unit*times", so that a value which spans several
blocks of a codec does not fill the repository.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Headers = tuple[tuple[str, bytes | None], ...]

_LONG_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()
    offset: int = -1  # -1 until one is assigned


@dataclass(frozen=True, slots=True)
class Expected:
    """What a real consumer saw in a partition, and which offsets it was not shown as records."""

    topic: str
    start_offset: int
    end_offset: int
    control: frozenset[int]  # offsets of control records: no reader returns them
    aborted: frozenset[int]  # offsets of records only a read_uncommitted consumer sees
    rows: list[Row]


def row_of(record: Any) -> Row:
    """A logstore Record as a Row."""
    return Row(
        offset=record.offset,
        timestamp=record.timestamp,
        key=record.key,
        value=record.value,
        headers=tuple((name, value) for name, value in record.headers),
    )


def awkward_rows(timestamp: int, tag: str) -> list[Row]:
    """Everything a record may be without being large, the timestamps out of order."""
    repeated = (("h", b"1"), ("h", b"2"), ("null", None), ("empty", b""), ("h", b"1"))
    unusual = (("ключ", b"\x00\xff"), ("🔑", "värde".encode()), ("", b"empty name"))
    mark = tag.encode()
    return [
        Row(timestamp=timestamp, value=mark + b" null key"),
        Row(timestamp=timestamp + 5, key=mark + b" null value"),
        Row(timestamp=timestamp + 3),
        Row(timestamp=timestamp + 3, key=b"", value=b""),
        Row(timestamp=timestamp - 7, key=b"", value=mark),
        Row(timestamp=timestamp + 9, key=mark, value=b""),
        Row(timestamp=timestamp, key=mark, value=b"repeated headers", headers=repeated),
        Row(timestamp=timestamp, key=mark, value=b"unusual headers", headers=unusual),
        Row(timestamp=timestamp + 1, key=bytes(range(256)), value=bytes(range(255, -1, -1))),
    ]


def plain_rows(timestamp: int, tag: str, count: int) -> list[Row]:
    return [
        Row(timestamp=timestamp + i, key=f"{tag}-{i % 7}".encode(), value=f"{tag} {i}".encode())
        for i in range(count)
    ]


def load_expected(path: Path) -> Expected:
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        Row(
            offset=each["offset"],
            timestamp=each["timestamp"],
            key=_decode(each["key"]),
            value=_decode(each["value"]),
            headers=tuple((name, _decode(value)) for name, value in each["headers"]),
        )
        for each in document["records"]
    ]
    return Expected(
        topic=document["topic"],
        start_offset=document["start_offset"],
        end_offset=document["end_offset"],
        control=frozenset(document["control"]),
        aborted=frozenset(document["aborted"]),
        rows=rows,
    )


def save_expected(path: Path, expected: Expected, *, kafka: str) -> None:
    """Write expected.json with one line per record, so that a remade file can be compared."""
    head = {
        "topic": expected.topic,
        "kafka": kafka,
        "start_offset": expected.start_offset,
        "end_offset": expected.end_offset,
        "control": sorted(expected.control),
        "aborted": sorted(expected.aborted),
    }
    records = [
        {
            "offset": row.offset,
            "timestamp": row.timestamp,
            "key": _encode(row.key),
            "value": _encode(row.value),
            "headers": [[name, _encode(value)] for name, value in row.headers],
        }
        for row in expected.rows
    ]
    lines = [f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items()]
    body = ",\n".join("  " + json.dumps(each, ensure_ascii=False) for each in records)
    text = "{\n" + "".join(lines) + ' "records": [\n' + body + "\n ]\n}\n"
    path.write_text(text, encoding="utf-8")


def _encode(data: bytes | None) -> str | None:
    if data is None or len(data) < _LONG_BYTES:
        return data if data is None else data.hex()
    period = (data + data).find(data, 1)
    times = len(data) // period
    return f"{data[:period].hex()}*{times}" if times > 1 else data.hex()


def _decode(text: str | None) -> bytes | None:
    if text is None:
        return None
    unit, _, times = text.partition("*")
    return bytes.fromhex(unit) * int(times or 1)
