"""refusal: an error as the answer of any API, in the shape that the API has for errors.

The shape comes from the schemas.  An API whose response has one error code gets it there.  Most
others have an error for each topic, partition, group or setting that was asked for: the rows of the
request are repeated in the response, with the error in each.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.protocol.schema import Field, message

__all__ = ["error_codes", "refusal"]

ERROR_NAMES = ("error_code", "partition_error_code")
# Fields of a row of the request that its row in the response repeats, by their names there.
_KEYS = frozenset(
    {
        *("name", "topic_id", "partition", "group_id", "key", "transactional_id", "producer_id"),
        *("resource_type", "resource_name", "member_id", "group_instance_id"),
    }
)
_SAME = {"topic": "name", "topic_name": "name"} | dict.fromkeys(
    ("index", "partition_index", "partition_id"), "partition"
)
# The error of the response as a whole is about fetch sessions and bootstrapping: clients look for
# the others in the rows.
_ROWS_FIRST = frozenset({1, 3})
# Numbers that Kafka sends with an error, where the schema's default is another one.
_UNKNOWN = {
    **dict.fromkeys(("base_offset", "high_watermark", "low_watermark", "node_id", "port"), -1),
    **dict.fromkeys(("producer_epoch", "controller_id"), -1),
}
_NAMES_OF_TYPE = {str: ("string",), bytes: ("uuid",), int: ("int32",)}


def refusal(
    key: int, version: int, request: dict[str, Any], code: ErrorCode, text: str | None
) -> dict[str, Any]:
    """Return the response of an API that failed as a whole."""
    fields = [each for each in message(key, "response").fields if version in each.versions]
    own = _own(fields, version, code, text)
    if any(name in own for name in ERROR_NAMES) and key not in _ROWS_FIRST:
        return own
    answer: dict[str, Any] = {}
    for field in fields:
        if _has_error(field, version):
            answer[field.name] = _rows(field, version, request, code, text)
    return answer if any(answer.values()) else own | answer


def error_codes(key: int, answer: dict[str, Any]) -> list[int]:
    """Return the error codes of a response that are not 0."""
    found: list[int] = []
    _collect(_places(key), answer, found)
    return found


# The names of error codes in a struct, and the arrays of it that have some.
_Places: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, _Places], ...]]"


@functools.cache
def _places(key: int) -> _Places:
    return _places_in(message(key, "response").fields)


def _places_in(fields: tuple[Field, ...]) -> _Places:
    arrays = [(each.name, _places_in(each.fields)) for each in fields if each.array]
    return (
        tuple(each.name for each in fields if each.name in ERROR_NAMES),
        tuple((name, places) for name, places in arrays if any(places)),
    )


def _collect(places: _Places, given: dict[str, Any], found: list[int]) -> None:
    names, arrays = places
    for name in names:
        if given.get(name):
            found.append(int(given[name]))
    for name, inner in arrays:
        for each in given.get(name) or ():
            _collect(inner, each, found)


def _has_error(field: Field, version: int) -> bool:
    """Return whether the elements of an array have an error code, at any depth."""
    return field.array and any(
        version in each.versions and (each.name in ERROR_NAMES or _has_error(each, version))
        for each in field.fields
    )


def _own(fields: list[Field], version: int, code: ErrorCode, text: str | None) -> dict[str, Any]:
    """Return the fields of a struct that every error has."""
    own: dict[str, Any] = {}
    for field in fields:
        if field.name in ERROR_NAMES:
            own[field.name] = code
        elif field.name == "error_message":
            own[field.name] = text if text or version in field.nullable else ""
        elif field.name in _UNKNOWN:
            own[field.name] = _UNKNOWN[field.name]
        elif field.default == "null" and version not in field.nullable:
            own[field.name] = [] if field.array else "" if field.type == "string" else b""
    return own


def _rows(
    field: Field, version: int, request: dict[str, Any], code: ErrorCode, text: str | None
) -> list[dict[str, Any]]:
    """Return a row for each row of the first array of the request that has some."""
    given: list[Any] = next(
        (value for value in request.values() if isinstance(value, list) and value), []
    )
    fields = [each for each in field.fields if version in each.versions]
    keys = {_SAME.get(each.name, each.name): each for each in fields}
    rows: list[dict[str, Any]] = []
    for element in given:
        row = _own(fields, version, code, text)
        if not isinstance(element, dict):
            rows.append(row | _named(element, fields))
            continue
        known = {_SAME.get(name, name): value for name, value in element.items()}
        repeated = {keys[name].name: known[name] for name in _KEYS & keys.keys() & known.keys()}
        if not repeated:  # the rows are one level further down
            rows += _rows(field, version, element, code, text)
            continue
        row |= {name: value for name, value in repeated.items() if value is not None}
        if not any(name in row for name in ERROR_NAMES):
            for each in fields:
                if _has_error(each, version):
                    row[each.name] = _rows(each, version, element, code, text)
        rows.append(row)
    return rows


def _named(element: object, fields: list[Field]) -> dict[str, Any]:
    """Return the field of a row that has the name or number of what was asked for."""
    types = _NAMES_OF_TYPE[type(element)]
    for field in fields:
        if field.type in types and not field.array and field.name != "error_message":
            return {field.name: element}
    return {}
