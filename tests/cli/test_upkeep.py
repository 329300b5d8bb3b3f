"""`logstore retain`, `compact`, `purge`: ``--yes`` is needed to delete; each gives its reason."""

from __future__ import annotations

import logstore
from tests.cli.conftest import NOON, Command, golden


def fill(command: Command, **config: object) -> None:
    """Ten segments of ten records of ten keys, a second apart."""
    settings = {"segment.bytes": 1024, "retention.ms": -1}
    settings |= {name.replace("_", "."): value for name, value in config.items()}
    with logstore.open(command.store) as store:
        log = store.create_topic("orders", config=settings)[0]
        for i in range(100):
            log.append(b"v%02d" % i, key=b"k%d" % (i % 10), timestamp=NOON + 1000 * i,
                       durability="os")  # fmt: skip
            if i % 10 == 9:
                log.roll()


def values(command: Command) -> list[str]:
    return [row["value"] for row in command("read", "orders").rows]


def test_retention_is_explained_and_done_when_asked(command: Command) -> None:
    fill(command)
    options = ("retain", "orders", "--max-age", "50s", "--now", NOON + 99_000)
    golden("retain", command(*options, "-o", "table", code=7).text)
    told = command(*options, code=7)
    assert "--yes" in told.err
    going = [row for row in told.rows if row["delete"]]
    assert [row["rule"] for row in going] == ["age"] * 4
    assert len(values(command)) == 100
    done = command(*options, "--deleted", "--yes").rows
    assert done == going
    assert values(command)[0] == "v40"
    assert command(*options, "--deleted").rows == []


def test_retention_by_records_and_bytes(command: Command) -> None:
    fill(command)
    told = command("retain", "--max-records", 35, "--deleted", code=7).rows
    assert told[-1]["end_offset"] == 60
    assert {row["rule"] for row in told} == {"records"}
    assert command("retain", "--max-bytes", 10**9, "--deleted").rows == []


def test_a_topics_own_limits_decide_when_none_are_given(command: Command) -> None:
    fill(command, retention_bytes=1)
    assert len(command("retain", "--deleted", "--yes").rows) == 9
    assert values(command)[0] == "v90"  # without the last there would be less than the limit


def test_compaction_keeps_the_newest_of_every_key(command: Command) -> None:
    fill(command, cleanup_policy="compact")
    (told,) = command("compact", "orders", code=7).rows
    assert told["dry_run"] is True
    assert told["superseded"] == 90
    assert len(values(command)) == 100
    (done,) = command("compact", "--yes").rows
    assert done["superseded"] == 90
    assert values(command) == [f"v{i}" for i in range(90, 100)]
    (again,) = command("compact", "--yes").rows
    assert "nothing to do" in again["explanation"]


def test_a_topic_that_does_not_compact_is_left_alone(command: Command) -> None:
    fill(command)
    refused = command("compact", "orders", "--yes")
    assert refused.rows == []
    assert "--force" in refused.err
    (forced,) = command("compact", "orders", "--force", "--yes").rows
    assert forced["superseded"] == 90


def test_everything_before_an_offset_or_a_time(command: Command) -> None:
    fill(command)
    (told,) = command("purge", "orders", "--before", 35, code=7).rows
    assert told["offsets"] == 35
    assert told["done"] is False
    assert len(values(command)) == 100
    command("purge", "orders", "--before", 35, "--yes")
    assert values(command)[0] == "v35"
    command("purge", "orders", "--before", NOON + 60_000, "--yes")
    assert values(command)[0] == "v60"
    assert "outside" in command("purge", "orders", "--before", 1000, "--yes", code=2).err
    command("purge", "orders", "--before", "end", "--yes")
    assert values(command) == []


def test_all_records_of_one_key(command: Command) -> None:
    fill(command)
    (told,) = command("purge", "orders", "--key", "k3", code=7).rows
    assert told["purged"] == 10
    assert len(values(command)) == 100
    command("purge", "orders", "--key-hex", b"k3".hex(), "--yes")
    assert len(values(command)) == 90
    assert command("read", "orders", "--count", "--where", 'key == "k3"').text == "0\n"
    everything = b"".join(p.read_bytes() for p in (command.store / "orders-0").glob("*.log"))
    assert b"k3" not in everything


def test_purging_needs_to_know_what(command: Command) -> None:
    fill(command)
    assert "one of" in command("purge", "orders", code=1).err
    assert "one of" in command("purge", "orders", "--key", "x", "--before", 1, code=1).err
    assert "--key-hex" in command("purge", "orders", "--key-hex", "xyz", code=1).err


def test_purge_by_offset_takes_short_partitions_whole_and_nothing_by_halves(
    command: Command,
) -> None:
    with logstore.open(command.store) as store:
        topic = store.create_topic("uneven", 2)
        for number, count in ((0, 3), (1, 1)):
            for _ in range(count):
                topic.append(b"x", partition=number)
    rows = command("purge", "uneven", "--before", 2, code=7).rows
    assert [(row["new_start_offset"], row["done"]) for row in rows] == [(2, False), (1, False)]
    done = command("purge", "uneven", "--before", 9, "--yes", code=2)
    assert "offset 9 is outside uneven-0 [0, 3)" in done.err
    with logstore.open(command.store, readonly=True) as store:
        assert [log.start_offset for log in store["uneven"]] == [0, 0]
    command("purge", "uneven", "--before", 2, "--yes")
    with logstore.open(command.store, readonly=True) as store:
        assert [log.start_offset for log in store["uneven"]] == [2, 1]
