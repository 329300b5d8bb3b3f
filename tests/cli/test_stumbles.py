"""What a newcomer types first: units in settings, dry runs, hints, `tail -n 10 -f`."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import logstore
from logstore.cli.bounds import Bound
from logstore.cli.text import parse_size
from logstore.cli.verbs.read import Selection

from .conftest import Command


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("retention.ms=7d", "retention.ms", 604_800_000),
        ("retention.ms=-1", "retention.ms", -1),
        ("segment.ms=1h30m", "segment.ms", 5_400_000),
        ("segment.bytes=1MiB", "segment.bytes", 1 << 20),
        ("retention.bytes=1.5GiB", "retention.bytes", 3 << 29),
        ("max.message.bytes=2MB", "max.message.bytes", 2_000_000),
        ("max.message.bytes=4096", "max.message.bytes", 4096),
    ],
)
def test_a_setting_takes_a_duration_or_a_size(
    command: Command, given: str, name: str, value: int
) -> None:
    command("topic", "create", "a", "-c", given)
    with logstore.open(command.store, readonly=True) as store:
        assert store["a"].config.as_dict()[name] == value


@pytest.mark.parametrize("given", ["retention.ms=7x", "segment.bytes=1Mi1B", "segment.bytes=big"])
def test_a_unit_that_is_unknown_is_refused_with_examples(command: Command, given: str) -> None:
    done = command("topic", "create", "a", "-c", given, code=1)
    assert "write" in done.err


def test_sizes_are_powers_of_1024_with_an_i_and_of_1000_without() -> None:
    assert [parse_size(text) for text in ("1KiB", "1kb", "2 GiB", "3b", "1T")] == [
        *(1024, 1000, 2 << 30, 3, 10**12)
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "rm", "orders"),
        ("purge", "orders", "--before", "end"),
        ("retain", "orders", "--max-records", "1"),
        ("group", "reset", "g", "orders", "--to-latest"),
        ("group", "rm", "g"),
        ("group", "rm-offsets", "g", "orders"),
        ("group", "copy", "g", "h"),
    ],
)
def test_a_destroying_verb_without_yes_does_not_end_with_zero(
    command: Command, arguments: tuple[str, ...]
) -> None:
    with logstore.open(command.store) as store:
        log = store.create_topic("orders", config={"segment.bytes": 1024})[0]
        for _ in range(4):
            log.append(bytes(600))
        logstore.Groups(store).commit("g", {("orders", 0): 1})
    done = command(*arguments, code=7)
    assert "repeat it with --yes" in done.err
    command(*arguments, "--yes", code=0)


def test_retention_with_nothing_to_delete_ends_with_zero(command: Command) -> None:
    command.fill()
    command("retain", "orders", code=0)


def test_import_and_write_give_the_same_hint(command: Command, tmp_path: Path) -> None:
    command.fill("orders")
    path = tmp_path / "f.jsonl"
    path.write_text('{"value":"a"}\n')
    told = [
        command("import", name, path, code=2).err + command("write", name, path, code=2).err
        for name in ("order", "elsewhere")
    ]
    assert [text.count("--create makes a new topic") for text in told] == [2, 2]
    assert "did you mean 'orders'? --create" in told[0]
    assert "?;" not in told[0]
    command("import", "elsewhere", path, "--create", code=0)


def test_last_and_follow_go_together_as_tail_does(command: Command) -> None:
    command.fill("orders", count=20, partitions=2)
    done = command("-o", "jsonl", "read", "orders", "--last", 3, "--follow", "--timeout", 0)
    assert [json.loads(row["value"])["n"] for row in done.rows] == [17, 18, 19]


def test_following_after_the_last_ones_shows_each_new_record_once(command: Command) -> None:
    command.fill("orders", count=5)
    with logstore.open(command.store) as store:
        log = store["orders"][0]
        records = Selection(store["orders"], start=Bound("start")).follow(None, last=2)
        seen = []
        for record in records:
            if record is None:
                if len(seen) == 2:
                    # From another thread, as an application would.
                    thread = threading.Thread(target=log.append, args=(b"new",))
                    thread.start()
                    thread.join()
                continue
            seen.append(record.offset)
            if len(seen) == 3:
                break
        assert seen == [3, 4, 5]


def test_offsets_are_not_called_records(command: Command) -> None:
    with logstore.open(command.store) as store:
        log = store.create_topic("latest", config={"cleanup.policy": "compact"})[0]
        for number in range(4):
            log.append(b"%d" % number, key=b"k")
        log.roll()
        logstore.Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert command("read", "latest", "--count", "-o", "jsonl").rows[0]["records"] < 4
    for arguments in (("topic", "ls"), ("topic", "show", "latest"), ("du",)):
        (row,) = command(*arguments).rows
        assert row["offsets"] == 4
        assert "records" not in row
        assert "RECORDS" not in command(*arguments, "-o", "table").text


def test_retain_names_the_settings_of_the_topic(command: Command) -> None:
    with logstore.open(command.store) as store:
        config = {"segment.bytes": 1024, "retention.bytes": 1000, "retention.ms": 1000}
        log = store.create_topic("orders", config=config)[0]
        for _ in range(4):
            log.append(bytes(600), timestamp=1)
    text = command("retain", "orders", "-o", "table", code=7).text
    assert "retention.bytes" in text or "retention.ms" in text
    assert "max_" not in text
