"""`logstore group`, `txn` and `verify`: the people and programs around a log."""

from __future__ import annotations

import json

import logstore
from logstore import CommittedOffset
from logstore.coordinators.group_admin import Groups
from logstore.workers.progress import Place, Progress
from tests.cli.conftest import NOON, Command, golden
from tests.kit import flip


def commit(command: Command, group: str = "workers", **offsets: int) -> None:
    """commit(command, "workers", p0=3): offsets of the topic orders."""
    with logstore.open(command.store) as store:
        told = {("orders", int(name[1:])): offset for name, offset in offsets.items()}
        Groups(store).commit(group, told)


def committed(command: Command, group: str) -> dict[int, int]:
    with logstore.open(command.store, readonly=True) as store:
        return {tp.partition: c.offset for tp, c in Groups(store).committed(group).items()}


def test_groups_and_their_lag(command: Command) -> None:
    command.fill(count=10, partitions=2)
    assert command("group", "ls").rows == []
    commit(command, p0=5, p1=2)
    (row,) = command("group", "ls").rows
    assert row["lag_seconds"] > 0  # those records are of 2026-02-02
    assert row["lag_bytes"] > 0
    del row["lag_seconds"], row["lag_bytes"]
    assert row == {
        "group": "workers",
        "type": "classic",
        "state": "Empty",
        "members": 0,
        "topics": 1,
        "partitions": 2,
        "lag_records": 3,
    }
    done, behind = command("group", "show", "workers").rows
    assert (done["committed_offset"], done["end_offset"], done["lag_records"]) == (5, 5, 0)
    assert (done["lag_bytes"], done["lag_seconds"]) == (0, 0.0)
    assert (behind["committed_offset"], behind["end_offset"], behind["lag_records"]) == (2, 5, 3)
    assert "workers: Empty, 0 members" in command("group", "show", "workers", "-o", "table").text
    assert command("group", "show", "workers", "--members").rows == []
    assert "there are workers" in command("group", "show", "worker", code=2).err


def test_resetting_shows_first_and_does_it_when_asked(command: Command) -> None:
    command.fill(count=20, partitions=2)
    commit(command, p0=5, p1=2)
    told = command("group", "reset", "workers", "--to-earliest", code=7)
    assert "--yes" in told.err
    assert [(r["before"], r["after"], r["done"]) for r in told.rows] == [
        (5, 0, False),
        (2, 0, False),
    ]
    assert committed(command, "workers") == {0: 5, 1: 2}
    golden(
        "group-reset",
        command("group", "reset", "workers", "--to-latest", "-o", "table", code=7).text,
    )
    for options, expected in (
        (("--to-latest",), {0: 10, 1: 10}),
        (("--shift-by", -3), {0: 7, 1: 7}),
        (("orders:1", "--to-offset", 4), {0: 7, 1: 4}),
        (("--to-datetime", NOON + 11), {0: 6, 1: 5}),
        (("--to-current",), {0: 6, 1: 5}),
        (("--by-duration", "100000d"), {0: 0, 1: 0}),
        (("orders", "--to-offset", 99), {0: 10, 1: 10}),
    ):
        command("group", "reset", "workers", *options, "--yes")
        assert committed(command, "workers") == expected, options
    plan = command("group", "reset", "workers", "orders:0", "--to-offset", 3, "--export")
    assert plan.text == "orders,0,3\n"
    file = command.store.parent / "plan.csv"
    file.write_bytes(plan.out)
    command("group", "reset", "workers", "--from-file", file, "--yes")
    assert committed(command, "workers") == {0: 3, 1: 10}
    assert "give one of" in command("group", "reset", "workers", code=1).err
    assert (
        "give one of"
        in command("group", "reset", "workers", "--to-latest", "--to-earliest", code=1).err
    )
    assert (
        "by numbers" in command("group", "reset", "workers", "orders:x", "--to-latest", code=1).err
    )
    assert "no topic" in command("group", "reset", "workers", "order", "--to-latest", code=2).err


def test_offsets_are_copied_and_deleted(command: Command) -> None:
    command.fill(count=20, partitions=2)
    commit(command, p0=5, p1=2)
    (first, _) = command("group", "copy", "workers", "others", code=7).rows
    assert (first["before"], first["after"], first["done"]) == (None, 5, False)
    assert command("group", "ls").rows[-1]["group"] == "workers"
    command("group", "copy", "workers", "others", "--yes")
    assert committed(command, "others") == {0: 5, 1: 2}
    command("group", "rm-offsets", "others", "orders:1", code=7)
    assert committed(command, "others") == {0: 5, 1: 2}
    command("group", "rm-offsets", "others", "orders:1", "--yes")
    assert committed(command, "others") == {0: 5}
    assert command("group", "rm", "others", code=7).rows[0]["deleted"] is False
    assert committed(command, "others") == {0: 5}
    command("group", "rm", "others", "--yes")
    assert [row["group"] for row in command("group", "ls").rows] == ["workers"]
    assert "no group 'others'" in command("group", "rm", "others", "--yes", code=2).err


# ---- transactions ----


def open_transaction(command: Command, producer: int = 7) -> None:
    """One that no transactional id accounts for, in the log of orders-0."""
    with logstore.open(command.store) as store:
        encoder = logstore.BatchEncoder()
        encoder.append(b"hangs")
        store["orders"][0].append_batch(
            logstore.with_producer(encoder.take(), producer_id=producer, producer_epoch=1,
                                   base_sequence=0, transactional=True),
            verify_transaction=False,
        )  # fmt: skip


def test_transactional_ids(command: Command) -> None:
    command.fill()
    assert command("txn", "ls").rows == []
    with logstore.open(command.store) as store, logstore.Producer(store, "billing") as producer:
        with producer.transaction():
            producer.append("orders", b"paid")
        (busy,) = command("txn", "ls").rows
        assert busy["transactional_id"] == "billing"
        assert busy["open"] is False
    (row,) = command("txn", "show", "billing").rows
    assert row["state"] in ("CompleteCommit", "Empty")
    assert command("txn", "ls", "--open").rows == []
    assert "billing" in command("txn", "ls", "-o", "table").text
    assert "nothing is known" in command("txn", "show", "bill", code=2).err
    assert "nothing is known" in command("txn", "abort", "bill", "--yes", code=2).err


def test_a_hanging_transaction_is_found_and_aborted(command: Command) -> None:
    command.fill()
    open_transaction(command)
    (row,) = command("txn", "ls", "--hanging").rows
    assert (row["topic"], row["producer_id"], row["first_offset"]) == ("orders", 7, 3)
    assert command("offsets", "orders").rows[0]["last_stable_offset"] == 3
    place = ("txn", "abort", "--topic", "orders", "--partition", 0, "--producer", 7)
    told = command(*place, code=7)
    assert told.rows[0]["aborted"] is False
    assert command("offsets", "orders").rows[0]["last_stable_offset"] == 3
    command(*place, "--yes")
    assert command("offsets", "orders").rows[0]["last_stable_offset"] == 5
    assert command("txn", "ls", "--hanging").rows == []
    assert "no open transaction" in command(*place, "--yes", code=2).err
    assert "give an ID" in command("txn", "abort", code=1).err
    assert "give an ID" in command("txn", "abort", "x", "--topic", "orders", code=1).err


# ---- verify ----


def test_a_sound_store_has_no_problems(command: Command) -> None:
    command.fill(count=50, partitions=2)
    assert command("verify").rows == []
    assert command("verify", "orders", "--quick").rows == []
    assert command("verify", "-o", "table").text == ""


def test_damage_is_named_with_what_to_do(command: Command) -> None:
    command.fill(count=5)
    path = command.store / "orders-0" / "00000000000000000000.log"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(content)
    for arguments in (("verify",), ("verify", "orders")):
        found = command(*arguments, code=4).rows
        errors = [row for row in found if row["severity"] == "error"]
        assert str(path) in [row["path"] for row in errors]
        assert all(row["meaning"] and row["remedy"] for row in errors)
    assert "damaged" in command("verify", "-o", "table", code=4).text
    assert json.dumps(found)


# ---- repair ----


def test_a_damaged_store_is_mended_when_asked(command: Command) -> None:
    command.fill(count=5)
    path = command.store / "orders-0" / "00000000000000000000.log"
    flip(path, path.stat().st_size // 2, 0xFF)
    content = path.read_bytes()
    (told,) = command("repair", code=4).rows
    assert told["dry_run"] is True
    assert path.read_bytes() == content
    (planned,) = command("repair", "--accept-loss", code=7).rows
    assert [step["loses"] for step in planned["steps"] if step["loses"]] == [[[2, 3]]]
    assert path.read_bytes() == content
    (done,) = command("repair", "--accept-loss", "--yes").rows
    assert done["receipt"]
    assert [row["offset"] for row in command("read", "orders").rows] == [0, 1, 3, 4]
    command("verify")
    assert command("repair").rows[0]["steps"] == []


def test_a_sound_store_needs_no_repair(command: Command) -> None:
    command.fill(count=5)
    (told,) = command("repair").rows
    assert told["steps"] == []
    assert "nothing to do" in command("repair", "-o", "table").text


def test_the_progress_of_workers_is_shown_in_words(command: Command) -> None:
    command.fill(count=10, partitions=1)
    with logstore.open(command.store) as store:
        place = Place("workers", store["orders"].id, 0)
        text = Progress(10, [2, 3, 5]).encode(place)
        Groups(store).commit("workers", {("orders", 0): CommittedOffset(2, text)})
    (row,) = command("group", "show", "workers").rows
    assert row["progress"] == "3 open, 5 finished above"
    assert "3 open, 5 finished above" in command("group", "show", "workers", "-o", "table").text
