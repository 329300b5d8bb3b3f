"""kill -9 of a process that schedules, cancels and delivers; a ledger outside has its promises.

The child writes a line before and after each call.  The parent kills it after some lines, opens the
store and compares: D1, D2 and D6.  How far the child gets depends on the machine; the result of the
comparison does not.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

import logstore
from logstore import Scheduler
from tests.campaign import sized
from tests.kit import PATIENCE

KILLS = sized(3, 20, 200)
LINES = 600  # the child is killed after at most so many


def work(path: str, seed: int) -> None:
    """Schedule, cancel and deliver until killed."""
    luck = random.Random(seed)
    with logstore.open(path, durability="os") as store:
        store.create_topic("t", partitions=2, exist_ok=True)
        scheduler = Scheduler.of(store, loaded_max=20, batch_max=9)
        recent: list[str] = []
        with scheduler:
            for number in itertools.count():
                if number % 20 == 0:
                    scheduler.run_once()  # also if the thread gets no turn on a busy machine
                after = luck.choice([0, 0.001, 0.01, 0.05, 3000, 90_000])
                ticket = scheduler.schedule("t", b"v", deliver_after=after).id
                print("scheduled", ticket, flush=True)
                recent = [*recent[-20:], ticket]
                act = luck.random()
                chosen = luck.choice(recent)
                if act < 0.3:
                    print("cancelling", chosen, flush=True)
                    if scheduler.cancel(chosen):
                        print("cancelled", chosen, flush=True)
                    else:
                        print("refused", chosen, flush=True)


class Ledger:
    """The promises of all children so far."""

    def __init__(self) -> None:
        self.scheduled: set[str] = set()
        self.cancelling: set[str] = set()
        self.cancelled: set[str] = set()
        self.refused: set[str] = set()

    def take(self, line: str) -> None:
        kind, ticket = line.split()
        getattr(self, kind).add(ticket)

    def compare(self, path: Path) -> int:
        """Compare the store with the promises; return how many records are delivered."""
        with logstore.open(path, durability="os") as store:
            delivered: list[str] = []
            for log in store["t"]:
                for record in log.scan(isolation="read_committed"):
                    headers = dict(record.headers)
                    delivered.append((headers["logstore.delay.id"] or b"").decode())
                    assert record.timestamp >= int(headers["logstore.delay.due"] or b"")  # D2
            pending = {each.ticket.id for each in Scheduler.of(store).pending(limit=10**6)}
            store.check()
        once = set(delivered)
        assert len(delivered) == len(once)  # D1
        assert not once & pending
        assert not self.cancelled & (once | pending)  # D1: never both
        # D6.  A cancellation without an answer may have happened or not, and of each child the
        # last ticket may be missing in the ledger.
        assert self.scheduled - once - pending <= self.cancelling
        assert len((once | pending) - self.scheduled) <= KILLS
        return len(once)


@pytest.mark.campaign
def test_a_killed_scheduler_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    luck = random.Random(11)
    ledger = Ledger()
    delivered = 0
    for seed in range(KILLS):
        command = [sys.executable, "-m", __spec__.name, str(tmp_path / "s"), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            try:
                for _ in range(luck.randrange(1, LINES)):
                    line = child.stdout.readline()
                    assert line, f"the child ended with {child.wait(PATIENCE)}"
                    ledger.take(line)
            finally:
                child.kill()
            # Lines that were written before the kill are promises as well; the last may be cut.
            for line in child.stdout.read().splitlines(keepends=True):
                if line.endswith("\n"):
                    ledger.take(line)
        delivered = ledger.compare(tmp_path / "s")
    assert len(ledger.scheduled) > KILLS
    assert delivered and ledger.cancelled  # the campaign met what it is about


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
