"""The settings of a topic, as Kafka's clients give and get them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from logstore.config import ConfigError, PartitionConfig, dotted
from logstore.replication.machines.throttle import LISTS

__all__ = ["described", "documentation", "taken", "type_of"]

BOOLEAN, STRING, INT, SHORT, LONG, DOUBLE, LIST, CLASS, PASSWORD = range(1, 10)
FROM_TOPIC, FROM_DEFAULT = 1, 5

# Settings that Kafka has and that mean nothing for one node.  They are accepted and not kept, as
# long as the value is one of these; None: any value.
_IGNORED: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(LISTS.values()),  # nodes of a cluster keep these: see `configs`
    "remote.storage.enable": ("false",),
    "remote.log.copy.disable": ("false",),
    "remote.log.delete.on.disable": ("false",),
    "local.retention.ms": ("-2",),
    "local.retention.bytes": ("-2",),
    "internal.segment.bytes": None,
}
_INT32 = {
    *("segment_bytes", "segment_index_bytes", "index_interval_bytes", "max_message_bytes"),
    *("compression_gzip_level", "compression_lz4_level", "compression_zstd_level"),
    *("max_decompressed_message_bytes", "min_insync_replicas"),
}


def taken(settings: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the settings of a new topic that are kept.  ConfigError names what is refused."""
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None:
            raise ConfigError(f"{name} has no value")
        if is_ignored(name, value):
            continue
        kept[name] = value
    PartitionConfig.of(kept)
    return kept


def is_ignored(name: str, value: str) -> bool:
    """Whether a setting is accepted and not kept."""
    if name not in _IGNORED:
        return False
    allowed = _IGNORED[name]
    if allowed is not None and value not in allowed:
        raise ConfigError(f"{name} must be {' or '.join(allowed)} here, not {value}")
    return True


def type_of(field: dataclasses.Field[Any]) -> int:
    """Return the number of a setting's type in Kafka's protocol."""
    if "policies" in field.metadata:
        return LIST
    kind: type = type(field.default)
    if kind is bool:
        return BOOLEAN
    if kind is float:
        return DOUBLE
    if kind is int:
        return INT if field.name in _INT32 else LONG
    return STRING


def text(value: object) -> str:
    """Return a value as Kafka writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def documentation(field: dataclasses.Field[Any]) -> str:
    """Return what a setting does."""
    return f"see {dotted(field.name)} in the documentation of logstore's configuration"


def described(config: PartitionConfig, own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every setting of a topic, with where its value is from."""
    given = {str(name).replace("_", ".") for name in own}
    for field in dataclasses.fields(config):
        name = dotted(field.name)
        yield {
            "name": name,
            "value": text(getattr(config, field.name)),
            "read_only": False,
            "is_default": name not in given,
            "config_source": FROM_TOPIC if name in given else FROM_DEFAULT,
            "is_sensitive": False,
            "config_type": type_of(field),
            "documentation": documentation(field),
            "default": text(field.default),
        }
