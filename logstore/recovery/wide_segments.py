"""Splits segments that span more offsets than an index can hold, as a broker splits them.

An index has offsets relative to its segment's base, in 31 bits.  Old brokers could compact segments
into one that spans more.  A log from such a directory is split before any other change.

Crash rule: the tail is durable in a segment of its own before it is cut off.  If a crash prevents
the cut, the next open makes it.
"""

from __future__ import annotations

import logging

from logstore import _native
from logstore.errors import InvalidRecordError
from logstore.files.directory import COPY_BYTES, Directory, copy_bytes
from logstore.files.names import base_offset_of, segment_name
from logstore.format.batch import HEADER_BYTES, BatchHeader
from logstore.log.segment import RELATIVE_MAX

__all__ = ["split_wide_segments"]

log = logging.getLogger("logstore.split")

_CRC_FROM = 21  # where the checksummed part of a batch begins


def split_wide_segments(directory: Directory, names: list[str]) -> bool:
    """Split the segments that are too wide; return whether there was one.

    Reads only the segments that can be too wide.
    """
    bases = sorted(base_offset_of(name) for name in names if name.endswith(".log"))
    changed = False
    number = 0
    while number < len(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        if following is None or following - bases[number] > RELATIVE_MAX:
            base = _split(directory, bases[number])
            if base is not None:
                changed = True
                bases = sorted({*bases, base})
        number += 1
    return changed


def _split(directory: Directory, base: int) -> int | None:
    """Cut one segment before the first batch out of its range; return that batch's offset."""
    file = directory.open(segment_name(base, ".log"), write=True)
    try:
        size = file.size()
        found = _native.scan_prefix(file, base, 0, size, base, 4096, False, None)
        position = int(found["position"])
        header = _sound_header(file, position, size)
        if header is None or header.base_offset - base <= RELATIVE_MAX:
            return None
        log.warning(
            "%s spans more than 2^31 offsets: from %d on it becomes a segment of its own",
            file.path,
            header.base_offset,
        )
        name = segment_name(header.base_offset, ".log")
        if position == 0:
            directory.rename(segment_name(base, ".log"), name)
        elif not directory.exists(name):
            _copy_tail(directory, file, position, size, name)
        directory.sync()
        if position > 0:
            file.truncate(position)
            file.sync()
    finally:
        file.close()
    for suffix in (".index", ".timeindex", ".sum"):  # made again from the rest
        directory.unlink(segment_name(base, suffix))
    return header.base_offset


def _sound_header(file: _native.File, position: int, size: int) -> BatchHeader | None:
    """Return the header of the batch at `position`; None if it is not whole and valid."""
    from crc32c import crc32c  # slow to import, and few logs have such segments

    if size - position < HEADER_BYTES:
        return None
    try:
        header = BatchHeader.parse(file.pread(HEADER_BYTES, position))
    except InvalidRecordError:
        return None
    end = position + header.size_bytes
    if end > size:
        return None
    crc = 0
    for at in range(position + _CRC_FROM, end, COPY_BYTES):
        crc = crc32c(file.pread(min(COPY_BYTES, end - at), at), crc)
    return header if crc == header.crc else None


def _copy_tail(
    directory: Directory, source: _native.File, position: int, size: int, name: str
) -> None:
    unfinished = name + ".tmp"
    directory.unlink(unfinished)
    target = directory.open(unfinished, write=True, create=True, exclusive=True)
    try:
        copy_bytes(source, position, size, target, 0)
        target.sync()
    finally:
        target.close()
    directory.rename(unfinished, name)
