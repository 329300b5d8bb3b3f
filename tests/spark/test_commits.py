"""Commits of prepared files, without Spark: killed at every step, replayed, swept."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark_logstore.commits import Committer, SinkError
from pyspark_logstore.prepared import PreparedFile, PreparedWriter, prepared_names

import logstore
from logstore import Partition, Store
from tests.spark import killing

APP = "orders to totals"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with logstore.open(tmp_path / "store") as store:
        store.create_topic("t", partitions=3)
        store["t"].append(b"before", partition=0)
    return tmp_path / "store"


def prepare(
    root: Path,
    rows: dict[tuple[str, int], Sequence[bytes]],
    *,
    batch: int | None = 0,
    application: str = APP,
    batch_bytes: int = 200,
) -> PreparedFile:
    with PreparedWriter(root, application, batch, batch_bytes=batch_bytes) as writer:
        for (topic, partition), values in rows.items():
            encoder = writer.encoder(topic, partition)
            for value in values:
                encoder.append(value, timestamp=1_700_000_000_000)
            writer.added(topic, partition, len(values), keyless=True)
        prepared = writer.finish()
    assert prepared is not None
    return prepared


def two_files(root: Path, batch: int, attempt: str) -> list[PreparedFile]:
    """Two tasks, each with rows for two of three partitions, several batches each."""
    text = f"{batch}-{attempt}"
    first = {("t", 0): [f"{text}-a{n}".encode() for n in range(40)],
             ("t", 1): [f"{text}-b{n}".encode() for n in range(25)]}  # fmt: skip
    second = {("t", 1): [f"{text}-c{n}".encode() for n in range(30)],
              ("t", 2): [f"{text}-d{n}".encode() for n in range(10)]}  # fmt: skip
    return [prepare(root, first, batch=batch), prepare(root, second, batch=batch)]


def contents(root: Path, isolation: str = "read_uncommitted") -> list[list[bytes]]:
    with logstore.open(root, readonly=True) as store:
        return [[r.value or b"" for r in p.scan(isolation=isolation)] for p in store["t"]]


def expected(attempts: dict[int, str]) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[b"before"], [], []]
    for batch, attempt in attempts.items():
        text = f"{batch}-{attempt}"
        parts[0] += [f"{text}-a{n}".encode() for n in range(40)]
        parts[1] += [f"{text}-b{n}".encode() for n in range(25)]
        parts[1] += [f"{text}-c{n}".encode() for n in range(30)]
        parts[2] += [f"{text}-d{n}".encode() for n in range(10)]
    return parts


def leftovers(root: Path) -> list[str]:
    return [n for n in os.listdir(root) if n.endswith((".prepared", ".plan", ".tmp"))]


# ---- replays ----


def test_a_batch_is_committed_and_its_replay_changes_nothing(root: Path) -> None:
    committer = Committer(root)
    done = committer.commit(APP, 0, two_files(root, 0, "first"))
    assert (done.applied, done.records) == (True, 105)
    for _ in range(2):
        again = committer.commit(APP, 0, two_files(root, 0, "again"))
        assert (again.applied, again.records) == (False, 0)
    committer.commit(APP, 1, two_files(root, 1, "first"))
    assert contents(root) == contents(root, "read_committed") == expected({0: "first", 1: "first"})
    assert leftovers(root) == []
    with logstore.open(root) as store:
        store.check()


def test_an_older_batch_is_a_replay_too(root: Path) -> None:
    committer = Committer(root)
    committer.commit(APP, 7, two_files(root, 7, "first"))
    assert not committer.commit(APP, 3, two_files(root, 3, "late")).applied
    assert contents(root) == expected({7: "first"})


def test_two_queries_do_not_know_each_others_batches(root: Path) -> None:
    committer = Committer(root)
    for name in ("one", "two"):
        files = [prepare(root, {("t", 2): [name.encode()]}, application=name)]
        assert committer.commit(name, 0, files).applied
    assert contents(root)[2] == [b"one", b"two"]


def test_batches_beyond_the_epochs_of_one_producer(root: Path) -> None:
    committer = Committer(root)
    numbers = [32_766, 32_767, 32_768, 65_536, 10**12]
    for number in numbers:
        rows = {("t", 1): [b"%d" % number]}
        for _ in range(2):
            committer.commit(APP, number, [prepare(root, rows, batch=number)])
    assert contents(root)[1] == [b"%d" % number for number in numbers]


def test_a_new_query_under_an_old_name_is_refused(root: Path) -> None:
    committer = Committer(root)
    committer.commit(APP, 5, two_files(root, 5, "x"), query_id="q1")
    with pytest.raises(SinkError, match=r"batches up to 5 as query q1.*choose another txnAppId"):
        committer.commit(APP, 0, two_files(root, 0, "x"), query_id="q2")
    assert not committer.commit(APP, 5, two_files(root, 5, "y"), query_id="q1").applied
    assert committer.commit(APP, 6, two_files(root, 6, "x"), query_id="q2").applied


# ---- killed ----


#: Everything that changes files or the log.
STEPS: tuple[tuple[Any, str], ...] = (
    (os, "replace"), (os, "fsync"), (Path, "unlink"), (Store, "create_topic"),
    (Store, "close"), (Partition, "append_batch"), (Partition, "end_transaction"),
    (Partition, "sync"), (Partition, "trim"),
)  # fmt: skip


def killed_at(step: int, act: Callable[[], object]) -> bool:
    """Whether `act` was killed at that step; else it came to its end."""
    return killing.killed_at(step, act, STEPS)


def test_killed_at_any_step_nothing_is_lost_and_nothing_is_there_twice(root: Path) -> None:
    committer = Committer(root)
    attempts: dict[int, str] = {}
    step = 0
    while True:
        # The replay has other rows, in another number of batches: they must not be mixed.
        files = two_files(root, step, "first")
        killed = killed_at(
            step, lambda files=files, batch=step: committer.commit(APP, batch, files)
        )  # type: ignore[misc]
        # Readers meanwhile: a part of it in order, or for committed readers nothing or all of it.
        old, new = expected(attempts), expected({**attempts, step: "first"})
        for has, was, will in zip(contents(root), old, new, strict=True):
            assert len(has) >= len(was)
            assert has == will[: len(has)]
        for has, was, will in zip(contents(root, "read_committed"), old, new, strict=True):
            assert has in (was, will)
        decided = committer.commit(APP, step, two_files(root, step, "second")).applied is False
        attempts[step] = "first" if decided else "second"
        assert contents(root) == expected(attempts), f"killed at step {step}"
        assert leftovers(root) == []
        if not killed:
            break
        step += 1
    assert contents(root, "read_committed") == expected(attempts)
    assert step > 15
    assert "second" in attempts.values(), "no kill before the plan"
    assert sum(attempt == "first" for attempt in attempts.values()) > 8, "no kill behind the plan"
    with logstore.open(root) as store:
        store.check()
        assert all(not p.ongoing_transactions for p in store["t"])


def test_killed_again_and_again_during_the_replay(root: Path) -> None:
    """One commit, cut short at every step in turn by replays that are cut short one step later."""
    committer = Committer(root)
    files = two_files(root, 0, "first")
    assert killed_at(6, lambda: committer.commit(APP, 0, files))
    for step in range(200):
        more = two_files(root, 0, f"replay {step}")
        if not killed_at(step, lambda more=more: committer.commit(APP, 0, more)):  # type: ignore[misc]
            break
    else:
        pytest.fail("it never came to its end")
    assert contents(root) == contents(root, "read_committed") == expected({0: "first"})


def test_another_query_finishes_what_was_cut_short(root: Path) -> None:
    committer = Committer(root)

    def write(step: int) -> None:
        app = f"app {step}"
        rows = {("t", 2): [b"%d" % step]}
        committer.commit(app, 0, [prepare(root, rows, application=app)])

    steps = [step for step in range(30) if killed_at(step, functools.partial(write, step))]
    assert steps
    other = prepare(root, {("t", 1): [b"other"]}, application="other")
    committer.commit("other", 0, [other])
    after = contents(root)
    assert after[1] == [b"other"]
    assert not [name for name in os.listdir(root) if name.endswith(".plan")]
    assert after == contents(root, "read_committed")
    for step in steps:  # replays add what had not been decided, and only that
        write(step)
    assert sorted(map(int, contents(root)[2])) == list(range(30))


def test_finish_completes_a_plan_without_any_query(root: Path) -> None:
    committer = Committer(root)
    files = two_files(root, 0, "first")
    assert killed_at(6, lambda: committer.commit(APP, 0, files))
    (finished,) = committer.finish()
    assert (finished.application, finished.batch_id, finished.records) == (APP, 0, 105)
    assert contents(root) == expected({0: "first"})
    assert committer.finish() == []


def test_records_of_others_between_the_crash_and_the_replay_stay(root: Path) -> None:
    committer = Committer(root)
    steps = list(range(5, 16, 2))
    for step in steps:
        files = [prepare(root, {("t", 0): [b"%d.%d" % (step, n) for n in range(40)]}, batch=step)]
        killed_at(step, lambda files=files, step=step: committer.commit(APP, step, files))  # type: ignore[misc]
        with logstore.open(root) as store:
            store["t"].append(b"other %d" % step, partition=0)
        again = [prepare(root, {("t", 0): [b"%d.%d" % (step, n) for n in range(40)]}, batch=step)]
        committer.commit(APP, step, again)
    values = contents(root, "read_committed")[0]
    assert sorted(values) == sorted(
        [b"before"]
        + [b"other %d" % step for step in steps]
        + [b"%d.%d" % (step, n) for step in steps for n in range(40)]
    )


def test_a_topic_deleted_between_the_crash_and_the_replay_stays_deleted(root: Path) -> None:
    committer = Committer(root)
    files = two_files(root, 0, "first")
    assert killed_at(6, lambda: committer.commit(APP, 0, files))
    with logstore.open(root) as store:
        store.delete_topic("t")
        store.create_topic("t", partitions=3)
    assert len(committer.finish()) == 1
    assert contents(root) == [[], [], []]


def test_overwriting_killed_at_any_step(root: Path) -> None:
    committer = Committer(root)
    step = 0
    while True:

        def write(attempt: str, step: int = step) -> None:
            rows = {("t", 0): [f"{step}-{attempt}".encode()]}
            files = [prepare(root, rows, application=f"job {step} {attempt}", batch=None)]
            committer.commit(f"job {step} {attempt}", 0, files, once=True, overwrite=["t"])

        killed = killed_at(step, functools.partial(write, "first"))
        committer.finish()
        if killed:
            assert len(contents(root)[0]) == 1
            write("second")
        final = "second" if killed else "first"
        assert contents(root) == [[f"{step}-{final}".encode()], [], []]
        if not killed:
            break
        step += 1
    assert step > 10
    assert not [name for name in os.listdir(root) if name.endswith(".done")]


# ---- refusals, before anything is decided ----


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        ({"cleanup.policy": "compact"}, [b"x"], "have no key"),
        ({"max.message.bytes": 300}, [bytes(400)], "option batchBytes"),
        ({"message.timestamp.before.max.ms": 1000}, [b"x"], r"message\.timestamp\.before"),
    ],
)
def test_what_the_topic_would_refuse_is_refused_before_the_plan(
    root: Path, config: dict[str, Any], rows: list[bytes], message: str
) -> None:
    with logstore.open(root) as store:
        store.create_topic("strict", config=config)
    committer = Committer(root)
    file = prepare(root, {("t", 0): [b"fine"], ("strict", 0): rows})
    with pytest.raises(SinkError, match=message):
        committer.commit(APP, 0, [file])
    committer.abort([file, None])
    assert leftovers(root) == []
    assert contents(root)[0] == [b"before"]


def test_a_missing_topic_or_partition_is_named(root: Path) -> None:
    committer = Committer(root)
    with pytest.raises(SinkError, match=r"no topic 'new'.*createTopic"):
        committer.commit(APP, 0, [prepare(root, {("new", 0): [b"x"]})])
    with pytest.raises(SinkError, match=r"partitions 0 to 2.*partition 3"):
        committer.commit(APP, 0, [prepare(root, {("t", 3): [b"x"]})])
    committer.commit(APP, 0, [prepare(root, {("new", 1): [b"x"]})], create={"new": 2})
    with logstore.open(root, readonly=True) as store:
        assert [r.value for r in store["new"][1]] == [b"x"]


def test_a_store_that_someone_else_writes_to_is_named(root: Path) -> None:
    file = prepare(root, {("t", 0): [b"x"]})
    script = "import logstore, sys; s = logstore.open(sys.argv[1]); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SinkError, match=rf"locked by process {other.pid}.*lockTimeout"):
            Committer(root, lock_timeout=0.1).commit(APP, 0, [file])
        other.kill()
    assert Committer(root).commit(APP, 0, [file]).applied


def test_a_plan_that_cannot_be_read_is_named(root: Path) -> None:
    committer = Committer(root)
    files = two_files(root, 0, "first")
    assert killed_at(6, lambda: committer.commit(APP, 0, files))
    (plan,) = root.glob("*.plan")
    plan.write_bytes(plan.read_bytes()[:100])
    with pytest.raises(SinkError, match=r"\.plan cannot be read.*remove it"):
        committer.commit(APP, 0, two_files(root, 0, "second"))


def test_a_damaged_prepared_file_is_not_appended(root: Path) -> None:
    file = prepare(root, {("t", 0): [b"x" * 50]})
    raw = bytearray((root / file.name).read_bytes())
    raw[-3] ^= 0xFF
    (root / file.name).write_bytes(raw)
    for _ in range(2):
        with pytest.raises(SinkError, match=r"decided, but .* damaged\. .* to give the batch up"):
            Committer(root).commit(APP, 0, [file])
    assert contents(root)[0] == [b"before"]
    raw[-3] ^= 0xFF
    (root / file.name).write_bytes(raw)
    assert len(Committer(root).finish()) == 1
    assert contents(root)[0] == [b"before", b"x" * 50]


def test_a_prepared_file_that_the_driver_does_not_see_is_named(root: Path) -> None:
    file = prepare(root, {("t", 0): [b"x"]})
    (root / file.name).unlink()
    with pytest.raises(SinkError, match="storage that all of them share"):
        Committer(root).commit(APP, 0, [file])
    assert leftovers(root) == []


# ---- orphans ----


def test_orphans_go_with_their_batch_or_with_age(root: Path) -> None:
    committer = Committer(root)
    lost = prepare(root, {("t", 0): [b"lost"]}, batch=0)
    future = prepare(root, {("t", 0): [b"of a later batch"]}, batch=9)
    young = prepare(root, {("t", 0): [b"of a job that runs"]}, batch=None, application="job 1")
    old = prepare(root, {("t", 0): [b"of a job that died"]}, batch=None, application="job 2")
    day_ago = time.time() - 90_000
    os.utime(root / old.name, (day_ago, day_ago))
    committer.commit(APP, 0, two_files(root, 0, "first"))
    names = {name for name, _, _ in prepared_names(root)}
    assert names == {future.name, young.name}
    assert lost.name not in names
    assert contents(root) == expected({0: "first"})


def test_a_leap_of_the_clock_makes_no_prepared_file_old(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = prepare(root, {("t", 0): [b"of a job that runs"]}, batch=None, application="job 1")
    leapt, wall, wall_ns = 2 * 86_400, time.time, time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: wall() + leapt)
        patch.setattr(time, "time_ns", lambda: wall_ns() + leapt * 10**9)
        Committer(root).commit(APP, 0, two_files(root, 0, "first"))
    assert {name for name, _, _ in prepared_names(root)} == {young.name}
    Committer(root).commit("job 1", 0, [young], once=True)
    assert b"of a job that runs" in contents(root)[0]


def test_a_job_takes_all_its_prepared_files_with_it(root: Path) -> None:
    """Of a task that was tried twice at the same time, only one attempt is reported."""
    one, other = (
        prepare(root, {("t", 2): [b"x"]}, batch=None, application="job") for _ in range(2)
    )
    Committer(root).commit("job", 0, [one], once=True)
    assert not (root / other.name).exists()
    assert contents(root)[2] == [b"x"]
    third, fourth = (
        prepare(root, {("t", 2): [b"y"]}, batch=None, application="job 2") for _ in range(2)
    )
    Committer(root).abort([third, None], application="job 2")
    assert not (root / fourth.name).exists()
    assert leftovers(root) == []


def test_abort_keeps_what_a_plan_needs(root: Path) -> None:
    """Spark calls abort when commit raised; but after the plan is written the batch is decided."""
    committer = Committer(root)
    files = two_files(root, 0, "first")
    assert killed_at(6, lambda: committer.commit(APP, 0, files))
    committer.abort(files)
    committer.finish()
    assert contents(root) == expected({0: "first"})


def test_a_writer_that_fails_leaves_no_file(root: Path) -> None:
    with pytest.raises(ZeroDivisionError), PreparedWriter(root, APP, 0) as writer:
        encoder = writer.encoder("t", 0)
        encoder.extend([bytes(1000)] * 2000)
        writer.added("t", 0, 2000, keyless=True)
        assert leftovers(root)
        1 / 0  # noqa: B018
    assert leftovers(root) == []


def test_stores_ignore_the_files_of_sinks(root: Path) -> None:
    prepare(root, {("t", 0): [b"x"]})
    Committer(root, orphan_age=1e9).commit("other", 0, two_files(root, 0, "x"))
    (done,) = root.glob("*.done")
    assert json.loads(done.read_bytes())["batch"] == 0
    with logstore.open(root) as store:
        assert list(store) == ["t"]
        assert store.recovery.clean
