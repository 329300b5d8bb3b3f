"""`logstore write`: append records from lines or JSON lines.

Records are flushed when no more input is available: a typed line is on disk before the next one is
read, and a file is written in large batches.  An error names the line of the input; the records
before it are in the log.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from logstore.cli import exits
from logstore.cli.bounds import TIME
from logstore.cli.completion import topic_names
from logstore.cli.messages import Message, message_of
from logstore.cli.progress import Progress
from logstore.cli.session import (
    InputFile,
    Integer,
    Session,
    durability_option,
    pass_session,
    verb,
)
from logstore.cli.text import bytes_text
from logstore.errors import UnknownTopicError

if TYPE_CHECKING:
    from logstore import Store, Topic, Writer

__all__ = ["Appender", "lines_of", "write_verb"]

READ_BYTES = 1 << 20
UNTOLD_MAX = 10_000  # with -v: flush and print offsets after this many records


@verb("write")
@click.argument("topic", shell_complete=topic_names)
@click.argument(
    "files",
    nargs=-1,
    type=InputFile(),
    metavar="[FILE]...",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["lines", "jsonl", "raw"]),
    default="lines",
    show_default=True,
    help="One record per line, per JSON line, or per file.",
)
@click.option(
    "-K", "--key-delimiter", metavar="TEXT", help="Split lines into key and value at TEXT."
)
@click.option("-k", "--key", metavar="KEY", help="The key of every record.")
@click.option(
    "-H",
    "--header",
    multiple=True,
    metavar="NAME=VALUE",
    help="A header for every record; NAME alone has a null value.",
)
@click.option("-p", "--partition", type=Integer(0), help="Write to this partition, for any key.")
@click.option("-t", "--timestamp", type=TIME, metavar="TIME", help="The timestamp of every record.")
@click.option(
    "-Z", "--null", "null", is_flag=True, help="Write an empty value as null, a tombstone."
)
@click.option("-z", "--compression", type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]))
@durability_option("Wait for the disk, or only for the operating system.")
@click.option(
    "--keep-partitions", is_flag=True, help="With jsonl: write to the partition in each line."
)
@click.option("--create", is_flag=True, help="Create the topic and the store if missing.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Print partition and offset of each written record."
)
@pass_session  # fmt: skip
def write_verb(
    session: Session,
    topic: str,
    files: tuple[str, ...],
    kind: str,
    key_delimiter: str | None,
    key: str | None,
    header: tuple[str, ...],
    partition: int | None,
    timestamp: int | None,
    null: bool,
    compression: str | None,
    durability: str,
    keep_partitions: bool,
    create: bool,
    verbose: bool,
) -> None:
    """Append records to TOPIC from FILEs, or from stdin.

    \b
    echo '12 EUR' | logstore write orders -k alice
    logstore write orders -K: prices.txt
    logstore read a -o jsonl | logstore write b --format jsonl
    """
    if kind == "jsonl" and (key_delimiter or key is not None or header or null):
        raise click.UsageError("with --format jsonl, key, value and headers are in the input")
    if key_delimiter is not None and (key is not None or not key_delimiter):
        raise click.UsageError("-K needs a text and cannot be used with -k")
    if keep_partitions and kind != "jsonl":
        raise click.UsageError("--keep-partitions needs --format jsonl")
    made = _maker(kind, key_delimiter, key, _headers(header), timestamp, null)
    with session.writing(create=create, durability=durability) as store:
        target = target_of(store, topic, create=create)
        if partition is not None:
            target[partition]  # raises for an unknown partition before input is read
        with Appender(session, target, compression=compression, verbose=verbose) as appender:
            for name in files or ("-",):
                with _opened(name) as stream:
                    for line, number in _input(stream, kind, target.config.max_message_bytes):
                        try:
                            message = made(line)
                        except ValueError as error:
                            raise _at(error, name, number, appender) from error
                        if message is None:
                            continue
                        place = partition
                        if keep_partitions and message.partition is not None:
                            place = message.partition
                        try:
                            appender.append(message.record, place)
                        except (ValueError, IndexError) as error:
                            raise _at(error, name, number, appender) from error
                        if not appender.more_waits(stream):
                            appender.flush()
        if sys.stderr.isatty():
            session.output.note(f"{appender.records:,} records written to {topic}")


def _at(error: Exception, name: str, number: int, appender: Appender) -> Exception:
    """Return the error with a note that names the line of the input."""
    where = "stdin" if name == "-" else name
    error.add_note(f"{where}, line {number}; {appender.records:,} records before it are in the log")
    return error


# ---- input ----


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    if name == "-":
        yield sys.stdin.buffer
    else:
        with open(name, "rb") as stream:
            yield stream


def lines_of(stream: BinaryIO, most: int) -> Iterator[tuple[bytes, int]]:
    """Yield lines without their line ends, with their numbers, as soon as they are available.

    Raises if a line has more than `most` bytes, so that memory is bounded.
    """
    from logstore.errors import InvalidRecordError

    # `read1` returns what a pipe has now; `read` would wait for the whole chunk.
    read = getattr(stream, "read1", stream.read)
    rest, number = b"", 0
    while chunk := read(READ_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            yield line, number
        if len(rest) > most:
            raise InvalidRecordError(
                f"line {number + 1} has {len(rest)} bytes and does not end; at most {most} fit: "
                f"is this a file of lines?"
            )
    if rest:
        yield rest, number + 1


def _input(stream: BinaryIO, kind: str, message_bytes: int) -> Iterator[tuple[bytes, int]]:
    if kind == "raw":
        content = stream.read(message_bytes + 1)
        yield content, 1
        return
    # A record is longer as JSON and base64 than in the log.
    yield from lines_of(stream, message_bytes * (8 if kind == "jsonl" else 1) + 65536)


def _headers(pairs: tuple[str, ...]) -> list[tuple[str, bytes | None]]:
    headers: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise click.UsageError(f"a header is NAME=VALUE, not {pair!r}")
        headers.append((name, value.encode("utf-8", "surrogateescape") if equals else None))
    return headers


def _maker(
    kind: str,
    delimiter: str | None,
    key: str | None,
    headers: list[tuple[str, bytes | None]],
    timestamp: int | None,
    null: bool,
) -> Callable[[bytes], Message | None]:
    """Return a function that turns a line into a record, or None for a line to skip."""
    from logstore.errors import InvalidRecordError
    from logstore.record import Record

    if kind == "jsonl":
        if timestamp is None:
            return lambda line: message_of(line) if line.strip() else None

        def stamped(line: bytes) -> Message | None:
            if not line.strip():
                return None
            (found, place) = message_of(line)
            again = Record(found.value, key=found.key, headers=found.headers, timestamp=timestamp)
            return Message(again, place)

        return stamped
    between = None if delimiter is None else unescaped(delimiter)
    fixed = None if key is None else key.encode("utf-8", "surrogateescape")

    def plain(line: bytes) -> Message:
        own: bytes | None = fixed
        value: bytes | None = line
        if between is not None:
            own, found, value = line.partition(between)
            if not found:
                raise InvalidRecordError(
                    f"no {delimiter!r} in {bytes_text(line[:60])!r}: with -K every line has a key"
                )
        if null and not value:
            value = None
        return Message(Record(value, key=own, headers=headers, timestamp=timestamp), None)

    return plain


def unescaped(text: str) -> bytes:
    r"""Return the bytes of a delimiter; ``\t``, ``\n``, ``\\`` and ``\xNN`` are escapes."""
    named = {"t": "\t", "n": "\n", "r": "\r", "0": "\0", "\\": "\\"}

    def meant(match: re.Match[str]) -> str:
        body = match[1]
        return chr(int(body[1:], 16)) if len(body) > 1 else named.get(body, match[0])

    plain = re.sub(r"\\(x[0-9a-fA-F]{2}|.)", meant, text)
    return plain.encode("utf-8", "surrogateescape")


# ---- appending ----


def target_of(store: Store, topic: str, *, create: bool) -> Topic:
    """Return the topic to append to; `create` creates it if it is missing."""
    if create:
        return store.create_topic(topic, exist_ok=True)
    try:
        return store[topic]
    except UnknownTopicError as error:
        hint = "" if error.near else ";"
        raise exits.CommandError(
            exits.NOT_FOUND, f"{error}{hint} --create makes a new topic"
        ) from None


class Appender:
    """Buffered appends to the partitions of one topic; prints offsets after the flush."""

    def __init__(
        self, session: Session, topic: Topic, *, compression: str | None, verbose: bool
    ) -> None:
        self.records = 0
        self._session = session
        self._topic = topic
        self._compression = compression
        self._verbose = verbose
        self._partitions = len(topic)
        self._writers: dict[int, Writer] = {}
        self._ends: dict[int, int] = {}  # the offset of the next record, by partition
        self._untold: list[int] = []  # partitions of records that are not printed yet
        self._progress = Progress("writing")

    def append(self, record: Any, partition: int | None) -> None:
        """Append to the given partition, else to the partition of the key."""
        number = partition
        if number is None:
            number = self._topic.partitioner(record.key, record.value, self._partitions)
        writer = self._writers.get(number)
        if writer is None:
            log = self._topic[number]
            # No other writer: this process holds the lock of the store, so offsets can be counted.
            self._ends[number] = log.end_offset
            # No linger: `flush` is called when the input pauses, which needs no thread.
            writer = log.writer(compression=self._compression, linger=None)
            self._writers[number] = writer
        writer.append(
            record.value, key=record.key, headers=record.headers, timestamp=record.timestamp
        )
        self.records += 1
        self._progress.add()
        if self._verbose:
            self._untold.append(number)
            if len(self._untold) >= UNTOLD_MAX:
                self.flush()

    def more_waits(self, stream: BinaryIO) -> bool:
        """Return whether more input is available now, so that the flush can wait."""
        peek = getattr(stream, "peek", None)
        if peek is None:
            return True  # a stream in memory has no descriptor to poll
        try:
            return bool(select.select([stream], [], [], 0)[0])
        except (OSError, ValueError):
            return True

    def flush(self) -> None:
        """Flush all records with the chosen durability, then print their offsets."""
        for writer in self._writers.values():
            writer.flush()
        self._tell()

    def _tell(self) -> None:
        if not self._untold:
            return
        output = self._session.output
        for number in self._untold:
            offset = self._ends[number]
            self._ends[number] += 1
            row = {"topic": self._topic.name, "partition": number, "offset": offset}
            output.one(row, words=[f"{self._topic.name}-{number} {offset}"])
        self._untold.clear()
        output.flush()

    def __enter__(self) -> Appender:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._progress.__exit__(kind, error, trace)
        for writer in self._writers.values():
            writer.close()
        if error is None or isinstance(error, ValueError):
            self._tell()
