"""The pipelines, end to end, as functions and as commands."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark_logstore.commits import Committer
from pyspark_logstore.pipelines import (
    PipelineError,
    audit,
    compact,
    export_parquet,
    finish,
    replay,
    verify,
)
from pyspark_logstore.pipelines import __main__ as command
from pyspark_logstore.pipelines import export as exporting
from pyspark_logstore.prepared import PreparedWriter

import logstore
from logstore import Record
from tests.spark.killing import killed_at

CONNECTOR = Path(__file__).resolve().parent.parent.parent / "spark_connector"
HOUR = 3_600_000
START = 1_700_000_000_000 // HOUR * HOUR


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Orders, three hours of them, 300 records in 3 partitions; some keys come again."""
    with logstore.open(tmp_path / "store", config={"segment.bytes": 1024}) as store:
        orders = store.create_topic("orders", partitions=3)
        orders.extend(
            Record(b"order %d" % n, key=b"k%d" % (n % 100), timestamp=START + n * HOUR // 100,
                   headers=[("n", b"%d" % n)])
            for n in range(300)
        )  # fmt: skip
    return tmp_path / "store"


@pytest.fixture
def shell(spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a command in this process, on the session of the tests: (exit code, stdout, stderr)."""
    monkeypatch.setattr(command, "session", lambda threads: spark)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = command.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def records(root: Path, topic: str) -> list[list[Record]]:
    with logstore.open(root, readonly=True) as store:
        return [list(p.scan(isolation="read_committed")) for p in store[topic]]


def values(root: Path, topic: str) -> list[bytes | None]:
    return sorted((r.value for part in records(root, topic) for r in part), key=repr)


# ---- export ----


def exported(spark: SparkSession, target: Path) -> list[Any]:
    return spark.read.parquet(str(target)).orderBy("topic", "partition", "offset").collect()


def test_an_export_adds_what_is_new(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "lake"
    report = export_parquet(spark, root, target, ["orders"], by="hour")
    assert report.records == 300
    assert report.files > 0
    assert "300 records" in str(report)
    rows = exported(spark, target)
    assert len(rows) == 300
    assert {row["topic"] for row in rows} == {"orders"}
    hours = {str(row["date"]) for row in rows}
    first = datetime.datetime.fromtimestamp(START / 1000, datetime.UTC)
    assert hours == {f"{first + datetime.timedelta(hours=n):%Y-%m-%d-%H}" for n in range(3)}
    assert bytes(rows[0]["value"]).startswith(b"order")
    assert rows[0]["headers"][0]["key"] == "n"

    assert export_parquet(spark, root, target, ["orders"], by="hour").records == 0
    with logstore.open(root) as store:
        store["orders"].append(b"new", key=b"k", timestamp=START)
        store.create_topic("late").append(b"other topic", timestamp=START)
    report = export_parquet(spark, root, target, ["orders", "late"], by="hour")
    assert report.records == 2
    assert len(exported(spark, target)) == 302
    assert not list((target / "_logstore").glob("run-*"))


def test_an_export_as_text_by_day(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    export_parquet(spark, root, tmp_path / "lake", ["orders"], decode=True, compression="snappy")
    row = exported(spark, tmp_path / "lake")[0]
    assert row["value"].startswith("order")
    assert str(row["date"]) == "2023-11-14"


def test_an_export_killed_at_any_step_has_every_record_once(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    """The steps after the plan need no Spark: a kill ends them at each step in turn."""
    target = tmp_path / "lake"
    aside = target / "_logstore"
    original = exporting._finish
    exporting._finish = lambda root: False
    try:  # as if killed right after the decision
        export_parquet(spark, root, target, ["orders"], by="hour")
    finally:
        exporting._finish = original
    assert (aside / "plan.json").exists()
    assert not list(target.glob("topic=*"))
    watched = ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir"))
    steps = 0
    while killed_at(steps, lambda: original(target), watched):
        steps += 1
    assert steps > 5
    report = export_parquet(spark, root, target, ["orders"], by="hour")
    assert report.records == 0
    assert len(exported(spark, target)) == 300


def test_an_export_that_died_before_its_plan_leaves_nothing(
    spark: SparkSession, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "lake"

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(exporting, "_replace", full)
        export_parquet(spark, root, target, ["orders"])
    assert list((target / "_logstore").glob("run-*"))
    assert not list(target.glob("topic=*"))
    assert export_parquet(spark, root, target, ["orders"]).records == 300
    assert len(exported(spark, target)) == 300


def test_an_export_says_what_was_lost(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "lake"
    export_parquet(spark, root, target, ["orders"])
    with logstore.open(root) as store:
        log = store["orders"][0]
        end = log.end_offset
        log.extend([b"a", b"b", b"c"])
        log.trim(end + 2)
    with pytest.raises(PipelineError, match=rf"orders-0: offsets {end} to {end + 1} were deleted"):
        export_parquet(spark, root, target, ["orders"])
    assert export_parquet(spark, root, target, ["orders"], allow_loss=True).records == 1
    with logstore.open(root) as store:
        store.delete_topic("orders")
        store.create_topic("orders")
    with pytest.raises(PipelineError, match="made again"):
        export_parquet(spark, root, target, ["orders"])
    with pytest.raises(PipelineError, match="by must be one of"):
        export_parquet(spark, root, target, ["orders"], by="year")


# ---- replay ----


def upper(frame: DataFrame) -> DataFrame:
    return frame.withColumn("value", f.upper(f.col("value").cast("string")))


def test_a_replay_keeps_everything_but_its_topic(spark: SparkSession, root: Path) -> None:
    report = replay(spark, root, "orders", "again")
    assert (report.records, report.repeated) == (300, False)
    before, after = records(root, "orders"), records(root, "again")
    strip = lambda part: [(r.key, r.value, r.headers, r.timestamp) for r in part]  # noqa: E731
    assert [strip(part) for part in after] == [strip(part) for part in before]
    assert replay(spark, root, "orders", "again").repeated
    assert len(values(root, "again")) == 300


def test_a_replay_of_a_range_recomputes_into_another_store(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    report = replay(
        spark, root, "orders", "loud", start=START + HOUR, end=START + 2 * HOUR,
        target=tmp_path / "other", transform=upper, name="first try",
    )  # fmt: skip
    assert report.records == 100
    assert values(tmp_path / "other", "loud") == sorted(
        (b"ORDER %d" % n for n in range(100, 200)), key=repr
    )
    with logstore.open(tmp_path / "other") as store:
        store.create_topic("single")
    replay(spark, root, "orders", "single", target=tmp_path / "other")
    assert len(values(tmp_path / "other", "single")) == 300
    with pytest.raises(PipelineError, match="into itself"):
        replay(spark, root, "orders", "orders")


# ---- compact ----


def test_the_last_record_of_every_key_is_kept_in_order(spark: SparkSession, root: Path) -> None:
    with logstore.open(root) as store:
        store["orders"].append(None, key=b"k7", timestamp=START)
        store["orders"].append(b"no key", timestamp=START, partition=0)
    report = compact(spark, root, "orders", "newest")
    assert (report.read, report.kept, report.repeated) == (302, 101, False)
    parts = records(root, "newest")
    for number, (old, new) in enumerate(zip(records(root, "orders"), parts, strict=True)):
        last = {r.key: r for r in old if r.key is not None}
        keyless = [r for r in old if r.key is None]
        expected = sorted([*last.values(), *keyless], key=lambda r: r.offset)
        assert [(r.key, r.value) for r in new] == [(r.key, r.value) for r in expected], number
    assert compact(spark, root, "orders", "newest").repeated
    dropped = compact(spark, root, "orders", "live", drop_tombstones=True)
    assert dropped.kept == 100


def test_duplicates_are_removed(spark: SparkSession, root: Path) -> None:
    with logstore.open(root) as store:
        copies = [Record(r.value, key=r.key, timestamp=r.timestamp + 5) for r in store["orders"][0]]
        store["orders"].extend(copies, partition=1)
    assert compact(spark, root, "orders", "once", by="key,value", keep="first").kept == 300
    assert values(root, "once") == sorted((b"order %d" % n for n in range(300)), key=repr)
    first = compact(spark, root, "orders", "first", keep="first", name="by key")
    assert first.kept < 300
    with pytest.raises(PipelineError, match="keep must be"):
        compact(spark, root, "orders", "x", keep="middle")


# ---- verify ----


def test_a_sound_store_is_found_sound(spark: SparkSession, root: Path) -> None:
    replay(spark, root, "orders", "again")  # with markers of transactions
    report = verify(spark, root)
    assert report.ok, str(report)
    assert (report.topics, report.partitions, report.records) == (2, 6, 600)
    assert report.segments > 6
    assert "all sound" in str(report)


def test_damage_gaps_and_bad_indexes_are_named(spark: SparkSession, root: Path) -> None:
    parts = sorted((root / "orders-0").glob("*.log"))
    assert len(parts) > 2
    raw = bytearray(parts[0].read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    parts[0].write_bytes(raw)
    logs = sorted((root / "orders-1").glob("*.log"))
    for name in logs[1].parent.glob(f"{logs[1].stem}.*"):
        name.unlink()
    with logstore.open(root) as store:
        source = store.create_topic("source")[0]
        for n in range(5):
            source.append(b"%d" % n)
        batches = source.read_batches(0, 1 << 20)
        store.delete_topic("source")
        copy = store.create_topic("copy")[0]
        for raw in (batches[0], batches[2]):  # one is missing, for no known reason
            copy.append_batch(raw, origin="follower")
        copy.roll()
        copy.append_batch(batches[4], origin="follower")
    report = verify(spark, root)
    assert not report.ok
    found = {(x.topic, x.partition): x for x in report.faults if x.topic == "orders"}
    assert found["orders", 0].kind == "damage"
    gone = found["orders", 1]
    assert (gone.first_offset, gone.last_offset) == (int(logs[1].stem), int(logs[2].stem) - 1)
    assert report.records < 300
    gaps = [(x.first_offset, x.last_offset) for x in report.faults if x.kind == "gap"]
    assert gaps == [(1, 1), (3, 3)]


# ---- audit ----


def test_an_audit_follows_keys_through_topics(
    spark: SparkSession, root: Path, tmp_path: Path
) -> None:
    with logstore.open(root) as store:
        paid = store.create_topic("paid")
        for n in range(100):
            if n != 13:  # never paid
                paid.append(b"", key=b"k%d" % n, timestamp=START + n * HOUR // 100 + 5000)
        paid.append(b"", key=b"k1", timestamp=START + HOUR)
        paid.append(b"", key=b"unknown", timestamp=START + HOUR)
    report = audit(spark, root, ["orders", "paid"], tmp_path / "out")
    orders, paid_report = report.topics
    assert (orders.records, orders.duplicate_keys, orders.missing_keys) == (300, 100, 0)
    assert (paid_report.records, paid_report.duplicate_keys) == (101, 1)
    assert (paid_report.missing_keys, paid_report.extra_keys) == (1, 1)
    assert paid_report.missing_examples == ("k13",)
    assert not report.ok
    hours = [hour for hour in report.hours if hour.topic == "orders"]
    assert [hour.records for hour in hours] == [100, 100, 100]
    delayed = [hour for hour in report.hours if hour.topic == "paid"]
    assert delayed[0].delay_p50_ms == 5000
    page = Path(report.page).read_text("utf-8")
    assert page.count("<svg") == 5
    assert "k13" in page
    rows = spark.read.parquet(str(tmp_path / "out" / "hours.parquet")).collect()
    assert len(rows) == len(report.hours)
    assert (tmp_path / "out" / "topics.csv").read_text().startswith('"topic","partitions"')


# ---- finish ----


def test_finish_completes_a_commit_that_was_cut_short(root: Path) -> None:
    with PreparedWriter(root, "app", 0) as writer:
        writer.encoder("orders", 0).append(b"late")
        writer.added("orders", 0, 1, keyless=True)
        prepared = writer.finish()
    assert prepared is not None
    with PreparedWriter(root, "job", None) as writer:
        writer.encoder("orders", 0).append(b"of a job that died")
        writer.added("orders", 0, 1, keyless=True)
        writer.finish()
    watched = ((logstore.Partition, "end_transaction"),)
    assert killed_at(0, lambda: Committer(root).commit("app", 0, [prepared]), watched)
    assert b"late" not in values(root, "orders")
    report = finish(root)
    assert report.finished == (("app", 0, 1),)
    assert (report.removed, report.left) == (1, 1)
    assert b"late" in values(root, "orders")
    assert finish(root, orphan_age=0).removed == 1


# ---- commands ----


def test_every_pipeline_is_a_command(shell: Any, root: Path, tmp_path: Path) -> None:
    code, out, err = shell("export", root, tmp_path / "lake", "orders", "--by", "none", "--json")
    assert code == 0
    assert json.loads(out)["records"] == 300
    assert "300 records in" in err
    code, out, err = shell("replay", root, "orders", "again", "--start", START + HOUR, "--quiet")
    assert (code, err) == (0, "")
    assert "200 records of orders into again" in out
    code, out, _ = shell("compact", root, "orders", "newest")
    assert code == 0
    assert "100 kept in newest (33.3 %)" in out
    code, out, _ = shell("verify", root)
    assert code == 0
    assert "all sound" in out
    code, out, _ = shell("audit", root, tmp_path / "audit", "orders", "again", "newest")
    assert code == 0
    assert (tmp_path / "audit" / "audit.html").exists()
    code, out, _ = shell("finish", root)
    assert (code, out.strip()) == (0, "0 prepared files removed, 0 left to their jobs")


def test_what_is_wrong_is_the_exit_code(shell: Any, root: Path, tmp_path: Path) -> None:
    damaged = min((root / "orders-0").glob("*.log"))
    raw = bytearray(damaged.read_bytes())
    raw[200] ^= 0xFF
    damaged.write_bytes(raw)
    code, out, _ = shell("verify", root, "orders", "--json")
    assert code == 1
    assert json.loads(out)["faults"][0]["kind"] == "damage"
    code, _, err = shell("replay", root, "orders", "orders")
    assert code == 2
    assert "into itself" in err
    code, _, err = shell("verify", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err
    code, _, err = shell("replay", root, "orders", "x", "--transform", "nothing:here")
    assert code == 2
    assert "MODULE:FUNCTION" in err


def test_the_package_is_a_command_of_its_own(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyspark_logstore.pipelines", "finish", str(root)],
        env={**os.environ, "PYTHONPATH": str(CONNECTOR)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0 prepared files removed, 0 left to their jobs"
    assert "looking for unfinished commits" in done.stderr
