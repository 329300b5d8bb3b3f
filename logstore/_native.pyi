"""The C half of the engine.  Private: its names may change in any release."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self, final

from typing_extensions import Buffer, disjoint_base

CRC32C_IMPLEMENTATION: Final[str]

def crc32c(data: Buffer, crc: int = 0, /) -> int: ...
def murmur2(key: Buffer, /) -> int: ...
def partitions_of_keys(
    ends: Buffer, data: Buffer, valid: Buffer | None, partitions: int, /
) -> bytes: ...
def after_fork_in_child() -> None: ...
def fork_generation() -> int: ...
def lz4_frame(data: Buffer, /) -> bytes | None: ...
def lend_lz4(decode: int, encode: int, /) -> None: ...
def rename(directory: int, source: str, target: str, /) -> None: ...
def unlink(directory: int, name: str, /) -> None: ...
def sync_directory(directory: int, /) -> None: ...
def check_records(batch: Buffer, payload: Buffer, /) -> tuple[int, int, int]: ...
def offset_index_lookup(entries: Buffer, relative_offset: int, /) -> int: ...
def time_index_lookup(entries: Buffer, timestamp: int, /) -> int: ...
def scan_prefix(
    file: File,
    base_offset: int,
    position: int,
    limit: int,
    next_offset: int,
    interval_bytes: int,
    dense: bool,
    progress: Callable[[int], None] | None,
    /,
) -> dict[str, Any]: ...
def find_batch(
    file: File, position: int, limit: int, offset_min: int, offset_max: int, /
) -> tuple[int, int, int] | None: ...
def batch_below(
    batch: Buffer,
    end_offset: int,
    decompress: Callable[[int, memoryview, int], bytes],
    compress: Callable[[int, memoryview], bytes],
    payload_max: int,
    /,
) -> bytes: ...

@final
class Record:
    def __new__(
        cls,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: Iterable[tuple[str, Buffer | None]] = (),
        timestamp: int | datetime.datetime | None = None,
    ) -> Self: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]: ...
    # A record that was read always has these two; one that was only made has None.
    @property
    def timestamp(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def partition(self) -> int | None: ...
    @property
    def topic(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class File:
    end: int
    def __new__(
        cls,
        directory: int,
        name: str,
        path: str,
        *,
        write: bool = False,
        create: bool = False,
        exclusive: bool = False,
    ) -> Self: ...
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> str: ...
    def close(self) -> None: ...
    def pread(self, size: int, position: int, /) -> bytes: ...
    def pwrite(self, data: Buffer, position: int, /) -> None: ...
    def datasync(self) -> None: ...
    def sync(self) -> None: ...
    def truncate(self, size: int, /) -> None: ...
    def size(self) -> int: ...

@disjoint_base
class Builder:
    def __new__(
        cls,
        *,
        batch_bytes: int,
        batch_bytes_max: int,
        arena_bytes: int,
        codec: int,
        before_max_ms: int,
        after_max_ms: int,
        clock: Callable[[], int] | None,
        compress: Callable[[int, memoryview], bytes] | None,
        lent_lz4: bool,
    ) -> Self: ...
    def append(
        self,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: Iterable[tuple[str, Buffer | None]] = (),
        timestamp: int | datetime.datetime | None = None,
    ) -> None: ...
    def extend(self, records: Iterable[Buffer | Record], /) -> None: ...
    @property
    def _records(self) -> int: ...
    @property
    def _size_bytes(self) -> int: ...
    def _take(self, into: list[Builder], /) -> None: ...
    def _put_back(self, taken: Builder, /) -> None: ...
    def _seal(self) -> None: ...
    def _append_columns(
        self,
        values: tuple[Buffer, Buffer, Buffer | None],
        keys: tuple[Buffer, Buffer, Buffer | None] | None,
        timestamps: Buffer | None,
        rows: Buffer | None,
        /,
    ) -> None: ...
    def _encoded(self) -> bytes: ...
    def _close(self) -> None: ...

@final
class SegmentWriter:
    def __new__(
        cls,
        file: File,
        *,
        base_offset: int,
        next_offset: int,
        interval_bytes: int,
        segment_bytes: int,
        segment_ms: int,
        index_bytes: int,
        created_ms: int,
        offsets: Buffer,
        times: Buffer,
        first_timestamp: int,
        max_timestamp: int,
        max_timestamp_offset: int,
        last_indexed_position: int,
        min_timestamp: int,
    ) -> Self: ...
    @property
    def file(self) -> File: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def first_timestamp(self) -> int: ...
    @property
    def min_timestamp(self) -> int: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def max_timestamp_offset(self) -> int: ...
    @property
    def last_indexed_position(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def time_bytes(self) -> int: ...
    def append(
        self, builder: Builder, leader_epoch: int, append_time: int, now_ms: int, /
    ) -> int: ...
    def append_raw(self, batches: bytes, now_ms: int, /) -> bool: ...
    def finish(self) -> None: ...
    def offset_entries(self, from_byte: int = 0, /) -> bytes: ...
    def time_entries(self, from_byte: int = 0, /) -> bytes: ...

@final
class SegmentScan(Iterator[Record]):
    def __new__(
        cls,
        file: File,
        index: bytes | SegmentWriter | None,
        base_offset: int,
        start: int,
        stop: int,
        offset_max: int,
        required_end: int,
        dense: bool,
        skip: bool,
        topic: str | None,
        partition: int,
        decompress: Callable[[int, memoryview, int], bytes],
        payload_max: int,
        aborted: bytes = ...,
        ahead: int = ...,
    ) -> Self: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def stale(self) -> bool: ...
    moved: Callable[[], bool]
    @property
    def skipped(self) -> tuple[tuple[int, int, int, int, str], ...]: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Record: ...
    def fill(self, columns: ColumnBuilder, /) -> bool: ...
    def next_raw(self) -> bytes | None: ...
    def next_producer(self) -> bytes | None: ...
    def find_time(self, timestamp: int, /) -> int | None: ...
    @classmethod
    def get(
        cls,
        file: File,
        index: bytes | SegmentWriter | None,
        base_offset: int,
        offset: int,
        topic: str | None,
        partition: int,
        decompress: Callable[[int, memoryview, int], bytes],
        payload_max: int,
        /,
    ) -> Record | None: ...

@final
class ColumnBuilder:
    def __new__(cls, fields: int, rows: int, bytes_max: int, bytes_hint: int) -> Self: ...
    @property
    def rows(self) -> int: ...
    @property
    def value_bytes(self) -> int: ...
    def finish(self) -> tuple[Any, ...]: ...

@final
class OffsetMap:
    latest_offset: int
    def __new__(cls, memory_bytes: int, secret: bytes) -> Self: ...
    @property
    def limit(self) -> int: ...
    def __len__(self) -> int: ...
    def put(self, key: Buffer, offset: int, /) -> bool: ...
    def get(self, key: Buffer, /) -> int: ...
    def clear(self) -> None: ...
    def read(
        self,
        file: File,
        position: int,
        limit: int,
        expected: int,
        offset_max: int,
        budget: int,
        start: int,
        transactions: Transactions,
        decompress: Callable[[int, memoryview, int], bytes],
        payload_max: int,
        io_bytes: int,
        /,
    ) -> tuple[int, int, bool]: ...

@final
class Transactions:
    def __new__(cls, entries: Buffer) -> Self: ...

@final
class Cleaner:
    def __new__(
        cls,
        target: File | None,
        *,
        base_offset: int,
        interval_bytes: int,
        offset_map: OffsetMap | None,
        key: bytes | None,
        transactions: Transactions | None,
        producers: Sequence[tuple[int, int, int]],
        start_offset: int,
        end_offset: int,
        now_ms: int,
        delete_retention_ms: int,
        decompress: Callable[[int, memoryview, int], bytes],
        compress: Callable[[int, memoryview], bytes],
        payload_max: int,
        io_bytes: int,
    ) -> Self: ...
    def feed(
        self, file: File, position: int, limit: int, expected: int, offset_max: int, budget: int, /
    ) -> tuple[int, int]: ...
    def counts(self) -> dict[str, int]: ...
    def finish(self) -> tuple[int, int, bytes, bytes, bytes]: ...
