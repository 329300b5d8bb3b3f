"""refused_records: the records of a batch that break a rule of the topic."""

from __future__ import annotations

import pytest

from logstore import BatchEncoder, PartitionConfig, Record
from logstore.format import validation
from logstore.format.validation import refused_records

NOW = 1_000_000


def batch(*rows: tuple[bytes | None, int], codec: str | None = None) -> bytes:
    encoder = BatchEncoder(compression=codec)
    encoder.extend([Record(b"value", key=key, timestamp=when) for key, when in rows])
    return encoder.take()


def refused(raw: bytes, **settings: object) -> list[tuple[int, str]]:
    config = PartitionConfig(**settings)  # type: ignore[arg-type]
    return [(place, reason) for place, reason, _ in refused_records(raw, config, NOW)]


@pytest.mark.parametrize("codec", [None, "gzip", "lz4"])
def test_each_record_is_asked_for_its_key_and_then_for_its_time(codec: str | None) -> None:
    rows = [(b"k", NOW), (None, NOW), (b"k", NOW - 500), (None, NOW - 500), (b"", NOW + 500)]
    raw = batch(*rows, codec=codec)
    limits = {"message_timestamp_before_max_ms": 100, "message_timestamp_after_max_ms": 100}
    assert refused(raw) == []
    assert refused(raw, cleanup_policy="compact") == [(1, "key"), (3, "key")]
    times = [(2, "timestamp"), (3, "timestamp"), (4, "timestamp")]
    assert refused(raw, **limits) == times
    both = [(1, "key"), (2, "timestamp"), (3, "key"), (4, "timestamp")]
    assert refused(raw, cleanup_policy="compact", **limits) == both
    assert refused(raw, message_timestamp_type="LogAppendTime", **limits) == []


def test_a_batch_with_many_of_them_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = batch(*[(None, NOW)] * 20)
    monkeypatch.setattr(validation, "REFUSED_MAX", 5)
    assert len(refused(raw, cleanup_policy="compact")) == 5
    monkeypatch.setattr(validation, "LOOKED_AT_MAX", 3)
    assert len(refused(raw, cleanup_policy="compact")) == 3
