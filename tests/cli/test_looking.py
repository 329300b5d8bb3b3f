"""`logstore du`, `dump`, `doctor`, `bench`: what looks and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore.coordinators.group_admin import Groups
from tests.cli.conftest import NOON, Command

HERE = Path(__file__).parent.parent
BROKER = HERE / "golden-log-directory" / "log"
GOLDEN_LOGS = HERE / "golden"


# ---- du ----


def test_bytes_add_up_to_what_is_on_disk(command: Command) -> None:
    with logstore.open(command.store) as store:
        topic = store.create_topic("a", 2, config={"segment.bytes": 2048, "retention.bytes": 4096})
        for i in range(200):
            topic.append(b"x" * 40, partition=i % 2, timestamp=NOON, durability="os")
    (row,) = command("du").rows
    on_disk = sum(f.stat().st_size for p in command.store.glob("a-*") for f in p.iterdir())
    assert row["total_bytes"] == on_disk
    assert row["total_bytes"] == row["log_bytes"] + row["index_bytes"] + row["other_bytes"]
    assert row["offsets"] == 200
    by_partition = command("du", "--by", "partition").rows
    by_segment = command("du", "--by", "segment").rows
    for name in ("log_bytes", "index_bytes", "offsets", "reclaimable_bytes"):
        assert row[name] == sum(part[name] for part in by_partition)
        assert row[name] == sum(segment[name] for segment in by_segment)
    assert row["reclaimable_bytes"] > 0
    going = [d for d in command("retain", code=7).rows if d["delete"]]
    assert row["reclaimable_bytes"] >= sum(d["size_bytes"] for d in going) > 0


def test_left_overs_could_go(command: Command) -> None:
    command.fill()
    before = command("du").rows[0]
    (command.store / "orders-0" / "00000000000000000007.log.deleted").write_bytes(b"x" * 1000)
    after = command("du").rows[0]
    assert after["reclaimable_bytes"] == before["reclaimable_bytes"] + 1000
    assert after["total_bytes"] == before["total_bytes"] + 1000


def test_how_well_batches_are_compressed(command: Command) -> None:
    with logstore.open(command.store) as store:
        for name, codec in (("plain", "none"), ("small", "gzip")):
            with store.create_topic(name)[0].writer(compression=codec) as out:
                out.extend([b"a" * 1000] * 100)
        store.create_topic("empty")
    rows = {row["topic"]: row for row in command("du", "--ratio").rows}
    assert rows["plain"]["compression_ratio"] == 1.0
    assert rows["small"]["compression_ratio"] > 20
    assert rows["small"]["uncompressed_bytes"] == rows["plain"]["log_bytes"]
    assert rows["empty"]["compression_ratio"] is None


def test_people_see_sizes(command: Command) -> None:
    command.fill(count=20)
    text = command("du", "--by", "segment", "-o", "table").text
    assert text.splitlines()[0].split() == [
        *("TOPIC", "PARTITION", "FROM", "TO", "OFFSETS", "LOG", "INDEXES", "OTHER", "TOTAL"),
        "RECLAIMABLE",
    ]
    assert "orders" in text.splitlines()[1]


# ---- dump ----


def dump(command: Command, *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    return command("dump", *arguments, code=code).rows


def test_batches_and_records_of_every_golden_log(command: Command) -> None:
    seen = set()
    for expected in GOLDEN_LOGS.glob("*/expected.json"):
        (folder,) = [path for path in expected.parent.iterdir() if path.is_dir()]
        with logstore.Partition.open(_copied(folder, command), readonly=True) as log:
            there = [(r.offset, r.timestamp) for s in log.segments for r in s.scan()]
        damaged = "unclean" in folder.name
        rows = command("dump", "-r", *sorted(folder.glob("*.log"))).rows if not damaged else []
        if damaged:
            continue
        found = [(r["offset"], r["timestamp"]) for r in rows if r["kind"] == "record"
                 and not r["control"]]  # fmt: skip
        assert found == there, folder
        batches = [row for row in rows if row["kind"] == "batch"]
        assert all(batch["sound"] for batch in batches)
        seen |= {batch["codec"] for batch in batches}
        seen |= {batch["marker"] for batch in batches if "marker" in batch}
    assert {"none", "gzip", "snappy", "lz4", "commit", "abort"} <= seen


def _copied(folder: Path, command: Command) -> Path:
    """Opening, even readonly, is better done on a copy of a committed file."""
    target = command.store.parent / "copies" / folder.parent.name / folder.name
    shutil.copytree(folder, target)
    return target


def test_a_brokers_directory_is_dumped_whole(command: Command) -> None:
    rows = dump(command, BROKER)
    kinds = {row["kind"] for row in rows}
    assert {"batch", "checkpoint", "leader_epoch", "partition_metadata", "meta_properties"} <= kinds
    assert {"offset_index", "time_index"} & kinds
    assert "damage" not in kinds
    (node,) = [row for row in rows if row["kind"] == "meta_properties"]
    assert node["cluster.id"]


def test_every_file_of_ours_is_understood(command: Command) -> None:
    with logstore.open(command.store) as store:
        topic = store.create_topic(
            "a",
            config={
                "segment.bytes": 1024,
                "cleanup.policy": "compact",
                "index.interval.bytes": 100,
            },
        )
        log = topic[0]
        for i in range(100):
            log.append(b"%d" % i, key=b"k%d" % (i % 3), timestamp=NOON + i, durability="os")
        encoder = logstore.BatchEncoder()
        encoder.append(b"v", key=b"k")
        log.append_batch(logstore.with_producer(encoder.take(), producer_id=7, producer_epoch=1,
                                                base_sequence=0, transactional=True),
                         verify_transaction=False)  # fmt: skip
        log.end_transaction(7, 1, commit=False)
        logstore.Compactor(log, min_cleanable_dirty_ratio=0.0).run()
        log.roll()
        more = store.create_topic("b", config={"index.interval.bytes": 100})
        for _ in range(20):
            more.append(b"x" * 50)
        with logstore.Producer(store, "billing") as producer, producer.transaction():
            producer.append("b", b"paid")
        Groups(store).commit("workers", {("b", 0): 7})
    rows = dump(command, "-r", command.store)
    meanings = [row["meaning"] for row in rows if row.get("meaning")]
    assert {"group": "workers", "topic": "b", "partition": 0} in [
        meaning.get("offset_of") for meaning in meanings
    ]
    assert "billing" in [meaning.get("transactional_id") for meaning in meanings]
    unknown = {row["file"] for row in rows if row["kind"] in ("unknown", "damage")}
    assert unknown == set()
    kinds = {row["kind"] for row in rows}
    assert {"batch", "offset_index", "time_index", "producer", "aborted_transaction"} <= kinds
    assert {"side_file", "durable_mark", "clean_shutdown", "clean_twin", "lock"} <= kinds
    (aborted,) = [row for row in rows if row["kind"] == "aborted_transaction"]
    assert aborted["producer_id"] == 7


def test_damage_is_told_with_its_position(command: Command, tmp_path: Path) -> None:
    command.fill(count=3)
    log = command.store / "orders-0" / "00000000000000000000.log"
    content = bytearray(log.read_bytes())
    content[-3] ^= 1
    log.write_bytes(content + b"\0" * 5)
    *batches, damage, torn = dump(command, log, code=4)
    assert [b["sound"] for b in batches] == [True, True, False]
    assert damage["reason"].startswith("checksum")
    assert damage["position"] == batches[-1]["position"]
    assert torn["position"] == len(content)
    assert len(dump(command, "-n", 1, log, code=0)) == 1


@pytest.mark.parametrize(
    "name",
    [
        *("00000000000000000000.log", "00000000000000000000.index", "x.timeindex", "1.txnindex"),
        *("5.snapshot", "leader-epoch-checkpoint", "recovery-point-offset-checkpoint"),
        *("logstore.state", "logstore.durable", "logstore.topics", "swap.plan", "9.summary"),
        *(".kafka_cleanshutdown", "quorum-state"),
    ],
)
def test_garbage_is_damage_and_never_more(command: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for content in (b"\xff\xfe\x1b[2J garbage" * 20, b"\0" * 777, os.urandom(100)):
        path.write_bytes(content)
        done = command("dump", path, "-r", code=4)
        assert any(row["kind"] == "damage" for row in done.rows)
    text = command("dump", path, "-o", "table", code=4).text
    assert text.replace("\n", "").isprintable()
    path.write_bytes(b"")
    command("dump", path, code=command_code(name))


def command_code(name: str) -> int:
    """An empty log, index or checkpoint is fine; an empty file of another kind is not."""
    fine = (".log", ".index", ".timeindex", ".txnindex", "-checkpoint", "cleanshutdown")
    return 0 if name.endswith(fine) else 4


def test_a_hostile_directory(command: Command, tmp_path: Path) -> None:
    command.fill()
    secret = tmp_path / "secret"
    secret.write_bytes(b"password")
    folder = command.store / "orders-0"
    (folder / "logstore.link").symlink_to(secret)
    (folder / "00000000000000009999.snapshot").symlink_to(secret)
    (folder / "\x1b[31mred.index").write_bytes(b"\0" * 8)
    (command.store / "evil-0").symlink_to(tmp_path)
    os.mkfifo(folder / "00000000000000000005.log.swap.fifo")
    rows = dump(command, command.store)
    assert not any("secret" in row["file"] or "9999" in row["file"] for row in rows)
    assert "password" not in json.dumps(rows)
    assert command("dump", command.store, "-o", "table").text.replace("\n", "").isprintable()
    assert command("topic", "ls", "-q").text == "orders\n"
    assert len(command("read", "orders").rows) == 3
    assert command("du").rows[0]["offsets"] == 3


# ---- doctor and bench ----


def test_the_doctor_looks_at_everything(command: Command) -> None:
    command.fill()
    rows = command("doctor").rows
    checks = {row["check"]: row for row in rows}
    assert {"file system", "free space", "directory", "fsync", "open files", "clock"} <= set(checks)
    assert {"logstore", "python", "packages", "store"} <= set(checks)
    assert {row["status"] for row in rows} <= {"ok", "warn", "bad"}
    assert checks["store"]["found"].endswith("1 topics, 1 partitions")
    missing = command("-s", command.store / "none", "doctor", "--no-fsync").rows
    assert "does not exist yet" in missing[-1]["found"]


def test_the_doctor_says_what_a_directory_that_is_no_store_is(command: Command) -> None:
    command.store.mkdir()
    (command.store / "holiday.jpg").write_bytes(b"")
    last = command("doctor", "--no-fsync").rows[-1]
    assert (last["check"], last["status"]) == ("store", "bad")


def test_the_bench_measures_and_leaves_nothing(command: Command, tmp_path: Path) -> None:
    rows = command("bench", "-n", 500).rows
    works = [(row["work"], row["durability"]) for row in rows]
    assert works == [
        ("append, one a call", "fsync"),
        ("append, one a call", "os"),
        ("writer (none)", "fsync"),
        ("read records", "-"),
        ("read columns", "-"),
    ]
    assert all(row["records_per_second"] > 0 for row in rows)
    assert rows[3]["records"] == 1500
    assert list(tmp_path.iterdir()) == []
    assert "WORK" in command("bench", "-n", 10, "-o", "table", "-z", "lz4").text


def test_help_of_every_verb(command: Command) -> None:
    from logstore.cli.command import VERBS
    from logstore.cli.verbs.topic import TOPIC_VERBS

    for name, (_, about) in VERBS.items():
        assert about
        assert "Usage: logstore" in command(name, "--help").text
    for name in TOPIC_VERBS:
        assert f"Usage: logstore topic {name}" in command("topic", name, "--help").text
    listed = command("--help").text
    assert all(f"\n  {name} " in listed for name in VERBS)
