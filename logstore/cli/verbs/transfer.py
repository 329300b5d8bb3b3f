"""`logstore export` and `import`: write records to a file, and append records from one.

JSON lines, Parquet and Arrow are lossless: they keep null apart from empty, the order of headers,
timestamps, partitions and offsets.  CSV is for spreadsheets: an empty cell may be null or empty.

An export is atomic: the file is written under a temporary name, synced, then renamed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from logstore.cli.bounds import BOUND, Bound
from logstore.cli.completion import topic_names
from logstore.cli.messages import Message, bytes_of, field_of, message_of, record_to_json
from logstore.cli.progress import Progress
from logstore.cli.session import InputFile, Session, partition_option, pass_session, verb
from logstore.cli.text import json_text
from logstore.cli.verbs.read import Selection
from logstore.cli.verbs.write import Appender, lines_of, target_of
from logstore.errors import InvalidRecordError
from logstore.record import Record, needed

if TYPE_CHECKING:
    from logstore import Columns

__all__ = ["export_verb", "import_verb"]

FORMATS = ("jsonl", "csv", "parquet", "arrow")
CSV_FIELDS = ("topic", "partition", "offset", "timestamp", "key", "value", "headers")
LINE_MAX = 512 << 20


def _format_of(path: str, given: str | None) -> str:
    """Return the given format, else the one of the file name's suffix."""
    if given is not None:
        return given
    suffix = Path(path).suffix.removeprefix(".")
    known = {"ndjson": "jsonl", "json": "jsonl", "feather": "arrow", "ipc": "arrow"}
    suffix = known.get(suffix, suffix)
    if suffix not in FORMATS:
        raise click.UsageError(f"{path}: which format? --format {'|'.join(FORMATS)}")
    return suffix


@contextlib.contextmanager
def _whole_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that is synced and renamed to `path` on success; ``-`` is stdout."""
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    folder_name = os.path.dirname(path) or "."
    if not os.path.isdir(folder_name):
        raise click.UsageError(f"there is no directory {folder_name}")
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    folder = os.open(folder_name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- export ----


@verb("export")
@click.argument("topic", shell_complete=topic_names)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Default: by the file's suffix.")
@partition_option
@click.option("--from", "start", type=BOUND, metavar="WHERE", help="Start here.")
@click.option("--to", "stop", type=BOUND, metavar="WHERE", help="Stop before this.")
@click.option("--where", "condition", metavar="EXPRESSION", help="Only records that match.")
@click.option("--committed", is_flag=True, help="Without records of open or aborted transactions.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@pass_session
def export_verb(
    session: Session,
    topic: str,
    file: str,
    kind: str | None,
    partition: tuple[int, ...],
    start: Bound | None,
    stop: Bound | None,
    condition: str | None,
    committed: bool,
    force: bool,
) -> None:
    """Write the records of TOPIC to FILE.

    JSON lines, Parquet and Arrow are lossless; `logstore import` reads them back.
    """
    form = _format_of(file, kind)
    if file != "-" and os.path.lexists(file) and not force:
        raise FileExistsError(17, "it exists: --force replaces it", file)
    where = None
    if condition is not None:
        from logstore.where import Where

        where = Where(condition)
    if form in ("parquet", "arrow"):
        needed("pyarrow", "logstore export", "arrow")
    with session.reading() as store:
        chosen = Selection(
            store[topic], partitions=partition, start=start, stop=stop, where=where,
            committed=committed,
        )  # fmt: skip
        # The file appears under its name only if all records were written.
        with Progress("exporting") as progress, _whole_file(file) as stream:
            count = _EXPORTS[form](chosen, stream, progress)
    if file != "-":
        row = {"topic": topic, "file": file, "format": form, "records": count}
        session.output.one(row, words=[f"{count:,} records of {topic} in {file}"])


def _export_jsonl(chosen: Selection, stream: BinaryIO, progress: Progress) -> int:
    for record in chosen:
        stream.write(json_text(record_to_json(record)).encode() + b"\n")
        progress.add()
    return progress.done


def _cell(data: bytes | None) -> str:
    field = field_of(data)
    return "" if field is None else field if isinstance(field, str) else json_text(field)


def _export_csv(chosen: Selection, stream: BinaryIO, progress: Progress) -> int:
    # `detach` at the end: else its destructor would close `stream`, which the caller owns.
    text = io.TextIOWrapper(stream, "utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow(CSV_FIELDS)
    for record in chosen:
        row = record_to_json(record)
        headers = json_text(row["headers"]) if row["headers"] else ""
        writer.writerow([row["topic"], row["partition"], row["offset"], row["timestamp"],
                         _cell(record.key), _cell(record.value), headers])  # fmt: skip
        progress.add()
    text.flush()
    text.detach()
    return progress.done


def _schema() -> Any:
    import pyarrow as pa

    from logstore.record import arrow_schema

    places = [pa.field("topic", pa.string()), pa.field("partition", pa.int32())]
    return pa.schema([*places, *arrow_schema()])


def _tables(chosen: Selection, progress: Progress) -> Iterator[Any]:
    """Yield Arrow batches of all records.  Reads columns unless a condition needs records."""
    import pyarrow as pa

    schema = _schema()
    topic = chosen.topic.name
    for log in chosen.logs:
        start, stop = chosen.stretch(log)
        if chosen.where is None:
            scan = log.scan(start, stop, isolation=chosen.isolation)
            for columns in scan.columns():
                yield _placed(columns, topic, log.number, schema)
                progress.add(len(columns))
            continue
        held: list[dict[str, Any]] = []
        for record in chosen.of(log, start, stop):
            held.append(_arrow_row(record, topic, log.number))
            if len(held) == 10_000:
                yield pa.RecordBatch.from_pylist(held, schema)
                progress.add(len(held))
                held = []
        if held:
            yield pa.RecordBatch.from_pylist(held, schema)
            progress.add(len(held))


def _placed(columns: Columns, topic: str, partition: int, schema: Any) -> Any:
    import pyarrow as pa

    rows = len(columns)
    batch = columns.to_arrow()
    arrays = [
        pa.repeat(pa.scalar(topic, pa.string()), rows),
        pa.repeat(pa.scalar(partition, pa.int32()), rows),
        *batch.columns,
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _arrow_row(record: Record, topic: str, partition: int) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": record.key,
        "value": record.value,
        "headers": [{"key": name, "value": data} for name, data in record.headers],
    }


def _export_parquet(chosen: Selection, stream: BinaryIO, progress: Progress) -> int:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(stream, _schema(), compression="zstd") as writer:
        for batch in _tables(chosen, progress):
            writer.write_batch(batch)
    return progress.done


def _export_arrow(chosen: Selection, stream: BinaryIO, progress: Progress) -> int:
    import pyarrow as pa

    with pa.ipc.new_file(stream, _schema()) as writer:
        for batch in _tables(chosen, progress):
            writer.write_batch(batch)
    return progress.done


_EXPORTS: dict[str, Callable[[Selection, BinaryIO, Progress], int]] = {
    "jsonl": _export_jsonl,
    "csv": _export_csv,
    "parquet": _export_parquet,
    "arrow": _export_arrow,
}


# ---- import ----


@verb("import")
@click.argument("topic", shell_complete=topic_names)
@click.argument("file", type=InputFile())
@click.option("--format", "kind", type=click.Choice(FORMATS), help="Default: by the file's suffix.")
@click.option("-z", "--compression", type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]))
@click.option("--keep-partitions", is_flag=True, help="Keep the partition numbers of the file.")
@click.option("--create", is_flag=True, help="Create the topic and the store if missing.")
@pass_session
def import_verb(
    session: Session,
    topic: str,
    file: str,
    kind: str | None,
    compression: str | None,
    keep_partitions: bool,
    create: bool,
) -> None:
    """Append the records of FILE to TOPIC.

    Records get new offsets and keep their keys, values, headers and timestamps.  An error names the
    record; the records before it are in the log.
    """
    form = _format_of(file, kind)
    if form in ("parquet", "arrow"):
        needed("pyarrow", "logstore import", "arrow")
    with contextlib.ExitStack() as stack:
        # Before the store: a file that cannot be read must not create a store.
        stream = sys.stdin.buffer if file == "-" else stack.enter_context(open(file, "rb"))
        store = stack.enter_context(session.writing(create=create))
        target = target_of(store, topic, create=create)
        with Appender(session, target, compression=compression, verbose=False) as appender:
            try:
                for message in _IMPORTS[form](stream):
                    place = message.partition if keep_partitions else None
                    appender.append(message.record, place)
            except (ValueError, IndexError) as error:
                error.add_note(
                    f"{file}, record {appender.records + 1}; the {appender.records:,} before it "
                    f"are in the log"
                )
                raise
        row = {"topic": topic, "file": file, "format": form, "records": appender.records}
        session.output.one(row, words=[f"{appender.records:,} records of {file} in {topic}"])


def _import_jsonl(stream: BinaryIO) -> Iterator[Message]:
    return (message_of(line) for line, _ in lines_of(stream, LINE_MAX) if line.strip())


def _from_cell(text: str) -> Any:
    """Return the JSON value of a cell; decodes the base64 form that export writes."""
    if text.startswith('{"base64":'):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return text


def _import_csv(stream: BinaryIO) -> Iterator[Message]:
    csv.field_size_limit(LINE_MAX)
    text = io.TextIOWrapper(stream, "utf-8", newline="")
    try:
        rows = csv.DictReader(text)
        names = set(rows.fieldnames or ())
        if "value" not in names:
            raise InvalidRecordError(f"no column 'value'; there are {sorted(names)}")
        for row in rows:
            # A DictReader puts surplus cells below the key None, and None into missing ones.
            if None in row or None in row.values():
                raise InvalidRecordError(f"line {rows.line_num} has more or fewer cells than names")
            key = row.get("key") or None
            headers = json.loads(row["headers"]) if row.get("headers") else None
            fields = {
                # An empty cell is null if there is a key, as a tombstone has, and empty bytes
                # otherwise.
                "value": _from_cell(row["value"]) if row["value"] or not key else None,
                "key": None if key is None else _from_cell(key),
                "headers": headers,
                "timestamp": int(row["timestamp"]) if row.get("timestamp") else None,
                "partition": int(row["partition"]) if row.get("partition") else None,
            }
            yield message_of(json.dumps(fields))
    finally:
        text.detach()


def _import_batches(batches: Iterable[Any]) -> Iterator[Message]:
    import pyarrow as pa

    for batch in batches:
        names = set(batch.schema.names)
        if "value" not in names:
            raise InvalidRecordError(f"no column 'value'; there are {sorted(names)}")
        if "timestamp" in names:
            at = batch.schema.get_field_index("timestamp")
            times = batch.column(at).cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())
            batch = batch.set_column(at, "timestamp", times)
        wanted = ("value", "key", "headers", "timestamp", "partition")
        for row in batch.select([name for name in wanted if name in names]).to_pylist():
            headers = [
                (_text(pair["key"]), _data(pair["value"], "a header"))
                for pair in row.get("headers") or ()
            ]
            record = Record(
                _data(row["value"], "value"),
                key=_data(row.get("key"), "key"),
                headers=headers,
                timestamp=row.get("timestamp"),
            )
            yield Message(record, row.get("partition"))


def _text(name: Any) -> str:
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else str(name)


def _data(value: Any, what: str) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else bytes_of(value, what)


def _import_parquet(stream: BinaryIO) -> Iterator[Message]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(stream) as file:
        yield from _import_batches(file.iter_batches(10_000))


def _import_arrow(stream: BinaryIO) -> Iterator[Message]:
    import pyarrow as pa

    with pa.ipc.open_file(stream) as file:
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        yield from _import_batches(batches)


_IMPORTS: dict[str, Callable[[BinaryIO], Iterator[Message]]] = {
    "jsonl": _import_jsonl,
    "csv": _import_csv,
    "parquet": _import_parquet,
    "arrow": _import_arrow,
}
