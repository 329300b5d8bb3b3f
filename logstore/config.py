"""Configuration: frozen, keyword-only, Kafka's names and defaults.

One default differs where Kafka's deletes records: a log may be the only copy, so it keeps all
records until `retention_ms` or `retention_bytes` is set.

``PartitionConfig(segment_bytes=1 << 20)`` and ``{"segment.bytes": 1 << 20}`` mean the same; the
dotted names are Kafka's, and are used in files, in the command line and in error texts.  The
settings of a topic are those of each of its partitions.

Invariant: a PartitionConfig is valid and never changes.  Every value is checked when it is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from logstore.errors import LogStoreError

__all__ = ["ConfigError", "Durability", "PartitionConfig"]

Durability = Literal["fsync", "os"]
INT16_MAX = (1 << 15) - 1
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1


class ConfigError(LogStoreError, ValueError):
    """An unknown setting, or a value outside its bounds."""


def dotted(name: str) -> str:
    """Return Kafka's spelling of a field name."""
    return name.replace("_", ".")


def setting(default: Any, **rule: object) -> Any:
    """Return a field whose `rule` is checked when a config is made."""
    return dataclasses.field(default=default, metadata=rule)


def integer(default: int, least: int, most: int = INT64_MAX, *, but: int | None = None) -> Any:
    return setting(default, least=least, most=most, but=but)


def choice(default: str, *choices: str) -> Any:
    return setting(default, choices=choices)


class Settings:
    """The base of settings in a frozen dataclass: each value is checked by the rule of its field.

    The fields of a subclass are made with `integer`, `choice` and `setting`.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            checked = _checked(field, value)
            if checked is not value:
                object.__setattr__(self, field.name, checked)

    @classmethod
    def of(cls, config: Self | Mapping[str, Any] | None) -> Self:
        """Return the config for None (the defaults), a config, or a mapping with either spelling.

        Numbers and truth values of a mapping may be text, as in Kafka's tools.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(f"config must be a {cls.__name__} or a mapping, not {config!r}")
        return cls().with_settings(config)

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return a copy with some settings changed; a value of None is the default."""
        known = {field.name: field for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            field = known.get(str(name).replace(".", "_"))
            if field is None:
                raise ConfigError(_unknown(str(name), [dotted(each) for each in known]))
            changes[field.name] = field.default if value is None else _parsed(field, value)
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings by their dotted names."""
        return {dotted(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by their dotted names."""
        return {
            dotted(f.name): value
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig(Settings):
    """The settings of a topic, and so of its partitions.  A field's comment is its consequence."""

    # ---- files ----

    # Roll to a new file at this size.  Smaller: finer retention, more files.
    segment_bytes: int = integer(1 << 30, 1024, INT32_MAX)
    # Roll when a record is this much younger than the segment's first.
    segment_ms: int = integer(604_800_000, 1)
    # Spread time-based rolls over this span, so that many partitions do not roll at once.
    segment_jitter_ms: int = integer(0, 0)
    # Largest size of an index file; a full index rolls the segment.
    segment_index_bytes: int = integer(10_485_760, 24, INT32_MAX)
    # One index entry for this many bytes.  Smaller: faster random reads, larger indexes.
    index_interval_bytes: int = integer(4096, 0, INT32_MAX)
    # Kafka keeps a deleted segment's files this long.  Not used: readers keep their files open, so
    # logstore deletes at once.
    file_delete_delay_ms: int = integer(60_000, 0)
    # Kafka allocates a segment's whole file in advance.  Not used: logstore never does.
    preallocate: bool = setting(False)

    # ---- what is admitted ----

    # The largest batch, its header included; a record must fit in one.
    max_message_bytes: int = integer(1_048_588, 128, INT32_MAX)
    # CreateTime keeps a record's own time, LogAppendTime replaces it by the time of the append.
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = choice(
        "CreateTime", "CreateTime", "LogAppendTime"
    )
    # How far a record's own time may be in the past or future.
    message_timestamp_before_max_ms: int = integer(INT64_MAX, 0)
    message_timestamp_after_max_ms: int = integer(INT64_MAX, 0)
    # The codec of append() and extend().  "producer": that of the writer, by default none.
    compression_type: Literal[
        "producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd"
    ] = choice("producer", "producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd")
    # Higher: smaller batches, slower appends.  -1 is gzip's own default.
    compression_gzip_level: int = integer(-1, 1, 9, but=-1)
    compression_lz4_level: int = integer(9, 1, 17)
    compression_zstd_level: int = integer(3, -131_072, 22)
    # A batch that decompresses to more than this is refused by reads and writes.
    max_decompressed_message_bytes: int = integer(64 << 20, 1024, INT32_MAX)
    # The state of an idempotent producer that is idle for this long is removed.
    producer_id_expiration_ms: int = integer(86_400_000, 1)

    # ---- what is kept ----

    # "delete": by age and size; "compact": the newest record of every key; or both.
    cleanup_policy: str = setting("delete", policies=("compact", "delete"))
    # Delete a segment if all of its records are older; -1 keeps all.  Kafka's default is 7 days.
    retention_ms: int = integer(-1, -1)
    # Delete the oldest segments while the partition is larger; -1 sets no limit.
    retention_bytes: int = integer(-1, -1)
    # How long a tombstone stays readable after the first compaction that read it.
    delete_retention_ms: int = integer(86_400_000, 0)
    # Records younger than this are not compacted.
    min_compaction_lag_ms: int = integer(0, 0)
    # Compact if a record is older than this, for any dirty ratio.
    max_compaction_lag_ms: int = integer(INT64_MAX, 1)
    # Compact if this share of the log's bytes has not been compacted.
    min_cleanable_dirty_ratio: float = setting(0.5, least=0.0, most=1.0)

    # ---- flushing and replicas ----

    # Sync after this many records, or milliseconds; durability="fsync" syncs every append anyway.
    flush_messages: int = integer(INT64_MAX, 1)
    flush_ms: int = integer(INT64_MAX, 0)
    # For replication and Kafka's clients.  Not used by a log with one copy.
    min_insync_replicas: int = integer(1, 1, INT32_MAX)
    unclean_leader_election_enable: bool = setting(False)

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise ConfigError(
                f"min.compaction.lag.ms must be at most max.compaction.lag.ms "
                f"({self.max_compaction_lag_ms}), not {self.min_compaction_lag_ms}"
            )

    @property
    def deletes(self) -> bool:
        """Return whether segments are deleted by age and size."""
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        """Return whether compaction keeps only the newest record of every key."""
        return "compact" in self.cleanup_policy

    def compression_level(self, codec: str) -> int | None:
        """Return the configured level of a codec, or None if it has no levels."""
        level: int | None = getattr(self, f"compression_{codec}_level", None)
        return level


def _unknown(name: str, known: list[str]) -> str:
    import difflib  # imported here, because only this error needs it

    near = difflib.get_close_matches(name.replace("_", "."), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
    return f"unknown setting {name!r}; {hint}"


def _parsed(field: dataclasses.Field[Any], value: object) -> object:
    """Return the text `value` as its setting's type; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if isinstance(field.default, bool):
        return {"true": True, "false": False}.get(text.lower(), value)
    try:
        if isinstance(field.default, int):
            return int(text)
        if isinstance(field.default, float):
            return float(text)
    except ValueError:
        return value  # `_checked` raises, and names the allowed values
    return text


def _checked(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value to keep; raise ConfigError with the name, the value and the limits."""
    name, rule = dotted(field.name), field.metadata
    if "policies" in rule:
        return _policy(name, value, rule["policies"])
    if "choices" in rule:
        if value not in rule["choices"]:
            raise ConfigError(f"{name} must be one of {', '.join(rule['choices'])}, not {value!r}")
    elif isinstance(field.default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be text, not {value!r}")
    elif isinstance(field.default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
    else:
        number = (int, float) if isinstance(field.default, float) else int
        if not isinstance(value, number) or isinstance(value, bool) or math.isnan(value):
            kind = "a number" if isinstance(field.default, float) else "an int"
            raise ConfigError(f"{name} must be {kind}, not {value!r}")
        least, most, but = rule["least"], rule["most"], rule.get("but")
        if not least <= value <= most and value != but:
            other = "" if but is None else f", or {but}"
            raise ConfigError(f"{name} must be from {least} to {most}{other}, not {value}")
    return value


def _policy(name: str, value: Any, policies: tuple[str, ...]) -> str:
    """Return Kafka's list, sorted and without repetition: ``compact,delete``."""
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",")]
    elif isinstance(value, Iterable):
        words = [str(word) for word in value]
    else:
        words = []
    if not words or not set(words) <= set(policies):
        raise ConfigError(f"{name} must be a list of {', '.join(policies)}, not {value!r}")
    return ",".join(sorted(set(words)))


def wants_fsync(durability: object) -> bool:
    """Return whether an append returns only after its records are on stable storage."""
    if durability == "fsync":
        return True
    if durability == "os":
        return False
    raise ConfigError(
        f"durability must be 'fsync' (survives a power cut) or 'os' (survives a killed process), "
        f"not {durability!r}"
    )
