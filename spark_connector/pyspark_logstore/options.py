"""SourceOptions: every option of the source, parsed and checked once.

The names are those of Spark's Kafka source, case-insensitive, so that a query moves by
changing its format and adding a path.  An option that is unknown, malformed or meant for the other
kind of query raises OptionError, which names the correct form.
"""

from __future__ import annotations

import datetime
import difflib
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from pyspark_logstore.pattern import java_pattern

__all__ = ["Bound", "OptionError", "SourceOptions", "text_to_bytes", "text_to_ms"]

log = logging.getLogger("pyspark_logstore")

EARLIEST, LATEST = -2, -1  # as Kafka writes them in JSON
# Half a second's work of one core: starting a task and changing over to it takes a tenth of one.
PARTITION_BYTES_MAX = 256 << 20
BATCH_ROWS = 32_768  # fewer where 8 MiB are reached before

SOURCE_OPTIONS = (
    *("path", "subscribe", "subscribePattern", "assign"),
    *("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets"),
    *("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets"),
    *("startingOffsetsByTimestampStrategy", "failOnDataLoss", "isolationLevel"),
    *("minPartitions", "maxRecordsPerPartition", "maxBytesPerPartition", "rowsPerBatch"),
    *("includeHeaders", "metadata", "columns", "where", "maxRecords", "onCorrupt"),
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
)
# Of a client that fetches over the wire: taken, so that a query need not be rewritten.
CLIENT_OPTIONS = (
    *("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
    "groupIdPrefix",
)
STREAM_ONLY = (
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "maxBytesPerTrigger"),
)
BATCH_ONLY = {
    "endingTimestamp": "a stream has no end: leave it out",
    "endingOffsetsByTimestamp": "a stream has no end: leave it out",
    "endingOffsets": "a stream has no end: leave it out",
    "maxRecords": "maxOffsetsPerTrigger limits a micro-batch",
}
# Spark refuses these too: it decides them, or the options of the source do.
PROTECTED = {
    "kafka.auto.offset.reset": "use startingOffsets",
    "kafka.key.deserializer": "keys come as bytes: cast the column",
    "kafka.value.deserializer": "values come as bytes: cast the column",
    "kafka.enable.auto.commit": "the checkpoint of the query keeps its offsets",
    "kafka.interceptor.classes": "interceptors may break a query",
}
EXAMPLE = '{"orders": {"0": 23, "1": -2}}'
TIME_UNITS = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000,
              "d": 86_400_000}  # fmt: skip
BYTE_UNITS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


class OptionError(ValueError):
    """An invalid option.  The message has the option, the reason and the correct form."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"option {option}: {problem}")
        self.option = option


@dataclass(frozen=True, slots=True)
class Bound:
    """Where the ranges start or end.

    `kind` is earliest, latest, last (`number` offsets before the end), offsets (`by_partition`,
    with -2 and -1), group (where `group` stands), time (`number`, ms) or times (`by_partition`,
    ms).
    """

    option: str
    kind: str
    number: int = 0
    by_partition: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What the user asked for."""

    path: str
    subscribe: tuple[str, ...] = ()
    pattern: str | None = None
    assign: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    start: Bound
    end: Bound
    latest_without_match: bool = False  # a starting time that no record reaches
    fail_on_data_loss: bool = True
    committed: bool = False
    min_partitions: int | None = None
    partition_records_max: int | None = None
    partition_bytes_max: int = PARTITION_BYTES_MAX
    batch_rows: int = BATCH_ROWS
    headers: bool = False
    metadata: bool = False
    columns: tuple[str, ...] = ()
    where: str | None = None
    now_ms: int = 0  # what relative times of `where` are counted from
    records_max: int | None = None  # of the whole query
    group: str | None = None  # the group that commits the progress of a stream
    skip_corrupt: bool = False
    trigger_offsets_max: int | None = None
    trigger_offsets_min: int | None = None
    trigger_delay_ms: int = 900_000
    trigger_bytes_max: int | None = None

    @property
    def isolation(self) -> str:
        """As `Partition.scan` takes it."""
        return "read_committed" if self.committed else "read_uncommitted"

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool | None = False) -> SourceOptions:
        """Parse the options of Spark.  Raises OptionError for an invalid option.

        `streaming` is None when Spark asks for the schema, because it does not pass the kind of
        query then.
        """
        options = _known(given)
        for name in BATCH_ONLY if streaming else ():
            if name in options:
                raise OptionError(name, f"is for batch queries; {BATCH_ONLY[name]}")
        for name in STREAM_ONLY if streaming is False else ():
            if name in options:
                log.warning("option %s has no effect on a batch query", name)
        subscribe, pattern, assign = _subscription(options)
        strategy = options.get("startingOffsetsByTimestampStrategy", "error").lower()
        if strategy not in ("error", "latest"):
            raise OptionError(
                "startingOffsetsByTimestampStrategy", f"must be error or latest, not {strategy!r}"
            )
        columns = tuple(
            name.strip() for name in options.get("columns", "").split(",") if name.strip()
        )
        if "columns" in options and not columns:
            raise OptionError("columns", 'names no column: write "key,value,offset"')
        now_ms = int(time.time() * 1000) if "where" in options else 0
        return cls(
            path=_path(options),
            subscribe=subscribe,
            pattern=pattern,
            assign=assign,
            start=_starting(options, streaming),
            end=_ending(options),
            latest_without_match=strategy == "latest",
            fail_on_data_loss=_flag(options, "failOnDataLoss", True),
            committed=_isolation(options),
            min_partitions=_count(options, "minPartitions"),
            partition_records_max=_count(options, "maxRecordsPerPartition"),
            partition_bytes_max=_bytes(options, "maxBytesPerPartition") or PARTITION_BYTES_MAX,
            batch_rows=_count(options, "rowsPerBatch") or BATCH_ROWS,
            headers=_flag(options, "includeHeaders", False),
            metadata=_flag(options, "metadata", False),
            columns=columns,
            where=_where(options, now_ms),
            now_ms=now_ms,
            records_max=_count(options, "maxRecords"),
            group=options.get("kafka.group.id") or None,
            skip_corrupt=_choice(options, "onCorrupt", ("raise", "skip")) == "skip",
            trigger_offsets_max=_count(options, "maxOffsetsPerTrigger"),
            trigger_offsets_min=_count(options, "minOffsetsPerTrigger"),
            trigger_delay_ms=_delay(options),
            trigger_bytes_max=_bytes(options, "maxBytesPerTrigger"),
        )


# ---- names ----


def _known(given: Mapping[str, str]) -> dict[str, str]:
    """The options by the names they have in the documentation."""
    names = {name.lower(): name for name in (*SOURCE_OPTIONS, *CLIENT_OPTIONS)}
    options: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower == "kafka.bootstrap.servers":
            raise OptionError(
                name,
                'this source reads directories: give "path", or use format("kafka") for a broker',
            )
        if lower in PROTECTED:
            raise OptionError(name, f"cannot be set: {PROTECTED[lower]}")
        if lower == "kafka.isolation.level":
            options.setdefault("isolationLevel", value)
        elif lower == "kafka.group.id":
            options[lower] = value.strip()
        elif lower in names:
            options[names[lower]] = value
        elif not lower.startswith("kafka."):
            near = difflib.get_close_matches(lower, names, n=1)
            hint = f": did you mean {names[near[0]]}?" if near else ""
            raise OptionError(
                name, f"is not known{hint or ': known are ' + ', '.join(SOURCE_OPTIONS)}"
            )
    return options


def _path(options: Mapping[str, str]) -> str:
    path = options.get("path", "").strip()
    if not path:
        raise OptionError("path", 'is missing: .load("/data/store"), or .option("path", ...)')
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        parts = urlsplit(path)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
            raise OptionError(
                "path",
                f"{path!r} is not a directory of a mounted file system: mount it on the driver and "
                f"on every executor at the same place, and give that place",
            )
        path = unquote(parts.path)
    return path


def _subscription(
    options: Mapping[str, str],
) -> tuple[tuple[str, ...], str | None, dict[str, tuple[int, ...]]]:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in options]
    if len(given) > 1:
        raise OptionError(given[1], f"cannot be used with {given[0]}: leave one of them out")
    topics = tuple(name.strip() for name in options.get("subscribe", "").split(",") if name.strip())
    if given == ["subscribe"] and not topics:
        raise OptionError("subscribe", 'names no topic: write "orders,payments"')
    pattern = options.get("subscribePattern")
    if pattern is not None:
        try:
            java_pattern(pattern)
        except ValueError as error:
            raise OptionError(
                "subscribePattern",
                f"{pattern!r} cannot be read as Java would read it: {error}; "
                f"use subscribe, or a plainer pattern",
            ) from None
    return topics, pattern, _assigned(options.get("assign"))


def _assigned(text: str | None) -> dict[str, tuple[int, ...]]:
    if text is None:
        return {}
    found = _json("assign", text, '{"orders": [0, 2]}')
    assigned = {}
    for topic, numbers in found.items():
        if not isinstance(numbers, list) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise OptionError("assign", f'{topic!r} needs a list of partitions: {{"{topic}": [0]}}')
        assigned[topic] = tuple(sorted(set(numbers)))
    if not any(assigned.values()):
        raise OptionError("assign", 'names no partition: write {"orders": [0, 2]}')
    return assigned


# ---- bounds ----


def _starting(options: Mapping[str, str], streaming: bool | None) -> Bound:
    timed = _timed(options, "starting")
    if timed is not None:
        return timed
    name = "startingOffsets"
    text = options.get(name, "latest" if streaming else "earliest").strip()
    lower = text.lower()
    if lower == "earliest":
        return Bound(name, "earliest")
    if lower == "latest":
        if streaming is False:
            raise OptionError(name, "a batch cannot start at latest, it would be empty: earliest?")
        return Bound(name, "latest")
    if re.fullmatch(r"last:\d+", lower):
        return Bound(name, "last", int(lower.removeprefix("last:")))
    if lower.startswith("group:") and text[len("group:") :].strip():
        return Bound(name, "group", group=text[len("group:") :].strip())
    if lower.startswith("tag:"):
        raise OptionError(name, f"{text!r} is not available yet: use earliest, a time or offsets")
    offsets = _offsets(name, text)
    if streaming is False:
        for topic, numbers in offsets.items():
            for number, offset in numbers.items():
                if offset == LATEST:
                    raise OptionError(name, f"a batch cannot start {topic}-{number} at -1, latest")
    return Bound(name, "offsets", by_partition=offsets)


def _ending(options: Mapping[str, str]) -> Bound:
    timed = _timed(options, "ending")
    if timed is not None:
        return timed
    name = "endingOffsets"
    text = options.get(name, "latest").strip()
    if text.lower() == "latest":
        return Bound(name, "latest")
    if text.lower() == "earliest":
        raise OptionError(name, "earliest would leave nothing to read: latest, or offsets")
    offsets = _offsets(name, text)
    for topic, numbers in offsets.items():
        for number, offset in numbers.items():
            if offset == EARLIEST:
                raise OptionError(name, f"{topic}-{number} cannot end at -2, earliest")
    return Bound(name, "offsets", by_partition=offsets)


def _timed(options: Mapping[str, str], which: str) -> Bound | None:
    name = f"{which}Timestamp"
    if name in options:
        return Bound(name, "time", _moment(name, options[name]))
    name = f"{which}OffsetsByTimestamp"
    if name not in options:
        return None
    example = '{"orders": {"0": 1700000000000}}'
    times = _numbers_by_partition(name, options[name], example)
    for topic, numbers in times.items():
        for number, when in numbers.items():
            if when < 0:
                raise OptionError(name, f"{topic}-{number} has time {when}: ms since 1970 are >= 0")
    return Bound(name, "times", by_partition=times)


def _moment(name: str, text: str) -> int:
    """Milliseconds since 1970, from a number, ISO-8601 with its zone, or "-10m"."""
    text = text.strip()
    if re.fullmatch(r"\d+", text):
        return int(text)
    if re.fullmatch(r"-\d+[a-z]+", text):
        return int(time.time() * 1000) - text_to_ms(name, text[1:])
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            name,
            f"{text!r} is not a time: write ms since 1970, 2024-05-01T12:00:00Z, or -10m",
        ) from None
    if when.tzinfo is None:
        raise OptionError(name, f"{text!r} names no time zone: write {text}Z for UTC")
    return (when - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // datetime.timedelta(
        milliseconds=1
    )


def _offsets(name: str, text: str) -> dict[str, dict[int, int]]:
    if not text.startswith("{"):
        ending = name == "endingOffsets"
        words = "latest" if ending else "earliest, latest, last:100, group:NAME"
        raise OptionError(name, f"must be {words} or JSON such as {EXAMPLE}, not {text!r}")
    offsets = _numbers_by_partition(name, text, EXAMPLE)
    for topic, numbers in offsets.items():
        for number, offset in numbers.items():
            if offset < EARLIEST:
                raise OptionError(
                    name,
                    f"{topic}-{number} has offset {offset}: "
                    f"an offset is >= 0, or -2 for earliest, -1 for latest",
                )
    return offsets


def _numbers_by_partition(name: str, text: str, example: str) -> dict[str, dict[int, int]]:
    found = _json(name, text, example)
    result: dict[str, dict[int, int]] = {}
    for topic, partitions in found.items():
        if not isinstance(partitions, dict):
            raise OptionError(name, f"{topic!r} needs an object by partition: {example}")
        result[topic] = {}
        for number, value in partitions.items():
            if not re.fullmatch(r"\d+", number):
                raise OptionError(name, f"{number!r} of {topic!r} is not a partition: {example}")
            if type(value) is not int:
                raise OptionError(name, f"{topic}-{number} has {value!r}, not a number: {example}")
            result[topic][int(number)] = value
    return result


def _json(name: str, text: str, example: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            name, f"is not JSON: {error.msg} at character {error.pos}; write it like {example}"
        ) from None
    if not isinstance(found, dict):
        raise OptionError(name, f"must be a JSON object such as {example}, not {text!r}")
    return found


# ---- single values ----


def _where(options: Mapping[str, str], now_ms: int) -> str | None:
    text = options.get("where")
    if text is None:
        return None
    from logstore import Where, WhereError

    try:
        Where(text, now_ms=now_ms)
    except WhereError as error:
        example = """key == "alice" and $.total > 3"""
        raise OptionError("where", f"{error}; a condition looks like {example}") from None
    return text


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionError(name, f"must be true or false, not {options[name]!r}")
    return text == "true"


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"0*[1-9]\d*", text.strip()):
        raise OptionError(name, f"must be a positive whole number, not {text!r}")
    return int(text)


def _choice(options: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = options.get(name, choices[0]).strip().lower()
    if text not in choices:
        raise OptionError(name, f"must be {' or '.join(choices)}, not {options[name]!r}")
    return text


def _isolation(options: Mapping[str, str]) -> bool:
    names = ("read_uncommitted", "read_committed")
    return _choice(options, "isolationLevel", names) == "read_committed"


def _bytes(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    return None if text is None else text_to_bytes(name, text)


def text_to_bytes(name: str, text: str) -> int:
    """``64m`` -> 67108864, with Spark's units."""
    found = re.fullmatch(r"(\d+)\s*([bkmgtp]?)b?", text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise OptionError(name, f'must be a size such as "64m", not {text!r}')
    return int(found[1]) << BYTE_UNITS[found[2]]


def _delay(options: Mapping[str, str]) -> int:
    return text_to_ms("maxTriggerDelay", options.get("maxTriggerDelay", "15m"))


def text_to_ms(name: str, text: str) -> int:
    """``15m`` -> 900000, with Spark's units; a bare number is milliseconds."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or (found[2] or "ms") not in TIME_UNITS:
        raise OptionError(name, f'must be a time such as "15m" or "30s", not {text!r}')
    return int(int(found[1]) * TIME_UNITS[found[2] or "ms"])
