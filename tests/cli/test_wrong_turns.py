"""Mistakes of new users: each error text names the right command."""

from __future__ import annotations

from pathlib import Path

import pytest

import logstore
from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("line", "code", "answer"),
    [
        ("tail orders", 1, "did you mean 'read --follow'?"),
        ("ls", 1, "did you mean 'topic ls'?"),
        ("consume orders", 1, "did you mean 'read'?"),
        ("topic delete orders", 1, "did you mean 'rm'?"),
        ("topic describe orders", 1, "did you mean 'show'?"),
        ("topic create orders", 3, "--if-not-exists accepts it unchanged"),
        ("write nope", 2, "--create makes a new topic"),
        ("group reset billing --to-earliest", 2, "no group 'billing'"),
        ("export orders /no-such-directory/o.csv", 1, "there is no directory /no-such-directory"),
        ("read orders --follow --timeout -1", 1, "-1"),
        ("read orders --last -1", 1, "at least 0, not -1"),
        ("read orders --last ten", 1, "'ten' is no whole number"),
        ("bench --size 99999999", 1, "at most 1048576, not 99999999"),
        ("read orders --where key='\"x\"'", 1, "equal is =="),
    ],
)
def test_a_wrong_turn_is_answered_with_the_right_one(
    command: Command, line: str, code: int, answer: str
) -> None:
    command.fill()
    done = command(*line.replace("'", "").split(), code=code, input=b"x\n")
    assert answer in done.err
    assert "exist_ok" not in done.err
    with logstore.open(command.store, readonly=True) as store:
        assert list(store) == ["orders"]
        assert store["orders"][0].end_offset == 3


def test_reading_from_beyond_the_end_says_so(command: Command) -> None:
    command.fill()
    done = command("read", "orders", "--from", 999)
    assert done.out == b""
    assert "nothing from offset 999 on: all end at 3 or before" in done.err
    assert command("read", "orders", "--from", 3).err == ""


def test_a_directory_of_other_logs_is_no_partition(tmp_path: Path) -> None:
    (tmp_path / "app.log").touch()
    with pytest.raises(logstore.NotALogError, match=r"app\.log"):
        logstore.open(tmp_path)


def test_a_key_of_text_is_named_as_such(tmp_path: Path) -> None:
    with logstore.open(tmp_path / "data") as store:
        topic = store.create_topic("orders")
        with pytest.raises(TypeError, match="key must be bytes, not str"):
            topic.append(b"x", key="k")  # type: ignore[arg-type]
        assert topic[0].end_offset == 0


def test_what_is_over_cannot_be_aborted(command: Command) -> None:
    with logstore.open(command.store) as store:
        store.create_topic("orders")
        with logstore.Producer(store, "over") as producer, producer.transaction() as tx:
            tx.send("orders", b"x")
    for yes in ((), ("--yes",)):
        done = command("txn", "abort", "over", *yes, code=2)
        assert "'over' has no open transaction: its state is CompleteCommit" in done.err


def test_advice_is_given_in_options(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And paths are as they were typed, also relative ones."""
    command.fill(count=5)
    path = command.store / "orders-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[80] ^= 1
    path.write_bytes(content)
    assert "--skip-corrupt reads on" in command("read", "orders", code=4).err
    monkeypatch.chdir(command.store.parent)
    with logstore.open(command.store.name, readonly=True) as store:
        (problem,) = store.check(on_corrupt="report")
    assert problem.path == path.relative_to(command.store.parent)
    (row,) = command("verify", code=4).rows
    assert "logstore repair --accept-loss" in row["remedy"]
    told = command("repair", "-o", "table", code=4).out.decode()
    assert told.startswith("nothing is mended: 1 errors are left")
