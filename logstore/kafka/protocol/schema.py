"""Schema: the fields of Kafka's messages, by version.

`schemas.json` holds the message definitions of Apache Kafka, stripped; its head names the version
that they were taken from.  This module turns them into objects and does nothing else.
"""

from __future__ import annotations

import functools
import json
import pkgutil
import re
from typing import Any, NamedTuple

__all__ = ["Field", "Message", "Versions", "message", "messages"]

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_NEWEST = 32767


class Versions(NamedTuple):
    """A range of versions, both ends included.  An empty range has `first` above `last`."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Versions:
        if text == "none":
            return cls(1, 0)
        first, _, last = text.partition("-")
        if first.endswith("+"):
            return cls(int(first[:-1]), _NEWEST)
        return cls(int(first), int(last or first))

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


class Field(NamedTuple):
    """One field of a message or of a struct inside it."""

    name: str
    type: str  # without the "[]" of an array
    array: bool
    versions: Versions
    nullable: Versions
    tagged: Versions
    tag: int
    default: str | None  # as Kafka writes it; None: the zero of its type
    fields: tuple[Field, ...]  # of a struct


class Message(NamedTuple):
    """A request or a response."""

    key: int
    name: str
    kind: str  # "request" or "response"
    versions: Versions
    flexible: Versions
    fields: tuple[Field, ...]


def _field(raw: dict[str, Any]) -> Field:
    # Names end up in generated code.
    assert _NAME.fullmatch(raw["name"]), raw["name"]
    kind: str = raw["type"]
    return Field(
        name=raw["name"],
        type=kind.removeprefix("[]"),
        array=kind.startswith("[]"),
        versions=Versions.parse(raw["versions"]),
        nullable=Versions.parse(raw.get("nullable", "none")),
        tagged=Versions.parse(raw.get("tagged", "none")),
        tag=raw.get("tag", -1),
        default=raw.get("default"),
        fields=tuple(_field(each) for each in raw.get("fields", ())),
    )


@functools.cache
def _raw() -> dict[tuple[int, str], dict[str, Any]]:
    table = pkgutil.get_data(__package__, "schemas.json")
    assert table is not None
    return {(each["key"], each["kind"]): each for each in json.loads(table)["messages"]}


@functools.cache
def message(key: int, kind: str) -> Message:
    """Return the schema of a request or response.  KeyError: the table does not have it."""
    raw = _raw()[key, kind]
    return Message(
        key=key,
        name=raw["name"],
        kind=kind,
        versions=Versions.parse(raw["versions"]),
        flexible=Versions.parse(raw["flexible"]),
        fields=tuple(_field(each) for each in raw["fields"]),
    )


def messages() -> list[Message]:
    """Return every schema of the table."""
    return [message(key, kind) for key, kind in _raw()]
