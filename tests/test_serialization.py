"""Serializers and interceptors: what producers and consumers put in front of the log."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.config import ConfigError
from logstore.interceptors import InterceptorChain, Outgoing
from logstore.record import Record
from logstore.serialization import SERDES, SerializationError, deserializer, serializer

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bytes", st.binary()),
        ("string", st.text()),
        ("integer", st.integers(-(2**31), 2**31 - 1)),
        ("long", st.integers(-(2**63), 2**63 - 1)),
        ("double", st.floats(allow_nan=False)),
        ("json", json_values),
    ],
)
def test_a_serde_gives_back_what_it_was_given(name: str, values: st.SearchStrategy[Any]) -> None:
    write, read = serializer(name), deserializer(name)
    assert write is not None and read is not None

    @settings(max_examples=40)
    @given(values)
    def there_and_back(value: Any) -> None:
        data = write(value)
        assert isinstance(data, bytes)
        assert read(data) == value

    there_and_back()


def test_numbers_are_those_of_kafkas_serializers() -> None:
    assert SERDES["integer"].serialize(1) == b"\0\0\0\1"
    assert SERDES["long"].serialize(-2) == b"\xff" * 7 + b"\xfe"
    assert SERDES["double"].serialize(1.5) == struct.pack(">d", 1.5)
    with pytest.raises(ValueError, match="integer takes 4 bytes, not 3"):
        SERDES["integer"].deserialize(b"abc")


def test_a_callable_is_taken_as_it_is_and_a_wrong_name_is_told() -> None:
    assert serializer(str.encode) is not None
    assert serializer(str.encode)("x") == b"x"  # type: ignore[misc]
    assert serializer(None) is None and deserializer(None) is None
    with pytest.raises(ConfigError, match="'string', 'integer'"):
        serializer("avro")


def test_an_error_says_whose_it_was() -> None:
    sent = SerializationError(ValueError("no"), part="key", topic="t", data={"a": 1})
    assert "key of a record of t (dict): ValueError: no; nothing was sent" in str(sent)
    read = SerializationError(ValueError("no"), part="value", topic="t", data=b"x", partition=3,
                              offset=41)  # fmt: skip
    assert "t-3 offset 41" in str(read) and "seek to 42" in str(read)
    assert (read.partition, read.offset, read.data) == (3, 41, b"x")


class Adds:
    """Adds a header; remembers the calls that it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[object] = []

    def on_send(self, outgoing: Outgoing) -> Outgoing:
        return outgoing._replace(headers=(*outgoing.headers, (self.name, b"")))

    def on_acknowledgement(self, position: object, error: BaseException | None) -> None:
        self.told.append((position, error))


def test_a_chain_goes_in_order_and_leaves_out_what_is_not_there() -> None:
    class OnlyConsumes:
        def on_consume(self, records: list[Record]) -> list[Record]:
            return records[1:]

    first, second = Adds("first"), Adds("second")
    chain = InterceptorChain([first, OnlyConsumes(), second])
    sent = chain.on_send(Outgoing("t", b"v"))
    assert [name for name, _ in sent.headers] == ["first", "second"]
    chain.on_acknowledgement(("t", 0, 5), None)
    assert first.told == second.told == [(("t", 0, 5), None)]
    assert chain.on_consume([Record(b"a"), Record(b"b")]) == [Record(b"b")]
    assert chain.commit_watchers == ()
    chain.on_commit({})


def test_one_that_changes_and_fails_stops_the_record() -> None:
    class Refuses:
        def on_send(self, outgoing: Outgoing) -> Outgoing:
            raise PermissionError("not this one")

    with pytest.raises(PermissionError):
        InterceptorChain([Adds("a"), Refuses()]).on_send(Outgoing("t", b"v"))


def test_one_that_watches_and_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Fails:
        def on_acknowledgement(self, position: object, error: object) -> None:
            raise RuntimeError("lost count")

    last = Adds("last")
    with caplog.at_level(logging.ERROR, "logstore.interceptors"):
        InterceptorChain([Fails(), last]).on_acknowledgement(None, OSError("x"))
    assert len(last.told) == 1
    assert "Fails.on_acknowledgement failed" in caplog.text


@pytest.mark.parametrize("hook", [lambda self, got: None, lambda self, got: 3])
def test_what_a_hook_returns_is_checked(hook: Callable[[object, object], object]) -> None:
    kind = type("Wrong", (), {"on_send": hook, "on_consume": hook})
    chain = InterceptorChain([kind()])
    with pytest.raises(TypeError, match="must return an Outgoing"):
        chain.on_send(Outgoing("t", b"v"))
    with pytest.raises(TypeError, match="must return a sequence"):
        chain.on_consume([])
    with pytest.raises(ConfigError, match="has none of on_send"):
        InterceptorChain([object()])
