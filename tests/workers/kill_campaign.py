"""Workers with 16 threads in a process that is killed with -9 again and again.

    python -m tests.workers.kill_campaign --kills 20 --seed 1

A child is forked from this process, which holds nothing of logstore open.  Its handlers write their
starts and ends to a pipe: a ledger outside of the child, which no kill can take back.  The child is
killed after a random number of ends.  Then the ledger is compared with the commits in the store:

- a record that is finished in a commit has an end in the ledger: nothing is lost;
- a record that was finished in the last commit is not started again;
- the handlers of one key run one after the other, and first end in the order of offsets;
- each output is committed once.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import struct
import tempfile
from collections import Counter
from pathlib import Path

import logstore
from logstore import Groups, Outgoing, Record, TopicPartition, Workers
from logstore.workers.progress import Place, Progress

PARTITIONS, KEYS, THREADS, GROUP = 2, 30, 16, "g"
EVENT = struct.Struct(">cBI")  # kind, partition, offset
Where = tuple[int, int]


def work(path: Path, ledger: int) -> None:
    """Process records, and write each start and each end to the ledger."""

    def handle(record: Record) -> Outgoing | None:
        assert record.value is not None and record.partition is not None
        # One write of a few bytes to a pipe is atomic.
        os.write(ledger, EVENT.pack(b"s", record.partition, record.offset))
        sum(range(2000))
        os.write(ledger, EVENT.pack(b"e", record.partition, record.offset))
        return Outgoing("out", record.value) if record.offset % 3 == 0 else None

    with (
        logstore.open(path, durability="os") as store,
        Workers(store, "t", group_id=GROUP, handler=handle, concurrency=THREADS, crash_limit=100,
                commit_interval=0.005, buffer_records=100) as workers,
    ):  # fmt: skip
        workers.wait(until="idle")


def run_child(path: Path, *, ends: int | None) -> tuple[list[tuple[bytes, Where]], int]:
    """Fork a child, and kill it after so many ends; return its ledger and its wait status."""
    reading, writing = os.pipe()
    # A child that is not read from waits: it is never more than a few hundred ends ahead.
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            work(path, writing)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    raw = bytearray()
    count = 0
    while chunk := os.read(reading, 1 << 16):
        raw += chunk
        count = len(raw) // EVENT.size // 2  # about as many ends as starts
        if ends is not None and count >= ends:
            os.kill(child, signal.SIGKILL)
            ends = 1 << 62
    os.close(reading)
    status = os.waitpid(child, 0)[1]
    whole = len(raw) - len(raw) % EVENT.size
    events = [(kind, (part, offset)) for kind, part, offset in EVENT.iter_unpack(raw[:whole])]
    return events, status


def finished(path: Path) -> set[Where]:
    """Return the records that the last commits have as finished."""
    found: set[Where] = set()
    with logstore.open(path, readonly=True) as store:
        for tp, committed in Groups(store).committed(GROUP).items():
            place = Place(GROUP, store["t"].id, tp.partition)
            progress = Progress.decode(committed.metadata, place, committed.offset)
            closed = set(range(progress.seen)) - set(progress)
            found |= {(tp.partition, offset) for offset in closed}
    return found


def check_life(events: list[tuple[bytes, Where]], done: set[Where], first: dict[int, int]) -> int:
    """Check the ledger of one life; return how many handlers ran at its end.

    `done` was finished before; `first` has, by key, the greatest offset whose handler has ended.
    """
    running: dict[tuple[int, int], int] = {}
    for kind, (part, offset) in events:
        key = part, offset % KEYS
        if kind == b"s":
            assert (part, offset) not in done, f"{part}-{offset} was finished, and is started again"
            assert key not in running, f"{part}-{offset} and {running[key]} run at once"
            running[key] = offset
        else:
            assert running.pop(key) == offset
            number = part * KEYS + offset % KEYS
            assert offset <= first.get(number, offset % KEYS - KEYS) + KEYS, "one was passed over"
            first[number] = max(offset, first.get(number, -1))
    assert len(running) <= THREADS
    return len(running)


def campaign(path: Path, kills: int, seed: int, count: int) -> dict[str, int]:
    chance = random.Random(seed)
    with logstore.open(path, durability="os") as store:
        store.create_topic("out", partitions=1)
        for log in store.create_topic("t", partitions=PARTITIONS):
            log.extend([Record(b"%d-%d" % (log.number, n), key=b"%d" % (n % KEYS))
                        for n in range(count)])  # fmt: skip
    ended: set[Where] = set()
    done: set[Where] = set()
    first: dict[int, int] = {}
    totals: Counter[str] = Counter(records=PARTITIONS * count)
    while len(done) < PARTITIONS * count:
        more = totals["kills"] < kills
        ends = chance.randrange(1, PARTITIONS * count // kills // 2) if more else None
        events, status = run_child(path, ends=ends)
        assert ends is not None or status == 0, f"the last child ended with {status}"
        running = check_life(events, done, first)
        new = {where for kind, where in events if kind == b"e"}
        totals["repeated"] += len(new & ended)
        ended |= new
        before, done = done, finished(path)
        assert before <= done, "a commit took a finished record back"
        assert done <= ended, "a record is finished, and its handler never returned"
        totals["kills"] += os.WIFSIGNALED(status)
        totals["most_running"] = max(totals["most_running"], running)
    assert len(ended) == PARTITIONS * count
    with logstore.open(path, readonly=True) as store:
        written = Counter(r.value for r in store["out"][0].scan(isolation="read_committed"))
        assert set(written.values()) == {1}, "an output was committed twice"
        assert len(written) == PARTITIONS * len(range(0, count, 3))
        assert TopicPartition("t", 0) in Groups(store).committed(GROUP)
    return dict(totals)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="logstore-workers-"))
    try:
        count = 400 * options.kills  # enough for all kills, and for a child that is ahead
        print(json.dumps(campaign(folder / "data", options.kills, options.seed, count)))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
