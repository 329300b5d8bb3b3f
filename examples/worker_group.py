"""A worker group: threads that share the partitions of a topic, and come and go.

    python examples/worker_group.py [directory]

A worker crashes in the middle of a job; four others take over and share the rest.  Every job is
done, the one it was at by somebody else, and the history of the group tells who came and went.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import logstore
from logstore import Consumer, Groups, Store, TopicPartition

JOBS = 400


class Crash(Exception):
    """A worker dies in the middle of a job."""


def work(store: Store, name: str, done: Counter[bytes], over: threading.Event,
         crash_after: int | None = None) -> None:  # fmt: skip
    """Process jobs until there are none left, or until it crashes."""
    finished = 0
    with Consumer(store, "jobs", group_id="workers", client_id=name, timeout=0.2) as consumer:
        while not over.is_set():
            for record in consumer:
                if finished == crash_after:
                    raise Crash(name)  # this job is not committed, and comes again elsewhere
                assert record.value is not None
                done[record.value] += 1
                finished += 1  # done, and committed, once the loop asks for the next one


def crashing(*arguments: object) -> None:
    try:
        work(*arguments)  # type: ignore[arg-type]
    except Crash as crash:
        print(f"worker {crash} crashed")


def run(directory: Path) -> None:
    with logstore.open(directory) as store:
        jobs = store.create_topic("jobs", partitions=4)
        for number in range(JOBS):
            jobs.append(b"job %d" % number, key=b"customer %d" % (number % 20), durability="os")
        done: Counter[bytes] = Counter()
        over = threading.Event()
        first = threading.Thread(target=crashing, args=(store, "w0", done, over, 10))
        first.start()
        first.join()
        print(f"{len(done)} jobs done so far")
        crew = [
            threading.Thread(target=work, args=(store, f"w{n}", done, over)) for n in range(1, 5)
        ]
        for thread in crew:
            thread.start()
        while len(done) < JOBS:
            over.wait(0.05)
        over.set()
        for thread in crew:
            thread.join()
        groups = Groups(store)
        ends = {TopicPartition("jobs", log.number): log.end_offset for log in jobs}
        committed = {tp: each.offset for tp, each in groups.committed("workers").items()}
        for change in groups.history("workers"):
            print(change)
        print(f"{len(done)} jobs done; all committed: {committed == ends}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
