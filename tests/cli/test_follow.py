"""`logstore follow`: options, output, exit codes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import logstore
from logstore import Store
from tests.cli.conftest import Command
from tests.kit import values


def test_once_copies_and_ends(command: Command, tmp_path: Path) -> None:
    command("topic", "create", "orders", "-p", 2)
    command("write", "orders", "-p", 1, input=b"a\nb\nc\n")
    (row,) = command("follow", command.store, tmp_path / "dst", "--once").rows
    assert {name: row[name] for name in ("copied_records", "lag_records", "lag_bytes")} == {
        "copied_records": 3, "lag_records": 0, "lag_bytes": 0,
    }  # fmt: skip
    assert row["lag_seconds"] == 0
    assert [each["end_offset"] for each in row["partitions"]] == [0, 3]
    with logstore.open(tmp_path / "dst", readonly=True) as copy:
        assert values(copy["orders"][1]) == [b"a", b"b", b"c"]


def test_output_as_a_table_and_as_json(command: Command, tmp_path: Path) -> None:
    command("topic", "create", "orders")
    command("write", "orders", input=b"a\nb\n")
    shown = command("follow", command.store, tmp_path / "dst", "--once", "-o", "table").text
    assert shown.startswith("copied 2 records, ")
    assert "; behind by 0 records, 0 B, 0.0 s\n" in shown
    assert shown.splitlines()[1].split() == [
        "TOPIC", "PARTITION", "END", "SOURCE", "END", "LAG", "LAG", "BYTES", "COPIED", "CUT",
    ]  # fmt: skip
    shown = command("follow", command.store, tmp_path / "dst", "--once", "-o", "json").text
    assert json.loads(shown)["copied_records"] == 0
    shown = command("follow", command.store, tmp_path / "dst", "--once", "-o", "csv").text
    assert shown.startswith("copied_records,copied_bytes,truncated_records,lag_records,")


def test_topics_are_selected(command: Command, tmp_path: Path) -> None:
    for name in ("orders", "orders.eu", "users"):
        command("topic", "create", name)
    command("follow", command.store, tmp_path / "dst", "--once", "--topics", "orders*")
    with logstore.open(tmp_path / "dst", readonly=True) as copy:
        assert sorted(copy) == ["orders", "orders.eu"]


def test_a_source_that_was_cut_ends_with_exit_code_3(command: Command, tmp_path: Path) -> None:
    with logstore.open(command.store) as store:
        log = store.create_topic("orders")[0]
        log.append(b"a")
        log.append(b"b")
    command("follow", command.store, tmp_path / "dst", "--once")
    with logstore.open(command.store) as store:
        store["orders"][0].truncate(1)
    refused = command("follow", command.store, tmp_path / "dst", "--once", code=3)
    assert "same up to offset 1 only, and the target ends at 2" in refused.err
    assert "--allow-truncate cuts 1 records" in refused.err
    (row,) = command("follow", command.store, tmp_path / "dst", "--once", "--allow-truncate").rows
    assert row["truncated_records"] == 1


def test_retention_is_followed_with_trim(command: Command, tmp_path: Path) -> None:
    def start() -> int:
        with logstore.open(tmp_path / "dst", readonly=True) as copy:
            return copy["orders"][0].start_offset

    with logstore.open(command.store) as store:
        log = store.create_topic("orders")[0]
        for _ in range(5):
            log.append(b"a")
    command("follow", command.store, tmp_path / "dst", "--once")
    with logstore.open(command.store) as store:
        store["orders"][0].trim(3)
    command("follow", command.store, tmp_path / "dst", "--once")
    assert start() == 0
    command("follow", command.store, tmp_path / "dst", "--once", "--trim")
    assert start() == 3


def test_a_name_that_no_topic_has_is_not_copied_in_silence(
    command: Command, tmp_path: Path
) -> None:
    command("topic", "create", "orders")
    wrong = command("follow", command.store, tmp_path / "a", "--once", "--topics", "nope", code=2)
    assert f"{command.store} has no topic that fits --topics nope" in wrong.err
    some = command(
        "follow", command.store, tmp_path / "b", "--once", "--topics", "nope", "--topics", "ord*"
    )
    assert "has no topic that fits --topics nope" in some.err
    assert len(some.rows[0]["partitions"]) == 1


def test_once_waits_a_while_for_a_kafka_that_is_not_there_yet(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("logstore.replication.follow.PATIENCE_SECONDS", 0.3)
    began = time.monotonic()
    refused = command("follow", "kafka://127.0.0.1:1", tmp_path / "dst", "--once", code=6)
    assert time.monotonic() - began > 0.3
    assert "127.0.0.1:1" in refused.err
    assert "kafka://127.0.0.1:1 cannot be reached, trying again: " in caplog.text


def test_wrong_places_have_their_exit_codes(command: Command, tmp_path: Path) -> None:
    assert "two directories" in command("follow", command.store, command.store, code=1).err
    command("follow", tmp_path / "none", tmp_path / "dst", "--once", code=2)
    assert not (tmp_path / "dst").exists()
    assert "no address" in command("follow", "kafka://here", tmp_path / "dst", code=1).err


def test_a_locked_target_has_exit_code_3(command: Command, tmp_path: Path, store: Store) -> None:
    with logstore.open(tmp_path / "dst"):
        assert "already open" in command("follow", store.path, tmp_path / "dst", code=3).err
