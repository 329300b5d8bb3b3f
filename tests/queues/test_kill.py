"""kill -9 of a process with 2 putters and 4 getters: Q2 and Q3, against a ledger outside.

The child writes a line to a pipe after each promise: a message that was put, and a message whose
acknowledgement is durable.  After each kill the next child uses the same directory.  At the end
everything is drained here: no acknowledged message is handed out again, and every other message
that was put is.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from logstore import Queue
from tests.campaign import sized
from tests.kit import topic_values

KILLS = sized(5, 60, 1000)
CHILD = """
import os, sys, threading
import logstore
from logstore import Queue

path, run = sys.argv[1:]
store = logstore.open(path, durability="os", config={"segment.bytes": 16384})
jobs = Queue(store, "jobs", max_attempts=1000, nack_delay=0, visibility=600)
write = lambda *words: os.write(1, b" ".join(words) + b"\\n")  # one write: whole, or not at all

def put(number):
    turn = 0
    while True:
        value = b"%s.%d.%d" % (run.encode(), number, turn)
        jobs.put(value)
        write(b"put", value)
        turn += 1

def get(number):
    turn = 0
    while True:
        job = jobs.get()
        turn += 1
        if turn % 7 == number:
            job.nack(0)
        elif turn % 31 == number:
            job.reject("every 31st")
            write(b"dead", job.value)
        else:
            job.ack(wait=True)
            write(b"ack", job.value)

for act, count in ((put, 2), (get, 4)):
    for number in range(count):
        threading.Thread(target=act, args=(number,), daemon=True).start()
threading.Event().wait()
"""


@pytest.mark.campaign
def test_kills_lose_no_message_and_repeat_no_acknowledged_one(tmp_path: Path) -> None:
    promised: dict[bytes, set[bytes]] = {b"put": set(), b"ack": set(), b"dead": set()}
    path = tmp_path / "store"
    for run in range(KILLS):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), str(run)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            # Killed after so many promises, and not after so many seconds.
            left, acked = 40 + 17 * (run % 7), 0
            while left > 0 or acked < 3:
                kind, value = child.stdout.readline().split()
                left -= 1
                acked += kind == b"ack"
                assert value not in promised[kind], f"{kind!r} {value!r} twice"
                assert kind == b"put" or value not in promised[b"ack"] | promised[b"dead"]
                promised[kind].add(value)
            child.send_signal(signal.SIGKILL)
            for line in child.stdout.read().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    kind, value = line.split()
                    promised[kind].add(value)
    assert promised[b"ack"]
    with logstore.open(path) as store:
        jobs = Queue(store, "jobs", max_attempts=1000, nack_delay=0, visibility=600)
        left = []
        while not jobs.join(timeout=0):
            job = jobs.get()
            left.append(job.value)
            job.ack()
        dead = topic_values(store, "jobs-dlt", "read_committed") if "jobs-dlt" in store else []
        assert len(left) == len(set(left))
        assert len(dead) == len(set(dead))  # Q3: one letter for a message
        assert not set(left) & (promised[b"ack"] | set(dead))  # Q2
        assert promised[b"dead"] <= set(dead)
        # A message of which no end was promised is here, or ended without time to promise it: at
        # most one of each getter and kill.
        ended = promised[b"put"] - promised[b"ack"] - set(dead) - set(left)
        assert len(ended) <= 4 * KILLS
        assert not store.check()
