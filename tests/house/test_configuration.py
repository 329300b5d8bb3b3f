"""Settings: Kafka's names and bounds, errors that name the bounds, docs that agree."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from logstore import ConfigError, PartitionConfig
from logstore.config import INT64_MAX, dotted

PAGE = Path(__file__).parent.parent.parent / "docs" / "configuration.md"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"retention.ms": -2}, "retention.ms must be from -1 to 9223372036854775807, not -2"),
        ({"segment.bytes": "big"}, "segment.bytes must be an int, not 'big'"),
        ({"segment.bytes": True}, "segment.bytes must be an int, not True"),
        ({"min.cleanable.dirty.ratio": 1.5}, "must be from 0.0 to 1.0, not 1.5"),
        ({"min.cleanable.dirty.ratio": "nan"}, "must be a number, not nan"),
        ({"cleanup.policy": "compress"}, "a list of compact, delete, not 'compress'"),
        ({"cleanup.policy": ""}, "a list of compact, delete, not ''"),
        ({"cleanup.policy": []}, "a list of compact, delete, not []"),
        ({"compression.gzip.level": 0}, "from 1 to 9, or -1, not 0"),
        ({"compression.lz4.level": 18}, "from 1 to 17, not 18"),
        ({"compression.type": "brotli"}, "producer, uncompressed, none, gzip, snappy, lz4, zstd"),
        ({"preallocate": "maybe"}, "preallocate must be true or false, not 'maybe'"),
        ({"min.compaction.lag.ms": 5, "max.compaction.lag.ms": 4}, "at most max.compaction.lag.ms"),
        ({"retention.msec": 5}, "did you mean 'retention.ms'?"),
        ({"cleanup_policies": "delete"}, "did you mean 'cleanup.policy'?"),
        ({"xyzzy": 1}, "known are cleanup.policy, compression.gzip.level"),
        ([("segment.bytes", 1 << 20)], "a PartitionConfig or a mapping"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        PartitionConfig.of(settings)


def test_text_is_read_as_the_type_of_its_setting() -> None:
    config = PartitionConfig.of(
        {
            "segment.bytes": " 4096 ",
            "preallocate": "TRUE",
            "min.cleanable.dirty.ratio": "0.25",
            "cleanup.policy": "delete, compact",
        }
    )
    assert config == PartitionConfig(
        segment_bytes=4096,
        preallocate=True,
        min_cleanable_dirty_ratio=0.25,
        cleanup_policy="compact,delete",
    )
    assert config.compacts and config.deletes


@pytest.mark.parametrize(
    ("given", "kept", "compacts", "deletes"),
    [
        ("delete", "delete", False, True),
        ("compact", "compact", True, False),
        (["delete", "compact"], "compact,delete", True, True),
        ("compact,compact", "compact", True, False),
    ],
)
def test_the_cleanup_policy_is_a_list(given: Any, kept: str, compacts: bool, deletes: bool) -> None:
    config = PartitionConfig.of({"cleanup.policy": given})
    assert (config.cleanup_policy, config.compacts, config.deletes) == (kept, compacts, deletes)


def test_settings_are_changed_one_by_one_and_reset_by_none() -> None:
    config = PartitionConfig(segment_bytes=4096, retention_ms=5)
    changed = config.with_settings({"retention_bytes": 100, "segment.bytes": None})
    assert changed.changed() == {"retention.ms": 5, "retention.bytes": 100}
    assert config.changed() == {"segment.bytes": 4096, "retention.ms": 5}, "left as it was"
    assert PartitionConfig().changed() == {}
    assert PartitionConfig.of(config.as_dict()) == config


def test_levels_belong_to_their_codecs() -> None:
    config = PartitionConfig(compression_zstd_level=9)
    levels = {codec: config.compression_level(codec) for codec in ("gzip", "lz4", "zstd", "snappy")}
    assert levels == {"gzip": -1, "lz4": 9, "zstd": 9, "snappy": None}


def documented() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([a-z.0-9]+)` \| (\S+) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {name: (default, allowed) for name, default, allowed in rows}


def shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def bounds(field: dataclasses.Field[Any]) -> str:
    rule = field.metadata
    if "policies" in rule:
        return ", ".join(rule["policies"]) + ", or both"
    if "choices" in rule:
        return ", ".join(rule["choices"])
    if isinstance(field.default, bool):
        return "true, false"
    if rule["most"] == INT64_MAX:
        return f"from {rule['least']}"
    return f"{rule['least']} to {rule['most']}" + (", or -1" if rule.get("but") == -1 else "")


def test_the_page_lists_every_setting_with_its_default_and_bounds() -> None:
    table = documented()
    fields = {dotted(field.name): field for field in dataclasses.fields(PartitionConfig)}
    assert list(table) == list(fields)
    for name, field in fields.items():
        default, allowed = table[name]
        assert default == shown(field.default), name
        assert allowed.startswith(bounds(field)), name
