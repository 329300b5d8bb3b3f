"""The language that picks records, and times as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore import Record
from logstore.times import parse_duration, parse_time, time_text
from logstore.where import Where, WhereError

NOW = 1_770_000_000_000
RECORD = Record(
    b'{"id": 7, "name": "Ann", "tags": ["a", "b"], "deep": {"x": [1, {"y": true}]}, "no": null}',
    key=b"alice",
    headers=[("source", b"web-1"), ("source", b"web-2"), ("odd name", None)],
    timestamp=NOW - 60_000,
)


@pytest.mark.parametrize(
    "text",
    [
        'key == "alice"',
        "key == 'alice'",
        'key != "bob" and key < "bob" and key >= "alice"',
        'header.source == "web-2"',
        'header.source =~ /^web-\\d$/ and header.source !~ /WEB/',
        "header.source =~ /WEB/i",
        'header["odd name"] == null and header.missing == null',
        "$.id > 3 and $.id <= 7.0 and $.id in [1, 7]",
        '$.name == "Ann" and $.name startswith "A" and $.name endswith "n"',
        '$.tags[0] == "a" and $.tags[-1] == "b" and $.tags contains "b"',
        '$.deep.x[1].y == true and $["deep"]["x"][0] == 1',
        "$.deep.x[1].y",
        "$.no == null and $.missing == null and not $.no",
        'value contains "Ann" and length(value) > 10 and length(key) == 5',
        'timestamp > "-2m" and timestamp < "-30s"',
        f"timestamp == {NOW - 60_000}",
        'not key == "bob" and !(key == "carl")',
        'key == "bob" or key == "carl" or key == "alice"',
        'key == "alice" || nothing' if False else 'key == "bob" || key == "alice" && $.id == 7',
        'not (key == "alice" and $.id == 8)',
        '$.id != "7"',
        '$.name != 3 and not $.name < 3',
        "$key == null",
        "partition == null",
        'value =~ "An+"',
        r'"a\nb\u0041" == "a' + "\n" + r'bA"',
    ],
)  # fmt: skip
def test_a_record_that_is_meant(text: str) -> None:
    assert Where(text, now_ms=NOW)(RECORD) is True


@pytest.mark.parametrize(
    "text",
    [
        'key == "bob"',
        "$.id > 7",
        '$.id == "7"',
        "$.missing > 1",
        "$.missing",
        "$.name > 3",
        "$.tags == 3",
        "$.tags[9]",
        "$.tags.x",
        "$[0]",
        'header.missing =~ /./ or header.missing == ""',
        'timestamp > "now"',
        'key =~ /^lice/',
        "not key",
    ],
)  # fmt: skip
def test_a_record_that_is_not_meant(text: str) -> None:
    assert Where(text, now_ms=NOW)(RECORD) is False


def test_null_and_empty_differ() -> None:
    tombstone, empty = Record(None, key=b"k"), Record(b"", key=b"k")
    assert Where("value == null")(tombstone)
    assert not Where("value == null")(empty)
    assert Where('value == ""')(empty)
    assert Where("length(value) == -1")(tombstone)
    assert not Where("$.x == 1")(tombstone)


def test_bytes_that_are_no_text_are_searched_all_the_same() -> None:
    record = Record(b"\xff\x00needle\xfe")
    assert Where("value =~ /needle/")(record)
    assert Where('value contains "needle"')(record)
    assert not Where("$.a == 1")(record)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is nothing"),
        ("key ==", "a value is missing"),
        ("key == alice", "'alice' is no field"),
        ("keys == 1", "'keys' is no field"),
        ("(key == 1", "')' is missing"),
        ("key == 1)", "too much"),
        ("key == 1 2", "too much"),
        ("key =~ 3", "regular expression"),
        ("key =~ /(/", "no regular expression"),
        ("key =~ /a/x", "flags 'x'"),
        ("key == `x`", "not understood"),
        ("header.", "name of a header"),
        ("header[3]", "in quotes"),
        ("$.", "a name is missing"),
        ("$[x]", "a number or a name"),
        ("key in 3", "'[' is missing"),
        ("key in [1 2]", "',' is missing"),
        ('timestamp > "soon"', "is not a time"),
        ("(" * 200 + "key" + ")" * 200, "levels"),
        ("not " * 200 + "key", "levels"),
        ("k" * 20_000, "longer than"),
        ('__import__("os").system("x")', "is no field"),
        ('key.__class__ == "x"', "too much"),
    ],
)
def test_what_makes_no_sense_is_refused_and_says_where(text: str, reason: str) -> None:
    with pytest.raises(WhereError) as caught:
        Where(text)
    assert reason in str(caught.value)
    assert 0 <= caught.value.position <= len(text)


@given(st.text(alphabet="()[]!=<>~/\"'$.,key andornt01\\", max_size=40) | st.text(max_size=40))
def test_any_text_is_an_expression_or_a_where_error(text: str) -> None:
    try:
        made = Where(text, now_ms=NOW)
    except WhereError:
        return
    assert made(RECORD) in (True, False)


# ---- times ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("-15m", NOW - 900_000),
        ("+1h30m", NOW + 5_400_000),
        ("-1.5s", NOW - 1500),
        ("-1w", NOW - 604_800_000),
        ("1770000000000", NOW),
        ("@5", 5),
        ("2026-02-02T02:40:00Z", NOW),
        ("2026-02-02T02:40", NOW),
        ("2026-02-02 03:40:00.000+01:00", NOW),
        ("1969-12-31T23:59:59.999Z", -1),
        ("0001-01-01", -62_135_596_800_000),
    ],
)
def test_times(text: str, expected: int) -> None:
    assert parse_time(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "soon", "-15", "15m", "-m", "-1y", "2026-13-01", "1e5", "٣"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_time(text, NOW)


@given(st.integers(-62_135_596_800_000, 253_402_300_799_999))
def test_a_time_that_is_shown_can_be_typed(time_ms: int) -> None:
    assert parse_time(time_text(time_ms)) == time_ms


def test_durations() -> None:
    assert parse_duration("1d2h") == 93_600_000
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration("5")
    assert time_text(10**18) == str(10**18)
