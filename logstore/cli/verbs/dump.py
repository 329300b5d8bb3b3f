"""`logstore dump`: print the contents of files in a log directory, ours or a broker's, as JSON.

Each file is decoded on its own; its name determines its kind.  No field is trusted: bytes that do
not decode are printed as a row of kind "damage" with their position, and the dump continues with
the next file.  No file is opened for writing and no link is followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from logstore.cli import exits
from logstore.cli.internal import meaning_of
from logstore.cli.messages import bytes_of, field_of
from logstore.cli.session import Integer, Session, pass_session, verb

__all__ = ["dump_verb"]

SMALL_MAX = 64 << 20  # a larger file is not a checkpoint or a snapshot
Rows = Iterator[dict[str, Any]]


@verb("dump")
@click.argument("paths", nargs=-1, required=True, metavar="FILE...")
@click.option("-r", "--records", is_flag=True, help="Also print the records of every batch.")
@click.option("-n", "--max", "most", type=Integer(0), metavar="N", help="At most N rows per file.")
@click.option("--kind", "wanted", type=click.Choice(["batches", "damage", "all"]), default="all")
@pass_session
def dump_verb(
    session: Session, paths: tuple[str, ...], records: bool, most: int | None, wanted: str
) -> int:
    """Print the contents of FILEs, or of all files in a directory.

    Decodes .log files, the three indexes, producer snapshots, checkpoints, metadata, markers and
    our own side files.  The exit code is 4 if a file is damaged.
    """
    output = session.output
    damaged = False

    def rows() -> Rows:
        nonlocal damaged
        for path in _files(paths):
            count = 0
            for row in _dumped(path, records=records):
                damaged = damaged or row["kind"] == "damage"
                if most is not None and count >= most:
                    break
                if wanted == "all" or row["kind"] in (wanted, wanted.removesuffix("es")):
                    count += 1
                    yield {"file": str(path), **row}

    if output.kind == "table":
        for row in rows():
            file, kind = row.pop("file"), row.pop("kind")
            words = " ".join(f"{name}={_short(value)}" for name, value in row.items())
            output.one(row, words=[f"{file}: {kind} {words}"])
    else:
        output.rows(rows(), ())
    return exits.CORRUPT if damaged else exits.OK


def _short(value: Any) -> str:
    from logstore.cli.text import json_text

    return value if isinstance(value, str) else json_text(value)


def _files(paths: tuple[str, ...]) -> Iterator[Path]:
    """Yield the given files, and the files of given directories two levels deep."""
    for given in paths:
        path = Path(given)
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, "no such file", given)
        if not path.is_dir():
            yield path
            continue
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                yield from (each for each in sorted(entry.iterdir()) if _is_regular(each))
            elif _is_regular(entry):
                yield entry


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _damage(reason: str, position: int = 0) -> dict[str, Any]:
    return {"kind": "damage", "position": position, "reason": reason}


def _dumped(path: Path, *, records: bool) -> Rows:
    """Yield the rows of one file."""
    name = path.name
    for suffix in (".deleted", ".cleaned", ".swap"):
        name = name.removesuffix(suffix)
    try:
        if name.endswith(".log"):
            yield from _log(path, records=records)
            return
        if name == "logstore.reserve":
            # The file reserves blocks on the disk and has no contents.
            yield {"kind": "reserve", "size_bytes": path.stat().st_size}
            return
        for pattern, dump in _KINDS:
            if pattern.fullmatch(name):
                yield from dump(_content(path), name)
                return
        yield {"kind": "unknown", "size_bytes": path.stat().st_size}
    except (ValueError, struct.error) as error:
        yield _damage(str(error))


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        content = file.read(SMALL_MAX + 1)
    if len(content) > SMALL_MAX:
        raise ValueError(f"more than {SMALL_MAX} bytes: too large for a file of this name")
    return content


# ---- .log ----


def _log(path: Path, *, records: bool) -> Rows:
    from logstore.errors import LogStoreError
    from logstore.format.batch import HEADER_BYTES, BatchHeader

    topic = path.absolute().parent.name.rpartition("-")[0]
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size, position = os.fstat(fd).st_size, 0
        while position < size:
            head = os.pread(fd, HEADER_BYTES, position)
            try:
                header = BatchHeader.parse(head)
            except (LogStoreError, ValueError) as error:
                yield _damage(str(error), position)
                return
            if header.size_bytes > size - position:
                yield _damage(
                    f"the batch takes {header.size_bytes} bytes; {size - position} are left",
                    position,
                )
                return
            raw = _exactly(fd, header.size_bytes, position)
            for row in _batch(header, raw, position, records=records):
                if row["kind"] == "record" and topic.startswith("__") and not row["control"]:
                    key, value = bytes_of(row["key"], "key"), bytes_of(row["value"], "value")
                    row["meaning"] = meaning_of(topic, key, value)
                yield row
            position += header.size_bytes
    finally:
        os.close(fd)


def _exactly(fd: int, count: int, position: int) -> bytes:
    content = os.pread(fd, count, position)
    while len(content) < count:
        piece = os.pread(fd, count - len(content), position + len(content))
        if not piece:
            break
        content += piece
    return content


CODEC_NAMES = ("none", "gzip", "snappy", "lz4", "zstd")


def _batch(header: Any, raw: bytes, position: int, *, records: bool) -> Rows:
    from crc32c import crc32c

    from logstore.format.batch import AT_ATTRIBUTES, HEADER_BYTES, EndMarker
    from logstore.format.codecs import decompress

    crc = crc32c(memoryview(raw)[AT_ATTRIBUTES:])
    codec = header.codec
    row: dict[str, Any] = {
        "kind": "batch",
        "position": position,
        "size_bytes": header.size_bytes,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "base_timestamp": header.base_timestamp,
        "max_timestamp": header.max_timestamp,
        "timestamp_type": "LogAppendTime" if header.log_append_time else "CreateTime",
        "codec": CODEC_NAMES[codec] if codec < len(CODEC_NAMES) else f"unknown {codec}",
        "leader_epoch": header.leader_epoch,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "transactional": header.transactional,
        "control": header.control,
        "delete_horizon": header.base_timestamp if header.has_delete_horizon else None,
        "crc": f"{header.crc:08x}",
        "sound": crc == header.crc,
    }
    if crc == header.crc and header.control:
        marker = EndMarker.parse(raw)
        if marker is not None:
            row["marker"] = "commit" if marker.commit else "abort"
            row["coordinator_epoch"] = marker.coordinator_epoch
    yield row
    if crc != header.crc:
        yield _damage(f"checksum {crc:08x}, but the batch has {header.crc:08x}", position)
        return
    if records:
        payload = memoryview(raw)[HEADER_BYTES:]
        try:
            if codec:
                payload = memoryview(decompress(codec, payload, SMALL_MAX))
            yield from _records(header, payload)
        except (ValueError, IndexError) as error:
            yield _damage(f"the records of the batch cannot be read: {error}", position)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Decode a zig-zag varint; return it and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise ValueError("a number of more than ten bytes")


def _bytes(data: memoryview, at: int, end: int) -> tuple[bytes | None, int]:
    size, at = _varint(data, at)
    if size < 0:
        return None, at
    if size > end - at:
        raise ValueError(f"a field of {size} bytes in a record with {end - at} left")
    return bytes(data[at : at + size]), at + size


def _records(header: Any, data: memoryview) -> Rows:
    at = 0
    for number in range(max(0, header.record_count)):
        size, at = _varint(data, at)
        end = at + size
        if size < 0 or end > len(data):
            raise ValueError(f"record {number} takes {size} bytes; {len(data) - at} are left")
        at += 1  # attributes: Kafka defines none
        time_delta, at = _varint(data, at)
        offset_delta, at = _varint(data, at)
        key, at = _bytes(data, at, end)
        value, at = _bytes(data, at, end)
        count, at = _varint(data, at)
        headers = []
        for _ in range(count):
            name, at = _bytes(data, at, end)
            content, at = _bytes(data, at, end)
            headers.append([field_of(name), field_of(content)])
        if at != end:
            raise ValueError(f"record {number} ends {end - at} bytes too early")
        yield {
            "kind": "record",
            "offset": header.base_offset + offset_delta,
            "timestamp": header.max_timestamp
            if header.log_append_time
            else header.base_timestamp + time_delta,
            "key": field_of(key),
            "value": field_of(value),
            "headers": headers,
            "control": header.control,
        }


# ---- indexes and snapshots ----


def _base(name: str) -> int:
    digits = name.split(".", 1)[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _entries(content: bytes, width: int) -> Iterator[tuple[int, bytes]]:
    for at in range(0, len(content) - width + 1, width):
        yield at, content[at : at + width]


def _offset_index(content: bytes, name: str) -> Rows:
    last = -1
    for at, entry in _entries(content, 8):
        relative, position = struct.unpack(">ii", entry)
        if relative == 0 and position == 0 and at:
            break  # zeros that a broker preallocates after the entries
        yield {"kind": "offset_index", "offset": _base(name) + relative, "position": position}
        if relative < 0 or position < 0 or relative <= last:
            yield _damage(f"the entry ({relative}, {position}) is out of order", at)
        last = relative
    if len(content) % 8:
        yield _damage(f"{len(content) % 8} bytes after the last whole entry", len(content) // 8 * 8)


def _time_index(content: bytes, name: str) -> Rows:
    last = -1
    for at, entry in _entries(content, 12):
        timestamp, relative = struct.unpack(">qi", entry)
        if timestamp == 0 and relative == 0 and at:
            break
        yield {"kind": "time_index", "timestamp": timestamp, "offset": _base(name) + relative}
        if relative < 0 or timestamp < last:
            yield _damage(f"the entry ({timestamp}, {relative}) is out of order", at)
        last = timestamp
    if len(content) % 12:
        yield _damage(
            f"{len(content) % 12} bytes after the last whole entry", len(content) // 12 * 12
        )


def _transaction_index(content: bytes, name: str) -> Rows:
    from logstore.format.index import TransactionIndex

    index = TransactionIndex(_base(name), content)
    for aborted in index:
        yield {"kind": "aborted_transaction", **aborted._asdict()}
    fault = index.fault()
    if fault is not None:
        yield _damage(fault)


def _snapshot(content: bytes, name: str) -> Rows:
    from logstore.log.producer_state import ProducerState

    for entry in ProducerState.decode(content):
        yield {
            "kind": "producer",
            "producer_id": entry.producer_id,
            "producer_epoch": entry.epoch,
            "coordinator_epoch": entry.coordinator_epoch,
            "timestamp": entry.timestamp,
            "transaction_start": entry.transaction_start,
            "last_sequence": entry.last_sequence,
            "last_offset": entry.last_offset,
        }


# ---- text files ----


def _lines(content: bytes) -> list[str]:
    return [line.strip() for line in content.decode("utf-8").splitlines() if line.strip()]


def _counted(content: bytes, fields: int) -> list[list[str]]:
    """Return the rows of Kafka's text format: version, count, rows."""
    lines = _lines(content)
    if len(lines) < 2 or lines[0] != "0":
        raise ValueError(f"not a checkpoint of version 0: {lines[:1]}")
    rows = [line.split() for line in lines[2:]]
    if len(rows) != int(lines[1]) or any(len(row) != fields for row in rows):
        raise ValueError(f"{len(rows)} rows, but the count is {lines[1]}; {fields} fields each")
    return rows


def _checkpoint(content: bytes, name: str) -> Rows:
    if not content:
        return
    for topic, partition, offset in _counted(content, 3):
        yield {
            "kind": "checkpoint",
            "topic": topic,
            "partition": int(partition),
            "offset": int(offset),
        }


def _epochs(content: bytes, name: str) -> Rows:
    if not content:
        return
    for epoch, offset in _counted(content, 2):
        yield {"kind": "leader_epoch", "epoch": int(epoch), "start_offset": int(offset)}


def _pairs(content: bytes, separator: str) -> dict[str, str]:
    pairs = (line.partition(separator) for line in _lines(content) if not line.startswith("#"))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _metadata(content: bytes, name: str) -> Rows:
    yield {"kind": "partition_metadata", **_pairs(content, ":")}


def _properties(content: bytes, name: str) -> Rows:
    yield {"kind": "meta_properties", **_pairs(content, "=")}


def _json_file(kind: str) -> Callable[[bytes, str], Rows]:
    def dump(content: bytes, name: str) -> Rows:
        import json

        # Older brokers write an empty file as the marker of a clean shutdown.
        none = not content and name.startswith(".kafka")
        yield {"kind": kind, "content": None if none else json.loads(content)}

    return dump


def _checked(kind: str) -> Callable[[bytes, str], Rows]:
    """Dump one of our files: a checksum in hex, a space or a newline, the body."""

    def dump(content: bytes, name: str) -> Rows:
        import json

        from crc32c import crc32c

        match = re.match(rb"([0-9a-f]{8})[ \n]", content)
        if match is None:
            raise ValueError("it does not start with a checksum")
        body = content[match.end() :]
        crc = crc32c(body)
        if crc != int(match[1], 16):  # most end in a newline that the checksum does not cover
            body = body.removesuffix(b"\n")
            crc = crc32c(body)
        try:
            found = json.loads(body)
        except ValueError:
            found = field_of(body)
        yield {"kind": kind, "content": found, "sound": crc == int(match[1], 16)}
        if crc != int(match[1], 16):
            yield _damage(f"checksum {crc:08x}, but the file has {match[1].decode()}")

    return dump


def _durable(content: bytes, name: str) -> Rows:
    from crc32c import crc32c

    offset, crc = struct.unpack(">qI", content)
    sound = crc32c(content[:8]) == crc
    yield {"kind": "durable_mark", "offset": offset, "sound": sound}
    if not sound:
        yield _damage("the checksum is wrong")


def _side(content: bytes, name: str) -> Rows:
    """Dump another file of ours: with a checksum, as JSON, or as text."""
    try:
        rows = list(_checked("side_file")(content, name))
    except ValueError:
        rows = [{"kind": "side_file", "content": field_of(content[:4096])}]
    yield from rows


def _text(kind: str) -> Callable[[bytes, str], Rows]:
    def dump(content: bytes, name: str) -> Rows:
        yield {"kind": kind, "content": field_of(content.rstrip(b"\n"))}

    return dump


_KINDS: tuple[tuple[re.Pattern[str], Callable[[bytes, str], Rows]], ...] = tuple(
    (re.compile(pattern), dump)
    for pattern, dump in (
        (r".*\.index", _offset_index),
        (r".*\.timeindex", _time_index),
        (r".*\.txnindex", _transaction_index),
        (r".*\.snapshot", _snapshot),
        (r".*-offset-checkpoint", _checkpoint),
        (r"leader-epoch-checkpoint", _epochs),
        (r"partition\.metadata", _metadata),
        (r"meta\.properties", _properties),
        (r"\.kafka_cleanshutdown", _json_file("clean_shutdown")),
        (r"quorum-state", _json_file("quorum_state")),
        (r"logstore\.topics", _json_file("catalogue")),
        (r"logstore\.durable", _durable),
        (r"logstore\.clean", _text("clean_twin")),
        (r"\.lock", _text("lock")),
        (r"logstore\.repair-\d+\.json", _json_file("receipt")),
        (r"logstore\.producers", _json_file("producer_ids")),
        (r"logstore\.(state|cleaner)|checkpoints\.ls|.*\.summary|.*\.sum|.*\.plan",
         _checked("side_file")),
        (r"logstore\..*", _side),
    )
)  # fmt: skip
