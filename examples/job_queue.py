"""A job queue: jobs in, three worker threads, one job that always fails, nothing lost.

    python examples/job_queue.py [directory]

Each job is leased to one worker.  A job that fails is handed out again; after three attempts it is
a dead letter.  Start it again with the same directory: no job is done twice.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import logstore
from logstore import Queue

JOBS = 50


def run(directory: Path) -> None:
    done: list[str] = []
    with logstore.open(directory) as store:
        jobs = Queue(store, "jobs", max_attempts=3, nack_delay=0.01, value_serializer="string",
                     value_deserializer="string")  # fmt: skip
        for number in range(JOBS):
            jobs.put(f"resize {number}.jpg")
        jobs.put("resize broken.jpg")

        def work() -> None:
            while True:
                try:
                    with jobs.get() as job:
                        if "broken" in job.value:
                            raise ValueError("not an image")
                        done.append(job.value)
                except logstore.ClosedError:  # first: it is a ValueError, too
                    return
                except ValueError:
                    pass  # the block gave the job back

        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        jobs.join()
        size = jobs.size()
        jobs.close()  # the workers that wait for a job end
        for worker in workers:
            worker.join()
        print(f"{len(done)} jobs done, {len(set(done))} different, {size.dead} dead letter")
        (letter,) = store["jobs-dlt"][0].scan(isolation="read_committed")
        reason = dict(letter.headers)["__dlq.errors.message"] or b""
        print(f"{(letter.value or b'').decode()}: {reason.decode()}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            run(Path(made))
