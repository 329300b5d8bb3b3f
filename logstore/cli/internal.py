"""Decode the records of Kafka's internal topics: committed offsets, groups, transactions."""

from __future__ import annotations

import dataclasses
from typing import Any

from logstore.cli.messages import field_of
from logstore.errors import LogStoreError

__all__ = ["meaning_of"]


def meaning_of(topic: str, key: bytes | None, value: bytes | None) -> dict[str, Any] | None:
    """Return the fields of an internal topic's record; None if it cannot be decoded."""
    if key is None:
        return None
    try:
        if topic == "__consumer_offsets":
            return _of_group(key, value)
        if topic == "__transaction_state":
            return _of_transaction(key, value)
    except (LogStoreError, ValueError, IndexError):
        pass  # a version that we do not know: the caller prints the bytes
    return None


def _of_group(key: bytes, value: bytes | None) -> dict[str, Any] | None:
    from logstore.coordinators.offset_records import (
        CommittedOffset,
        GroupMetadata,
        OffsetKey,
        parse_key,
    )

    about = parse_key(key)
    if about is None:
        return None
    if isinstance(about, OffsetKey):
        found: Any = None if value is None else CommittedOffset.decode(value)
        return {"offset_of": about._asdict(), "committed": _plain(found)}
    found = None if value is None else GroupMetadata.decode(value)
    return {"group": about.group, "metadata": _plain(found)}


def _of_transaction(key: bytes, value: bytes | None) -> dict[str, Any] | None:
    from logstore.coordinators.transaction_state import TransactionMetadata, decode_key

    name = decode_key(key)
    if name is None:
        return None
    found = None if value is None else TransactionMetadata.decode(name, value)
    content = _plain(found)
    if found is not None and content is not None:
        content["state"] = found.state.kafka_name
    return {"transactional_id": name, "state": content}


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else _as_json(dataclasses.asdict(found))


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return field_of(value)
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(_as_json(each) for each in value)
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value
