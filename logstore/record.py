"""Record; Columns: many records as arrays.

A Columns owns its memory: it stays valid after the scan and after a close of the log, and has no
object per record.  The variable-size fields have Arrow's layout, so `to_arrow` copies nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from logstore._native import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

__all__ = ["BytesColumn", "Columns", "Record"]

# The bits of the decoder's mask: see `field_mask`.
FIELDS = {"offset": 1, "timestamp": 2, "key": 4, "value": 8, "headers": 16, "tombstone": 32}


_T = TypeVar("_T")


def needed(package: str, what: str, extra: str) -> Any:
    """Import an optional package; raise an ImportError that has the command to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f'{what}() needs {package}: pip install "logstore-engine[{extra}]"', name=package
        ) from error


def field_mask(fields: Sequence[str] | None) -> int:
    """Return the decoder's mask for field names; None means all but "tombstone"."""
    if fields is None:
        return 31
    if isinstance(fields, str):
        raise TypeError(f"fields must be a sequence of names, such as [{fields!r}], not a str")
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ValueError(f"unknown fields {unknown}; known are {', '.join(FIELDS)}")
    return sum({FIELDS[name] for name in fields})


class BytesColumn(Sequence[bytes | None]):
    """One variable-size field: row i is ``data[ends[i]:ends[i + 1]]``, or None if it is null."""

    __slots__ = ("_buffers", "data", "ends", "nulls")

    def __init__(self, buffers: tuple[Any, Any, Any, int]) -> None:
        import numpy

        ends, data, valid, nulls = buffers
        self._buffers = (ends, data, valid)
        self.ends: npt.NDArray[np.int32] = numpy.frombuffer(ends, numpy.int32)
        self.data: npt.NDArray[np.uint8] = numpy.frombuffer(data, numpy.uint8)
        self.nulls = nulls

    @classmethod
    def from_arrow(cls, array: Any) -> BytesColumn:
        """Return a column on the memory of an Arrow array of (large) binary or string."""
        pa = needed("pyarrow", "BytesColumn.from_arrow", "arrow")
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        kind = array.type
        if not (pa.types.is_binary(kind) or pa.types.is_string(kind)):
            array = array.cast(pa.binary())  # large types; raises for a type without bytes
        if array.offset or array.buffers()[1] is None:
            # A slice shares its parent's buffers: copy it, so that the rows start at 0.
            array = pa.concat_arrays([array, array.slice(0, 0)])
        valid, ends, data = array.buffers()
        rows = len(array)
        span = memoryview(bytes(4) if ends is None else ends)[: 4 * (rows + 1)]
        nulls = array.null_count
        return cls((span, b"" if data is None else data, valid if nulls else None, nulls))

    @property
    def buffers(self) -> tuple[Any, Any, Any]:
        """Return Arrow's three buffers: ends, data, validity bits (None: no row is null)."""
        return self._buffers

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        valid = self._buffers[2]
        if valid is not None and not memoryview(valid)[row // 8] >> (row % 8) & 1:
            return None
        return bytes(memoryview(self._buffers[1])[self.ends[row] : self.ends[row + 1]])

    def __iter__(self) -> Iterator[bytes | None]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the bytes of each row; 0 for None."""
        import numpy

        return numpy.diff(self.ends)

    @property
    def is_null(self) -> npt.NDArray[np.bool_]:
        """Return an array that is True for each row that is None."""
        import numpy

        valid = self._buffers[2]
        if valid is None:
            return numpy.zeros(len(self), numpy.bool_)
        bits = numpy.unpackbits(numpy.frombuffer(valid, numpy.uint8), bitorder="little")
        nulls: npt.NDArray[np.bool_] = bits[: len(self)] == 0
        return nulls

    def to_arrow(self, type_: Any = None) -> pa.Array:
        """Return an Arrow binary array on the same memory."""
        import pyarrow as pa

        ends, data, valid = self._buffers
        buffers = [None if valid is None else pa.py_buffer(valid), pa.py_buffer(ends)]
        buffers.append(pa.py_buffer(data))
        return pa.Array.from_buffers(type_ or pa.binary(), len(self), buffers, self.nulls)

    def __repr__(self) -> str:
        return f"<BytesColumn rows={len(self)} bytes={len(self.data)} nulls={self.nulls}>"


class Columns:
    """One chunk of records, field by field.  ``len()`` is its number of rows.

    ``offsets`` and ``timestamps`` are numpy int64 arrays; ``keys`` and ``values`` are BytesColumns.
    ``tombstones`` is a bool array, True where the value is null: it is filled only if "tombstone"
    is requested, and needs no copy of the values.  A field that was not requested raises
    ValueError.  ``timestamp_type`` is 0 if producers set the times (CreateTime) and 1 if the log
    did (LogAppendTime); a chunk holds only one kind.
    """

    __slots__ = ("_header_ends", "_header_names", "_header_values", "_keys", "_offsets", "_rows",
                 "_timestamps", "_tombstones", "_values", "timestamp_type")  # fmt: skip

    def __init__(self, parts: tuple[Any, ...]) -> None:
        import numpy

        rows, kind, offsets, timestamps, keys, values, *headers, tombstones = parts
        header_ends, names, header_values = headers
        self._rows: int = rows
        self.timestamp_type: int = kind
        self._offsets: npt.NDArray[np.int64] | None = (
            None if offsets is None else numpy.frombuffer(offsets, numpy.int64)
        )
        self._timestamps: npt.NDArray[np.int64] | None = (
            None if timestamps is None else numpy.frombuffer(timestamps, numpy.int64)
        )
        self._tombstones: npt.NDArray[np.bool_] | None = (
            None if tombstones is None else numpy.frombuffer(tombstones, numpy.bool_)
        )
        self._keys = None if keys is None else BytesColumn(keys)
        self._values = None if values is None else BytesColumn(values)
        self._header_ends = header_ends
        self._header_names = None if header_ends is None else BytesColumn(names)
        self._header_values = None if header_ends is None else BytesColumn(header_values)

    def __len__(self) -> int:
        return self._rows

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Return the offsets."""
        return _asked(self._offsets, "offset")

    @property
    def timestamps(self) -> npt.NDArray[np.int64]:
        """Return the timestamps, in milliseconds."""
        return _asked(self._timestamps, "timestamp")

    @property
    def tombstones(self) -> npt.NDArray[np.bool_]:
        """Return whether the value of each row is null."""
        return _asked(self._tombstones, "tombstone")

    @property
    def keys(self) -> BytesColumn:
        """Return the keys."""
        return _asked(self._keys, "key")

    @property
    def values(self) -> BytesColumn:
        """Return the values."""
        return _asked(self._values, "value")

    def headers(self, row: int) -> tuple[tuple[str, bytes | None], ...]:
        """Return the headers of one row, as in a Record."""
        if self._header_names is None or self._header_values is None:
            raise ValueError("these columns have no headers: add 'headers' to fields=")
        if not -self._rows <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        row %= self._rows
        # The headers of row i are the pairs ends[i] to ends[i + 1] of the two header columns.
        ends = memoryview(self._header_ends).cast("B").cast("i")
        return tuple(
            (str(self._header_names[i], "utf-8", "surrogateescape"), self._header_values[i])
            for i in range(ends[row], ends[row + 1])
        )

    def to_arrow(self) -> pa.RecordBatch:
        """Return a record batch of Arrow on the same memory, with the fields as columns."""
        pa = needed("pyarrow", "to_arrow", "arrow")
        arrays: dict[str, Any] = {}
        if self._offsets is not None:
            arrays["offset"] = _int64(self._offsets, pa.int64())
        if self._timestamps is not None:
            arrays["timestamp"] = _int64(self._timestamps, pa.timestamp("ms", tz="UTC"))
        if self._keys is not None:
            arrays["key"] = self._keys.to_arrow()
        if self._values is not None:
            arrays["value"] = self._values.to_arrow()
        if self._header_names is not None and self._header_values is not None:
            arrays["headers"] = self._headers_to_arrow()
        if self._tombstones is not None:
            # Arrow has one bit per bool: this is the one field that is copied.
            arrays["tombstone"] = pa.array(self._tombstones)
        return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))

    def _headers_to_arrow(self) -> pa.Array:
        import pyarrow as pa

        assert self._header_names is not None
        assert self._header_values is not None
        pairs = pa.StructArray.from_arrays(
            [self._header_names.to_arrow(pa.string()), self._header_values.to_arrow()],
            names=["key", "value"],
        )
        ends = pa.Array.from_buffers(
            pa.int32(), self._rows + 1, [None, pa.py_buffer(self._header_ends)]
        )
        return pa.ListArray.from_arrays(ends, pairs)

    def __repr__(self) -> str:
        return f"<Columns rows={self._rows}>"


def _asked(column: _T | None, field: str) -> _T:
    if column is None:
        raise ValueError(f"these columns have no {field}s: add {field!r} to fields=")
    return column


def _int64(values: npt.NDArray[np.int64], type_: Any) -> Any:
    """Return an Arrow array on the same memory.  `pyarrow.array` would import pandas: slow."""
    import pyarrow as pa

    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)])


def arrow_schema(fields: Sequence[str] | None = None) -> pa.Schema:
    """Return the schema of `Columns.to_arrow` for these fields."""
    import pyarrow as pa

    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    types = {
        "offset": pa.int64(),
        "timestamp": pa.timestamp("ms", tz="UTC"),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.list_(pair),
        "tombstone": pa.bool_(),
    }
    mask = field_mask(fields)
    return pa.schema([(name, types[name]) for name, bit in FIELDS.items() if mask & bit])
