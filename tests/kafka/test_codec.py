"""The codec: every message and version, encoded and decoded, and frames of a hostile peer."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import Any

import pytest

from logstore.kafka.protocol import codec, schema
from logstore.kafka.protocol.codec import MALFORMED, decoder, default_of, encoder
from logstore.kafka.protocol.schema import Field, Message, Versions
from tests.campaign import sized

MESSAGES = schema.messages()


def a_value(field: Field, version: int, chance: random.Random, *, element: bool = False) -> Any:
    """Return a random value that a field can have."""
    nullable = version in field.nullable and not element
    if nullable and chance.random() < 0.2:
        return None
    if field.array and not element:
        return [a_value(field, version, chance, element=True) for _ in range(chance.randrange(3))]
    if field.fields:
        return a_body(field.fields, version, chance)
    if field.type == "string":
        return chance.choice(["", "a", "schön", "x" * 200])
    if field.type in ("bytes", "records"):
        return chance.randbytes(chance.randrange(300))
    if field.type == "bool":
        return chance.random() < 0.5
    if field.type == "uuid":
        return chance.randbytes(16)
    if field.type == "float64":
        return chance.random()
    bits = int(field.type.lstrip("uint"))
    number = chance.getrandbits(bits - 1)
    return number if field.type.startswith("u") or chance.random() < 0.5 else -number


def a_body(fields: tuple[Field, ...], version: int, chance: random.Random) -> dict[str, Any]:
    return {
        field.name: (
            a_value(field, version, chance)
            if version in field.versions
            else default_of(field, version)
        )
        for field in fields
    }


def plain(value: Any) -> Any:
    """Return a decoded value with bytes in the place of views."""
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


def encoded(message: Message, version: int, body: dict[str, Any]) -> bytes:
    out = bytearray()
    encoder(message.key, message.kind, version)(body, out, [])
    return bytes(out)


def decoded(message: Message, version: int, data: bytes) -> dict[str, Any]:
    body, end = decoder(message.key, message.kind, version)(memoryview(data), 0, len(data))
    assert end == len(data)
    return body


def versions_of(message: Message) -> range:
    return range(message.versions.first, message.versions.last + 1)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: f"{m.name}-{m.kind}")
def test_every_version_is_decoded_as_it_was_encoded(message: Message) -> None:
    chance = random.Random(message.key)
    for version in versions_of(message):
        for _ in range(sized(4, 20, 200)):
            body = a_body(message.fields, version, chance)
            assert plain(decoded(message, version, encoded(message, version, body))) == body


def test_missing_fields_are_encoded_as_their_defaults() -> None:
    for message in MESSAGES:
        for version in versions_of(message):
            body = {field.name: default_of(field, version) for field in message.fields}
            assert encoded(message, version, {}) == encoded(message, version, body)
            assert plain(decoded(message, version, encoded(message, version, {}))) == body


def test_records_are_not_copied() -> None:
    produce = schema.message(0, "request")
    records = b"r" * 1000
    body = {"topic_data": [{"name": "t", "partition_data": [{"index": 0, "records": records}]}]}
    data = bytearray(encoded(produce, 9, body))
    found, _ = decoder(0, "request", 9)(memoryview(data), 0, len(data))
    view = found["topic_data"][0]["partition_data"][0]["records"]
    data[data.index(b"rrr")] = ord("s")
    assert bytes(view[:3]) == b"srr"


def test_a_hole_is_left_for_records_in_a_file() -> None:
    class Slice:
        size_bytes = 5

    body = {"responses": [{"topic": "t", "partitions": [{"records": Slice()}]}]}
    for version in (4, 11, 12, 16):
        out, holes = bytearray(), []
        encoder(1, "response", version)(body, out, holes)
        [(position, hole)] = holes
        whole = bytes(out[:position]) + b"abcde" + bytes(out[position:])
        found, end = decoder(1, "response", version)(memoryview(whole), 0, len(whole))
        assert end == len(whole)
        assert isinstance(hole, Slice)
        assert bytes(found["responses"][0]["partitions"][0]["records"]) == b"abcde"


def test_a_count_above_what_the_frame_can_hold_costs_nothing() -> None:
    """A request of 25 bytes claims 2^31 - 1 topics."""
    for version, head in ((1, b"\x7f\xff\xff\xff"), (9, b"\xff\xff\xff\xff\x07")):
        frame = memoryview(head + bytes(20))
        began = time.process_time()
        with pytest.raises(MALFORMED):
            decoder(3, "request", version)(frame, 0, len(frame))
        assert time.process_time() - began < 5


def test_a_frame_has_a_limited_number_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    names = encoded(schema.message(15, "request"), 0, {"groups": [""] * 200_001})
    with pytest.raises(codec.MalformedFrameError, match="more than 200000 elements"):
        decoder(15, "request", 0)(memoryview(names), 0, len(names))


def test_the_end_of_the_frame_counts_and_not_the_end_of_the_buffer() -> None:
    """The next request may lie behind this one in the buffer."""
    body = encoded(schema.message(3, "request"), 9, {"topics": [{"name": "topic"}]})
    for end in range(len(body)):
        try:
            _, at = decoder(3, "request", 9)(memoryview(body + bytes(100)), 0, end)
        except MALFORMED:
            continue
        assert at > end, "a request that is cut off was decoded"


@pytest.mark.campaign
def test_mutated_frames_raise_and_cost_no_more_than_their_bytes() -> None:
    chance = random.Random(7)
    requests = [message for message in MESSAGES if message.kind == "request"]
    for _ in range(sized(5_000, 150_000, 500_000)):
        message = chance.choice(requests)
        version = chance.choice(versions_of(message))
        data = bytearray(encoded(message, version, a_body(message.fields, version, chance)))
        for _ in range(chance.randrange(1, 4)):
            how = chance.randrange(3)
            if how == 0 and data:
                data[chance.randrange(len(data))] = chance.randrange(256)
            elif how == 1:
                del data[chance.randrange(len(data) + 1) :]
            else:
                at = chance.randrange(len(data) + 1)
                data[at:at] = chance.choice([b"\xff" * 5, b"\x7f\xff\xff\xff", b"\0\0", b"\x80"])
        with contextlib.suppress(MALFORMED):
            decoder(message.key, "request", version)(memoryview(data), 0, len(data))


def test_versions_are_parsed() -> None:
    assert [v for v in range(-1, 9) if v in Versions.parse("2-5")] == [2, 3, 4, 5]
    assert 32767 in Versions.parse("3+")
    assert 2 not in Versions.parse("3+")
    assert [v for v in range(9) if v in Versions.parse("4")] == [4]
    assert not [v for v in range(-1, 9) if v in Versions.parse("none")]


def test_the_table_holds_only_names_that_can_be_generated_code() -> None:
    with pytest.raises(AssertionError):
        schema._field(json.loads('{"name": "x = 1", "type": "int8", "versions": "0+"}'))
