"""`logstore topic` and `logstore offsets`."""

from __future__ import annotations

import pytest

import logstore
from tests.cli.conftest import NOON, Command, golden


def test_a_topic_is_created_listed_and_shown(command: Command) -> None:
    made = command("topic", "create", "orders", "-p", "2", "-c", "segment.bytes=4096")
    assert made.rows == [{"topic": "orders", "partitions": 2, "created": True}]
    assert command("topic", "ls", "-q").text == "orders\n"
    (row,) = command("topic", "ls").rows
    assert row == {
        "topic": "orders",
        "partitions": 2,
        "offsets": 0,
        "size_bytes": 0,
        "segments": 2,
        "oldest": None,
        "newest": None,
        "cleanup_policy": "delete",
    }
    (shown,) = command("topic", "show", "orders").rows
    assert shown["config"] == {"segment.bytes": 4096}
    assert [p["partition"] for p in shown["partition_list"]] == [0, 1]


def test_people_see_tables(command: Command) -> None:
    command.fill(count=5, partitions=2)
    command("topic", "create", "empty")
    golden("topic-ls", command("topic", "ls", "-o", "table").text)
    golden("topic-show", command("topic", "show", "orders", "-o", "table").text)
    golden("offsets", command("offsets", "-o", "table", "--at", NOON + 2).text)


def test_every_format_tells_the_same(command: Command) -> None:
    command.fill()
    (row,) = command("topic", "ls", "-o", "jsonl").rows
    import csv
    import io
    import json

    assert json.loads(command("topic", "ls", "-o", "json").text) == [row]
    (cells,) = csv.DictReader(io.StringIO(command("-o", "csv", "topic", "ls").text))
    assert cells == {name: str(value) for name, value in row.items()}


def test_an_existing_topic_is_a_conflict_unless_that_is_fine(command: Command) -> None:
    command("topic", "create", "orders")
    refused = command("topic", "create", "orders", code=3)
    assert "topic 'orders' exists" in refused.err
    again = command("topic", "create", "orders", "-p", 9, "--if-not-exists")
    assert again.rows == [{"topic": "orders", "partitions": 1, "created": False}]


def test_settings_are_altered_by_kafkas_names(command: Command) -> None:
    command("topic", "create", "orders", "-c", "retention.ms=5")
    done = command("topic", "alter", "orders", "-c", "retention.ms=", "-c", "segment.bytes=2048",
                   "--add-partitions", 2, "-o", "table")  # fmt: skip
    golden("topic-alter", done.text)
    assert (
        "did you mean 'retention.ms'"
        in command("topic", "alter", "orders", "-c", "retention.sm=1", code=1).err
    )
    assert "NAME=VALUE" in command("topic", "alter", "orders", "-c", "x", code=1).err
    assert "nothing to change" in command("topic", "alter", "orders", code=1).err


def test_nothing_is_deleted_without_yes(command: Command) -> None:
    command.fill()
    asked = command("topic", "rm", "orders", code=7)
    assert asked.rows[0]["deleted"] is False
    assert asked.rows[0]["offsets"] == 3
    assert "--yes" in asked.err
    assert command("topic", "ls", "-q").text == "orders\n"
    assert command("topic", "rm", "orders", "--yes").rows[0]["deleted"] is True
    assert command("topic", "ls", "-q").text == ""


def test_one_missing_topic_keeps_all_from_being_deleted(command: Command) -> None:
    command.fill()
    missing = command("topic", "rm", "orders", "order", "--yes", code=2)
    assert "did you mean 'orders'" in missing.err
    assert command("topic", "ls", "-q").text == "orders\n"


def test_a_clone_has_the_same_batches_at_the_same_offsets(command: Command) -> None:
    with logstore.open(command.store) as store:
        topic = store.create_topic(
            "a", 2, config={"segment.bytes": 1024, "cleanup.policy": "compact"}
        )
        for i in range(200):
            topic.append(b"%d" % i, key=b"%d" % (i % 7), partition=i % 2, durability="os")
        topic[0].trim(31)
        logstore.Compactor(topic[1], min_cleanable_dirty_ratio=0.0).run()
    command("topic", "clone", "a", "b")
    with logstore.open(command.store, readonly=True) as store:
        for source, target in zip(store["a"], store["b"], strict=True):
            assert target.start_offset == source.start_offset
            assert target.end_offset == source.end_offset
            assert list(target.scan().batches()) == list(source.scan().batches())
            target.check()
        assert store["b"].config == store["a"].config
    assert "exists" in command("topic", "clone", "a", "b", code=3).err


def test_a_clone_of_an_empty_topic_is_empty(command: Command) -> None:
    command("topic", "create", "a")
    command("topic", "clone", "a", "b")
    assert command("offsets", "b").rows[0]["end_offset"] == 0


def test_a_topic_that_cannot_be_read_does_not_hide_the_others(command: Command) -> None:
    command.fill("bad")
    command.fill("good")
    path = command.store / "bad-0" / "00000000000000000000.log"
    content = bytearray(path.read_bytes())
    content[70] ^= 0xFF
    path.write_bytes(content)
    bad, good = command("topic", "ls", code=4).rows
    assert str(path) in bad["error"]
    assert good["offsets"] == 3
    assert list(bad) == list(good)
    assert "ERROR" in command("topic", "ls", "-o", "table", code=4).text


def test_offsets_by_time(command: Command) -> None:
    command.fill(count=4)
    (row,) = command("offsets", "orders", "--at", NOON + 2).rows
    assert row == {
        "topic": "orders",
        "partition": 0,
        "start_offset": 0,
        "end_offset": 4,
        "durable_offset": 4,
        "last_stable_offset": 4,
        "max_timestamp": NOON + 3,
        "max_timestamp_offset": 3,
        "offset_at": 2,
    }
    assert "no partition 7" in command("offsets", "orders", "-p", 7, code=2).err


@pytest.mark.parametrize("arguments", [("topic", "ls"), ("read", "x"), ("offsets",)])
def test_a_store_that_is_not_there_is_not_made_by_looking(
    command: Command, arguments: tuple[str, ...]
) -> None:
    assert "logstore topic create" in command(*arguments, code=2).err
    assert not command.store.exists()


def test_a_directory_of_something_else_is_no_store(command: Command) -> None:
    command.store.mkdir()
    (command.store / "holiday.jpg").write_bytes(b"x")
    assert "holiday.jpg" in command("topic", "ls", code=2).err
    assert "holiday.jpg" in command("topic", "create", "x", code=2).err


def test_an_unknown_command_says_what_may_be_meant(command: Command) -> None:
    assert "did you mean 'topic'" in command("topci", code=1).err
    assert "did you mean 'show'" in command("topic", "shwo", code=1).err
    assert "Usage" in command("topic", code=1).text
