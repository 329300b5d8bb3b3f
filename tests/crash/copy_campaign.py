"""A copy from topic to topic, exactly once, by a process that is killed with -9 again and again.

    python -m tests.crash.copy_campaign --kills 20 --seed 1

The copier reads one topic in a group and writes another in transactions, its offsets with them.
Copiers are forked from this process, which holds nothing of logstore open, and killed at a random
moment of their work.  At the end one more runs until all is copied, and the history checker looks
at what went in, what came out and what the group committed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import cast

import logstore
from logstore import Consumer, Producer
from logstore.coordinators.offset_book import OffsetBook
from logstore.testing.history import assert_clean
from logstore.testing.history_findings import Copy
from logstore.testing.operations import (
    Committed,
    Recorder,
    Send,
)

PARTITIONS = 2
GROUP = "copiers"
LONGEST_LIFE = 0.25  # seconds of work before a kill


def copied(value: bytes) -> bytes:
    return b"copy of " + value


def copy(path: Path, started: int, until_done: bool) -> None:
    """Copy records; write a byte to `started` after the first poll."""
    with logstore.open(path, durability="os") as store:
        consumer = Consumer(store, "source", group_id=GROUP, auto_commit=False)
        producer = Producer(store, "copier", linger=0.001, batch_bytes=400)
        told = False
        with consumer, producer:
            while True:
                records = consumer.poll(max_records=25, timeout=0.05)
                if not told:
                    os.write(started, b"x")
                    told = True
                if not records and until_done and consumer.assignment and _all_read(consumer):
                    return
                if not records:
                    continue
                with producer.transaction() as tx:
                    for record in records:
                        assert record.value is not None
                        tx.send("target", copied(record.value), partition=record.partition)
                    tx.commit_offsets(consumer)


def _all_read(consumer: Consumer) -> bool:
    return all(lag.records == 0 for lag in consumer.lag().values())


def run_copier(path: Path, *, life: float | None) -> int:
    """Fork a copier; kill it when its life is over, or wait for its end.  Its wait status."""
    ready, started = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(ready)
            copy(path, started, until_done=life is None)
            status = 0
        finally:
            os._exit(status)
    os.close(started)
    os.read(ready, 1)  # at work, or dead
    os.close(ready)
    if life is not None:
        time.sleep(life)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def fill(path: Path, count: int, recorder: Recorder) -> None:
    with logstore.open(path, durability="os") as store:
        store.create_topic("source", partitions=PARTITIONS)
        store.create_topic("target", partitions=PARTITIONS)
        with Producer(store) as producer:
            sent = [
                producer.send("source", b"%d" % n, partition=n % PARTITIONS) for n in range(count)
            ]
    for number in range(PARTITIONS):
        sends = [
            Send(("source", number), b"%d" % n, delivery.result(0).offset)
            for n, delivery in enumerate(sent)
            if n % PARTITIONS == number
        ]
        recorder.done("writer", *sends)


def note_committed(path: Path, recorder: Recorder) -> None:
    """Return what the group has committed; no process writes."""
    with logstore.open(path, readonly=True) as store:
        found = OffsetBook.of(store).committed(GROUP)
        offsets = tuple((tuple(where), each.offset) for where, each in sorted(found.items()))
        recorder.done("observer", Committed(GROUP, offsets))


def check(path: Path, recorder: Recorder) -> None:
    """All is copied, each once and in order; nothing is left open."""
    with logstore.open(path, durability="os") as store:
        for source, target in zip(store["source"], store["target"], strict=True):
            for log in (source, target):
                seen = list(log.scan(isolation="read_committed"))
                where = (log.topic, log.number)
                recorder.snapshot(where, seen, isolation="read_committed")
            went_in = [copied(r.value or b"") for r in source.scan(isolation="read_committed")]
            assert [r.value for r in seen] == went_in, f"partition {source.number}"
        committed = OffsetBook.of(store).committed(GROUP)
        assert {tuple(where): each.offset for where, each in committed.items()} == {
            ("source", log.number): log.end_offset for log in store["source"]
        }
        for topic in store:
            for log in store[topic]:
                assert log.ongoing_transactions == [], log.name
        store.check()
    both = [
        frozenset((topic, number) for number in range(PARTITIONS)) for topic in ("source", "target")
    ]
    assert_clean(
        recorder.history(),
        caught_up=True,
        copies=[Copy(both[0], both[1], GROUP, lambda value: copied(cast(bytes, value)))],
    )


def campaign(kills: int, seed: int, count: int) -> dict[str, int]:
    chance = random.Random(seed)
    path = Path(tempfile.mkdtemp(prefix="logstore-copy-"))
    recorder = Recorder()
    try:
        fill(path, count, recorder)
        for _ in range(kills):
            status = run_copier(path, life=chance.random() * LONGEST_LIFE)
            assert os.WIFSIGNALED(status), f"a copier ended with {status}"
            note_committed(path, recorder)
        assert run_copier(path, life=None) == 0
        note_committed(path, recorder)
        check(path, recorder)
        with logstore.open(path, readonly=True) as store:
            written = sum(1 for log in store["target"] for _ in log.scan())
        return {"kills": kills, "records": count, "written": written}
    finally:
        shutil.rmtree(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=int, default=20_000)
    options = parser.parse_args()
    print(json.dumps(campaign(options.kills, options.seed, options.records)))


if __name__ == "__main__":
    main()
