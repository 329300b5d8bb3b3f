"""Configuration: frozen, keyword-only, Kafka's names and defaults.

``PartitionConfig(segment_bytes=1 << 20)`` and ``{"segment.bytes": 1 << 20}`` mean the same; the
dotted names are Kafka's, and are used wherever configuration is shown or typed by a person.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from logstore.errors import LogStoreError

__all__ = ["ConfigError", "Durability", "PartitionConfig"]

Durability = Literal["fsync", "os"]
INT64_MAX = (1 << 63) - 1


class ConfigError(LogStoreError, ValueError):
    """An unknown setting, or a value outside its bounds."""


def dotted(name: str) -> str:
    """Kafka's spelling of a field name."""
    return name.replace("_", ".")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartitionConfig:
    """How one partition is laid out and what it admits.  A field's comment is its consequence."""

    # Roll to a new file at this size.  Smaller: finer retention, more files.
    segment_bytes: int = 1 << 30
    # Roll when a record is this much younger than the segment's first.
    segment_ms: int = 604_800_000
    # Spread time-based rolls over this span, so that many partitions do not roll at once.
    segment_jitter_ms: int = 0
    # Room for either index of a segment; a full index rolls the segment.
    segment_index_bytes: int = 10_485_760
    # One index entry for this many bytes.  Smaller: faster random reads, larger indexes.
    index_interval_bytes: int = 4096
    # The largest batch, its header included; a record must fit in one.
    max_message_bytes: int = 1_048_588
    # CreateTime keeps a record's own time, LogAppendTime replaces it by the time of the append.
    message_timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    # How far a record's own time may lie in the past or future.
    message_timestamp_before_max_ms: int = INT64_MAX
    message_timestamp_after_max_ms: int = INT64_MAX
    # What append() and extend() compress with.  "producer": what the writer asks for, else nothing.
    compression_type: Literal[
        "producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd"
    ] = "producer"
    # A compressed batch that unpacks to more than this is refused, read or written.
    max_decompressed_message_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name, least, most in _BOUNDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{dotted(name)} must be an int, not {value!r}")
            if not least <= value <= most:
                raise ConfigError(f"{dotted(name)} must be from {least} to {most}, not {value}")
        for name, choices in _CHOICES:
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{dotted(name)} must be one of {', '.join(choices)}, "
                    f"not {getattr(self, name)!r}"
                )

    @classmethod
    def of(cls, config: PartitionConfig | Mapping[str, Any] | None) -> PartitionConfig:
        """A config from what a user gave: None, a config, or a mapping with either spelling."""
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if not isinstance(config, Mapping):
            raise ConfigError(f"config must be a PartitionConfig or a mapping, not {config!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        settings = {}
        for name, value in config.items():
            field = str(name).replace(".", "_")
            if field not in known:
                raise ConfigError(
                    f"unknown setting {name!r}; known are {', '.join(map(dotted, sorted(known)))}"
                )
            settings[field] = value
        return cls(**settings)

    def as_dict(self) -> dict[str, Any]:
        """All settings by their dotted names."""
        return {dotted(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}


_BOUNDS = (
    ("segment_bytes", 1024, (1 << 31) - 1),
    ("segment_ms", 1, INT64_MAX),
    ("segment_jitter_ms", 0, INT64_MAX),
    ("segment_index_bytes", 24, (1 << 31) - 1),
    ("index_interval_bytes", 0, (1 << 31) - 1),
    ("max_message_bytes", 128, (1 << 31) - 1),
    ("message_timestamp_before_max_ms", 0, INT64_MAX),
    ("message_timestamp_after_max_ms", 0, INT64_MAX),
    ("max_decompressed_message_bytes", 1024, (1 << 31) - 1),
)
_CHOICES = (
    ("message_timestamp_type", ("CreateTime", "LogAppendTime")),
    (
        "compression_type",
        ("producer", "uncompressed", "none", "gzip", "snappy", "lz4", "zstd"),
    ),
)


def wants_fsync(durability: object) -> bool:
    """Whether a durability level means "on stable storage before it returns"."""
    if durability == "fsync":
        return True
    if durability == "os":
        return False
    raise ConfigError(
        f"durability must be 'fsync' (survives a power cut) or 'os' (survives a killed process), "
        f"not {durability!r}"
    )
