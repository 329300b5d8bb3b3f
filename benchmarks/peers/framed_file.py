"""Framed file: what one writes by hand in plain Python, a length and then the value.

No checksum, no index, no recovery: the least that can be read back.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

BUFFER_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


def write(path: Path, values: Sequence[bytes]) -> float:
    pack = _LENGTH.pack
    with open(path, "wb", BUFFER_BYTES) as file:
        put = file.write
        started = perf_counter()
        for value in values:
            put(pack(len(value)) + value)
        file.flush()
        return len(values) / (perf_counter() - started)


def scan(path: Path) -> float:
    number = int.from_bytes  # quicker than Struct.unpack and its tuple
    total = count = 0
    with open(path, "rb", BUFFER_BYTES) as file:
        read = file.read
        started = perf_counter()
        while length := read(_LENGTH.size):
            total += len(read(number(length, "big")))
            count += 1
        elapsed = perf_counter() - started
        assert total + count * _LENGTH.size == file.tell()
        return count / elapsed
