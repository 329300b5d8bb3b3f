"""`logstore write` and `logstore read`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logstore
from logstore import Record
from logstore.cli.messages import formatter, message_of, record_to_json
from logstore.cli.text import json_text
from tests.cli.conftest import NOON, Command, golden
from tests.kit import flip


def records(command: Command, topic: str = "orders") -> list[Record]:
    with logstore.open(command.store, readonly=True) as store:
        return [record for log in store[topic] for record in log]


# ---- write ----


def test_lines_become_records(command: Command) -> None:
    command("topic", "create", "orders")
    command("write", "orders", input=b"one\n\ntwo\r\nthree")
    assert [r.value for r in records(command)] == [b"one", b"", b"two\r", b"three"]


def test_keys_headers_times_and_tombstones(command: Command) -> None:
    command("topic", "create", "orders")
    done = command("write", "orders", "-K", ":", "-H", "a=1", "-H", "none", "-t", NOON, "-Z", "-v",
                   input=b"k:v:w\nk:\n")  # fmt: skip
    assert done.rows == [
        {"topic": "orders", "partition": 0, "offset": 0},
        {"topic": "orders", "partition": 0, "offset": 1},
    ]
    first, second = records(command)
    assert (first.key, first.value) == (b"k", b"v:w")
    assert first.headers == (("a", b"1"), ("none", None))
    assert first.timestamp == NOON
    assert (second.key, second.value) == (b"k", None)


def test_delimiters_are_typed_as_in_kcat(command: Command) -> None:
    command("topic", "create", "orders")
    command("write", "orders", "-K", r"\t", input=b"a\tb\n")
    command("write", "orders", "-K", r"\x1f=\\", input=b"c\x1f=\\d\n")
    assert [(r.key, r.value) for r in records(command)] == [(b"a", b"b"), (b"c", b"d")]


def test_a_file_that_is_missing_is_found_out_first(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n")
    command("topic", "create", "orders")
    missing = command("write", "orders", tmp_path / "a", tmp_path / "b", code=2)
    assert f"{tmp_path / 'b'}: no such file" in missing.err
    assert records(command) == []


def test_files_are_read_in_their_order(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1\n2\n")
    (tmp_path / "b").write_bytes(b"3")
    command("write", "--create", "orders", tmp_path / "a", tmp_path / "b")
    assert [r.value for r in records(command)] == [b"1", b"2", b"3"]
    command("write", "orders", "--format", "raw", "-k", "whole", tmp_path / "a")
    assert records(command)[-1].value == b"1\n2\n"


def test_offsets_are_told_over_several_partitions(command: Command) -> None:
    command("topic", "create", "orders", "-p", 3)
    done = command("write", "orders", "-K:", "-v", input=b"".join(b"%d:x\n" % i for i in range(50)))
    places = [(row["partition"], row["offset"]) for row in done.rows]
    assert len(places) == 50
    with logstore.open(command.store, readonly=True) as store:
        for i, (partition, offset) in enumerate(places):
            assert store["orders"][partition][offset].key == b"%d" % i


def test_a_bad_line_is_named_and_those_before_it_are_kept(command: Command) -> None:
    command("topic", "create", "orders")
    bad = command("write", "orders", "-K:", "-v", input=b"a:1\nb:2\nc3\nd:4\n", code=1)
    assert "no ':' in 'c3'" in bad.err
    assert "stdin, line 3; 2 records before it are in the log" in bad.err
    assert [row["offset"] for row in bad.rows] == [0, 1]
    assert len(records(command)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"[]", "a record must be a JSON object"),
        (b"{}", 'there is no "value"'),
        (b'{"value":"x","valu":1}', "unknown 'valu'"),
        (b'{"value":{"base64":"!"}}', "not base64"),
        (b'{"value":"x","partition":"0"}', "partition must be a number"),
        (b'{"value":"x","timestamp":1.5}', "timestamp must be"),
        (b'{"value":"x","timestamp":"soon"}', "is not a time"),
        (b'{"value":"x","headers":[["a"]]}', "a header is [name, value]"),
        (b'{"value":"x","headers":3}', "headers must be"),
        (b'{"value":null}', "tombstone"),
        (b'{"value":"x","partition":7}', "no partition 7"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_json_line_says_what_is_wrong(command: Command, line: bytes, reason: str) -> None:
    command("topic", "create", "orders")
    code = 2 if "no partition" in reason else 1
    keep = ("--keep-partitions",) if "no partition" in reason else ()
    bad = command("write", "orders", "--format", "jsonl", *keep, input=b"\n" + line, code=code)
    assert reason in bad.err
    assert "line 2" in bad.err
    assert records(command) == []


def test_a_record_that_is_too_large_is_refused(command: Command) -> None:
    command("topic", "create", "orders", "-c", "max.message.bytes=1000")
    bad = command("write", "orders", input=b"ok\n" + b"x" * 2000 + b"\n", code=1)
    assert "max.message.bytes" in bad.err
    assert "line 2" in bad.err
    assert [r.value for r in records(command)] == [b"ok"]
    endless = command("write", "orders", input=b"x" * 5_000_000, code=1)
    assert "does not end" in endless.err


def test_what_cannot_be_meant_is_refused_before_anything_is_read(command: Command) -> None:
    command("topic", "create", "orders")
    assert (
        "are in the input" in command("write", "orders", "--format", "jsonl", "-k", "x", code=1).err
    )
    assert "-K" in command("write", "orders", "-K:", "-k", "x", code=1).err
    assert "jsonl" in command("write", "orders", "--keep-partitions", code=1).err
    assert "no partition 3" in command("write", "orders", "-p", 3, input=b"x\n", code=2).err
    assert "did you mean 'orders'" in command("write", "order", input=b"x\n", code=2).err


# ---- what is read is what was written ----

FIELD = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
NAMES = st.binary(max_size=8).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(key=FIELD, value=FIELD, headers=st.lists(st.tuples(NAMES, FIELD), max_size=3),
       timestamp=st.integers(0, 1 << 60))  # fmt: skip
@settings(max_examples=200)
def test_json_loses_nothing(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]], timestamp: int
) -> None:
    try:
        record = Record(value, key=key, headers=headers, timestamp=timestamp)
    except ValueError:
        return  # a tombstone without a key
    text = json_text(record_to_json(record))
    assert not set(text) & {chr(c) for c in [*range(32), 127, *range(128, 160), 0x202E]}
    again, _ = message_of(text)
    assert again == record


def test_a_pipe_from_topic_to_topic_loses_nothing(command: Command) -> None:
    with logstore.open(command.store) as store:
        log = store.create_topic("a")[0]
        log.extend(
            [
                Record(b"", key=b"", timestamp=NOON),
                Record(None, key=b"\xff\x00", timestamp=NOON + 1),
                Record("é\x1b[2J".encode(), headers=[("h", None), ("h", b"\x80"), ("ü", b"")]),
                Record(b'{"base64":"AAAA"}', key=b'{"a": 1}'),
                Record(b"x" * 10_000),
            ]
        )
    lines = command("read", "a", "-o", "jsonl")
    command("write", "--create", "b", "--format", "jsonl", input=lines.out)
    assert command("read", "b", "-o", "jsonl").out == lines.out.replace(b'"a","part', b'"b","part')
    assert [r.value for r in records(command, "b")] == [r.value for r in records(command, "a")]


def test_partitions_are_kept_when_asked_for(command: Command) -> None:
    command.fill("a", count=9, partitions=3)
    lines = command("read", "a").out
    command("topic", "create", "b", "-p", 3)
    command("write", "b", "--format", "jsonl", "--keep-partitions", input=lines)
    assert command("read", "b").out == lines.replace(b'"topic":"a"', b'"topic":"b"')


# ---- read ----


def offsets(command: Command, *options: object) -> list[int]:
    return [row["offset"] for row in command("read", "orders", *options).rows]


def test_a_stretch_by_offset_and_by_time(command: Command) -> None:
    command.fill(count=10)
    assert offsets(command, "--from", 7) == [7, 8, 9]
    assert offsets(command, "--from", "offset:7", "--to", 9) == [7, 8]
    assert offsets(command, "--from", "-3") == [7, 8, 9]
    assert offsets(command, "--to", "-8") == [0, 1]
    assert offsets(command, "--from", NOON + 8) == [8, 9]
    assert offsets(command, "--from", f"@{NOON}", "--to", "2026-02-02T02:40:00.002Z") == [0, 1]
    assert offsets(command, "--from", "end") == []
    assert offsets(command, "--from", "-15m") == []
    assert offsets(command, "--from", "start", "-n", 2) == [0, 1]
    assert offsets(command, "--from", 99) == []


def test_an_offset_that_was_deleted_starts_at_the_start_with_a_note(command: Command) -> None:
    command.fill(count=5)
    with logstore.open(command.store) as store:
        store["orders"][0].trim(2)
    for more in ((), ("--follow", "--timeout", 0)):
        done = command("read", "orders", "--from", 0, *more)
        assert [row["offset"] for row in done.rows] == [2, 3, 4]
        assert "orders-0 starts at offset 2: offsets 0 to 1 are deleted" in done.err
    assert "are deleted" not in command("read", "orders").err


def test_the_last_ones_of_all_partitions(command: Command) -> None:
    command.fill(count=10, partitions=3)
    last = command("read", "orders", "--last", 4).rows
    assert [row["timestamp"] - NOON for row in last] == [6, 7, 8, 9]
    assert offsets(command, "--last", 0) == []
    assert len(offsets(command, "--last", 99)) == 10
    only = command("read", "orders", "--last", 2, "--where", "$.n < 5").rows
    assert [json.loads(row["value"])["n"] for row in only] == [3, 4]


def test_partitions_are_merged_by_time(command: Command) -> None:
    command.fill(count=10, partitions=3)
    merged = command("read", "orders", "--by-time").rows
    assert [row["timestamp"] - NOON for row in merged] == list(range(10))
    chosen = command("read", "orders", "-p", 1).rows
    assert {row["partition"] for row in chosen} == {1}


def test_counting(command: Command) -> None:
    command.fill(count=10, partitions=3)
    assert command("read", "orders", "--count").text == "10\n"
    assert command("read", "orders", "--count", "-o", "json").text == (
        '{\n  "topic": "orders",\n  "records": 10\n}\n'
    )
    assert command("read", "orders", "--count", "--where", "$.n >= 4").text == "6\n"
    assert command("read", "orders", "--count", "--from", NOON + 9).text == "1\n"


def test_counting_a_larger_topic_by_columns(command: Command) -> None:
    with logstore.open(command.store, durability="os") as store:
        with store.create_topic("orders")[0].writer() as out:
            out.extend([b"x" * 1000] * 20_000)
        assert store["orders"].describe().size_bytes > 16 << 20
    assert command("read", "orders", "--count").text == "20000\n"
    assert command("read", "orders", "--count", "--to", 15_001).text == "15001\n"


def test_kcats_format(command: Command) -> None:
    with logstore.open(command.store) as store:
        store.create_topic("orders").append(
            b"v\x1b", key=None, headers=[("a", b"1"), ("b", None)], timestamp=NOON
        )
    layout = r"%t %p %o [%k] %K %s %S %R %T %h %%\n\t\\\x41"
    assert command("read", "orders", "-f", layout).out == (
        b"orders 0 0 [] -1 v\x1b 2 \x00\x00\x00\x02 %d a=1,b=NULL %%\n\t\\A" % NOON
    )
    assert "unknown '%q'" in command("read", "orders", "-f", "%q", code=1).err
    made = formatter("%s|%k\n", safe=True)
    assert made(Record(b"v\x1b[2J", key=b"\x9b")) == b"v\\x1b[2J|\\x9b\n"


def test_decoding(command: Command) -> None:
    command.fill(count=1)
    assert command("read", "orders", "--decode", "json").rows[0]["value"] == {"n": 0}
    assert command("read", "orders", "--decode", "hex").rows[0]["value"] == b'{"n":0}'.hex()
    assert command("read", "orders", "--decode-key", "base64").rows[0]["key"] == "azA="
    golden("read", command("read", "orders", "-o", "table").text)
    golden("read-json", command("read", "orders", "-o", "json").text)
    golden("read-csv", command("read", "orders", "-o", "csv").text)


def test_nothing_from_data_reaches_the_terminal_unescaped(command: Command) -> None:
    nasty = "\x1b]0;owned\x07\x9b2J\u202e\ufeff".encode()
    with logstore.open(command.store) as store:
        store.create_topic("orders").append(
            nasty + b"\xff", key=nasty, headers=[(nasty.decode(), nasty)]
        )
    for how in ("table", "jsonl", "json", "csv"):
        text = command("read", "orders", "-o", how).text
        text = text.replace("\n", "").replace("\t", "")  # these are ours
        assert text.isprintable(), how


def test_following_ends_after_a_timeout(command: Command) -> None:
    command.fill(count=3, partitions=2)
    done = command("read", "orders", "--follow", "--timeout", 0)
    assert len(done.rows) == 3
    short = command("read", "orders", "--follow", "--timeout", 0, "-n", 5, code=5)
    assert "only 3 of 5" in short.err
    assert len(command("read", "orders", "--follow", "-n", 2).rows) == 2
    assert len(command("read", "orders", "--follow", "--to", NOON + 2).rows) == 2


def test_damage_is_reported_or_passed_over(command: Command) -> None:
    command.fill(count=5)
    path = command.store / "orders-0" / "00000000000000000000.log"
    flip(path, path.stat().st_size // 2, 0xFF)
    damaged = command("read", "orders", code=4)
    assert str(path) in damaged.err
    skipped = command("read", "orders", "--skip-corrupt", code=4)
    assert len(skipped.rows) == 4
    assert skipped.err.count("skipped") == 1
    counted = command("read", "orders", "--skip-corrupt", "--count", code=4)
    assert counted.text == "4\n"
    assert counted.err.count("skipped") == 1
    last = command("read", "orders", "--skip-corrupt", "--last", 4, code=4)
    assert len(last.rows) == 4
    assert last.err.count("skipped") == 1


def test_uncommitted_and_aborted_records_are_left_out_when_asked(command: Command) -> None:
    with logstore.open(command.store) as store:
        log = store.create_topic("orders")[0]
        log.append(b"plain")
        encoder = logstore.BatchEncoder()
        encoder.append(b"aborted")
        raw = encoder.take()
        log.append_batch(
            logstore.with_producer(
                raw, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True
            ),
            verify_transaction=False,
        )
        log.end_transaction(1, 0, commit=False)
    assert len(command("read", "orders").rows) == 2
    assert [r["value"] for r in command("read", "orders", "--committed").rows] == ["plain"]


def test_options_that_exclude_each_other(command: Command) -> None:
    command.fill()
    assert "--by-time" in command("read", "orders", "--last", 1, "--by-time", code=1).err
    assert "--follow" in command("read", "orders", "--timeout", 1, code=1).err
    assert "--count" in command("read", "orders", "--count", "-n", 1, code=1).err
