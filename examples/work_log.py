"""A work log that survives kill -9: tasks in, results out, nothing lost and nothing done twice.

    python examples/work_log.py [directory]

A worker reads tasks and appends one result for each.  It is killed again and again, at moments
nobody chose.  It keeps no note of where it was: the results are the note, since each names the task
it answers, and the log of results ends where the work does.  An fsync stands behind every append,
so that what the worker has said once is said for good.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from logstore import Partition

TASKS = 200


def work(directory: Path) -> None:
    """The worker: go on behind the last result, until every task has one."""
    with (
        Partition.open(directory / "tasks-0", readonly=True) as tasks,
        Partition.open(directory / "results-0") as results,
    ):
        done = results.tail(1)
        begin = int(dict(done[0].headers)["task"] or b"") + 1 if done else 0
        for task in tasks.scan(begin):
            answer = int(task.value or b"0") ** 2
            results.append(b"%d" % answer, headers=[("task", b"%d" % task.offset)])
            print(task.offset, flush=True)


def run(directory: Path) -> None:
    with Partition.open(directory / "tasks-0") as tasks:
        tasks.extend(b"%d" % number for number in range(TASKS))

    luck = random.Random(7)
    kills = 0
    while True:
        command = [sys.executable, __file__, "--work", str(directory)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        try:
            for _ in range(luck.randrange(1, TASKS // 4)):
                if not worker.stdout.readline():
                    break  # it has finished
            time.sleep(luck.random() / 1000)
            worker.send_signal(signal.SIGKILL)
        finally:
            worker.communicate()
        if worker.returncode != -signal.SIGKILL:
            break
        kills += 1
    assert worker.returncode == 0

    with Partition.open(directory / "results-0", readonly=True) as results:
        answers = [int(record.value or b"") for record in results]
    assert answers == [number**2 for number in range(TASKS)]
    print(f"{TASKS} tasks, {kills} kills with -9: every result once, in order")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]))
    elif len(sys.argv) > 1:
        run(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            run(Path(temporary))
