"""kill -9 of a writer under load, again and again; every acknowledgement is in an outside ledger.

    python -m tests.crash.kill_campaign --kills 10000

One lane is a store, a template process that has imported everything, and this process.  For every
kill the template forks a writer, which opens the store, appends with several threads, rolls,
commits and aborts transactions, compacts and trims; each thread sends each promise
over a socket, after it got the promise.  We kill the writer after enough promises, or while it
still opens the store, and then compare the store with all promises:

  events   every acknowledged record at its offset, byte for byte; no gap, nothing twice, and of
           each thread the first records of what it sent
  ledger   a committed transaction is there as a whole, an aborted or open one not at all
  table    compacted: of every key the newest acknowledged value, or a later one
  recent   trimmed: what is at or above the start, as above

The progress of the writer depends on the machine; the result of the check does not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import logstore
from logstore import BatchEncoder, Compactor, RetentionPolicy, Store, with_producer

FRESH_EVERY = 40  # kills on one store, so that checking all of it stays cheap
SETTINGS = {"segment.bytes": 6000, "index.interval.bytes": 512}
TOPICS = {
    "events": {},
    "ledger": {},
    "table": {"cleanup.policy": "compact"},
    "recent": {},
}


# ---- the writer: a child of the template, until it is killed ----


class Writer:
    def __init__(self, path: str, seed: int, ledger: socket.socket) -> None:
        self.seed = seed
        self.ledger = ledger
        self.store = logstore.open(path, durability="os", config=SETTINGS)
        for name, config in TOPICS.items():
            self.store.create_topic(name, config=config, exist_ok=True)
        abort_open(self.store)

    def tell(self, *words: object) -> None:
        """One packet a promise: sent whole or not at all."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        self.ledger.send(b" ".join(parts))

    def run(self) -> None:
        acts = [self.events, self.events, self.ledgers, self.table, self.recent, self.compact]
        for number, act in enumerate(acts):
            threading.Thread(target=self.work, args=(act, number), daemon=True).start()
        threading.Event().wait()

    def work(self, act: object, number: int) -> None:
        rng = random.Random(self.seed * 10 + number)
        try:
            turn = 0
            while True:
                act(rng, number, turn)  # type: ignore[operator]
                turn += 1
        except BrokenPipeError:
            pass  # the other end is closed: the kill is under way
        except BaseException as error:  # noqa: BLE001
            self.tell("fault", type(error).__name__, str(error))

    def value(self, rng: random.Random, number: int, turn: int) -> bytes:
        return b"%d:%d:%d:" % (self.seed, number, turn) + b"x" * rng.randrange(200)

    def events(self, rng: random.Random, number: int, turn: int) -> None:
        log = self.store["events"][0]
        durability = "fsync" if rng.random() < 0.05 else "os"
        value = self.value(rng, number, turn)
        offset = log.append(value, durability=durability)
        self.tell("events", offset, value)

    def ledgers(self, rng: random.Random, number: int, turn: int) -> None:
        log = self.store["ledger"][0]
        producer = self.seed * 10 + number
        values = [b"%d:%d:%d.%d" % (self.seed, number, turn, i) for i in range(rng.randrange(1, 4))]
        for sequence, value in enumerate(values):
            encoder = BatchEncoder()
            encoder.append(value, key=b"k")
            log.append_batch(
                with_producer(
                    encoder.take(),
                    producer_id=producer,
                    producer_epoch=turn % 30_000,
                    base_sequence=sequence,
                    transactional=True,
                ),
                verify_transaction=False,
            )
        commit = rng.random() < 0.7
        durability = "fsync" if rng.random() < 0.1 else "os"
        log.end_transaction(producer, turn % 30_000, commit=commit, durability=durability)
        self.tell("ledger", "commit" if commit else "abort", *values)

    def table(self, rng: random.Random, number: int, turn: int) -> None:
        key = b"key-%d" % rng.randrange(30)
        value = b"%012d:%d:" % (self.seed * 1_000_000 + turn, number) + b"y" * 50
        self.store["table"][0].append(value, key=key)
        self.tell("table", key, value)
        time.sleep(0.0005)

    def recent(self, rng: random.Random, number: int, turn: int) -> None:
        log = self.store["recent"][0]
        value = self.value(rng, number, turn)
        offset = log.append(value)
        self.tell("recent", offset, value)
        if turn % 50 == 49:
            log.enforce(RetentionPolicy(max_bytes=15_000))

    def compact(self, rng: random.Random, number: int, turn: int) -> None:
        Compactor(self.store["table"][0]).run()
        if turn % 3 == 2:
            self.store["events"][0].roll()
            self.store["table"][0].roll()
            self.store.sync()
        time.sleep(0.002)


def abort_open(store: Store) -> None:
    """What a coordinator does for producers that are gone."""
    log = store["ledger"][0]
    for one in log.ongoing_transactions:
        log.end_transaction(one.producer_id, one.producer_epoch, commit=False)


def template(control: socket.socket) -> None:
    """Forks a writer for every order; everything is imported by now."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while order := control.recv(4096):
        path, seed, address = json.loads(order)
        pid = os.fork()
        if pid == 0:
            try:
                control.close()
                ledger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ledger.connect(address)
                ledger.send(b"pid %d" % os.getpid())
                writer = Writer(path, seed, ledger)
                writer.run()
            except BaseException as error:  # noqa: BLE001
                with contextlib.suppress(OSError):
                    ledger.send(f"fault {type(error).__name__} {error}".encode())
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        control.send(b"gone")


# ---- the ledger and what it is compared with ----


class Lane:
    """One store that is killed again and again."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.seed = seed
        self.rng = random.Random(seed)
        self.kills = 0
        self.acknowledged = 0
        self.checks = 0
        self.address = str(directory / "ledger")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.address)
        self.listener.listen(1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        self.template = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.kill_campaign", "--template", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parent.parent.parent,
        )
        theirs.close()
        self.number = 0
        self.fresh()

    def fresh(self) -> None:
        if self.number:
            shutil.rmtree(self.path)
        self.number += 1
        self.path = self.directory / f"store-{self.number}"
        self.events: dict[int, bytes] = {}
        self.recent: dict[int, bytes] = {}
        self.table: dict[bytes, bytes] = {}
        self.committed: list[tuple[bytes, ...]] = []
        self.aborted: set[bytes] = set()

    def close(self) -> None:
        self.control.close()
        self.listener.close()
        self.template.wait(60)

    def kill_once(self) -> None:
        """Start a writer, listen, kill it, and listen to what is still under way."""
        self.kills += 1
        seed = self.seed * 1_000_000 + self.kills  # grows: later values are greater ones
        self.control.send(json.dumps([str(self.path), seed, self.address]).encode())
        ledger, _ = self.listener.accept()
        with ledger:
            pid = int(ledger.recv(8192).split()[1])
            try:
                if self.rng.random() < 0.15:
                    time.sleep(self.rng.random() * 0.01)  # it opens the store
                else:
                    for _ in range(self.rng.randrange(1, 60)):
                        self.note(ledger.recv(8192))
            finally:
                os.kill(pid, signal.SIGKILL)  # its parent waits for us, so the number is still its
            while packet := ledger.recv(8192):
                self.note(packet)
        assert self.control.recv(16) == b"gone"

    def note(self, packet: bytes) -> None:
        what, _, rest = packet.partition(b" ")
        if what == b"fault":
            raise AssertionError(f"kill {self.kills}: the writer failed: {rest.decode()}")
        self.acknowledged += 1
        if what in (b"events", b"recent"):
            offset, value = rest.split(b" ", 1)
            log = self.events if what == b"events" else self.recent
            assert log.setdefault(int(offset), value) == value, f"offset {int(offset)} given twice"
        elif what == b"table":
            key, value = rest.split(b" ", 1)
            self.table[key] = max(value, self.table.get(key, b""))
        elif what == b"ledger":
            outcome, *values = rest.split(b" ")
            if outcome == b"commit":
                self.committed.append(tuple(values))
            else:
                self.aborted.update(values)
        else:
            raise AssertionError(f"what is {packet!r}?")

    def check(self) -> None:
        self.checks += 1
        with logstore.open(self.path, durability="os", config=SETTINGS) as store:
            faults = list(self.faults(store))
            assert not faults, f"after kill {self.kills}, lane {self.path}: " + "; ".join(
                faults[:5]
            )
            if self.kills % 10 == 0:
                for name in store:
                    for partition in store[name]:
                        partition.check()

    def faults(self, store: Store):  # type: ignore[no-untyped-def]
        """What is not as it was promised, in words."""
        for name in TOPICS:
            if name in store:
                damage = store[name][0].recovery.damage
                if damage:
                    yield f"{name}: {damage}"
        if "events" in store:
            log = store["events"][0]
            yield from self.compare("events", log, self.events, 0)
        elif self.events:
            yield "the topic of events is gone"
        if "recent" in store:
            log = store["recent"][0]
            yield from self.compare("recent", log, self.recent, log.start_offset)
        elif self.recent:
            yield "the topic of recent is gone"
        if "ledger" in store:
            abort_open(store)
            log = store["ledger"][0]
            seen = [record.value for record in log.scan(isolation="read_committed")]
            there = set(seen)
            if len(there) != len(seen):
                yield "ledger: a value is there twice"
            for values in self.committed:
                if not there.issuperset(values):
                    yield f"ledger: committed, and not there: {values}"
            if not there.isdisjoint(self.aborted):
                yield f"ledger: aborted, and read: {there & self.aborted}"
            yield from self.torn(there)
        elif self.committed:
            yield "the topic of the ledger is gone"
        if "table" in store:
            newest: dict[bytes, bytes] = {}
            for record in store["table"][0]:
                newest[record.key] = record.value  # type: ignore[index, assignment]
            for key, value in self.table.items():
                if newest.get(key, b"") < value:
                    yield f"table: {key!r} was {value[:20]!r} and is {newest.get(key)!r}"
        elif self.table:
            yield "the topic of the table is gone"

    @staticmethod
    def compare(name: str, log: logstore.Partition, ledger: dict[int, bytes], start: int):  # type: ignore[no-untyped-def]
        stored = {record.offset: record.value for record in log}
        if list(stored) != list(range(start, log.end_offset)):
            yield f"{name}: there is a gap"
        for offset, value in ledger.items():
            if offset >= start and stored.get(offset) != value:
                yield f"{name}: offset {offset} was {value!r} and is {stored.get(offset)!r}"
        if len(set(stored.values())) != len(stored):
            yield f"{name}: a value is there twice"
        # Of each thread a prefix: its records are numbered.
        turns: dict[bytes, int] = {}
        for value in stored.values():
            thread, turn = value.rsplit(b":", 2)[0], int(value.rsplit(b":", 2)[1])
            expected = turns.get(thread)
            if expected is None:
                expected = 0 if start == 0 else turn
            if turn != expected:
                yield f"{name}: {thread!r} goes on with {turn}, not {expected}"
            turns[thread] = turn + 1

    @staticmethod
    def torn(there: set[bytes]):  # type: ignore[no-untyped-def]
        """Values of one transaction are numbered after the dot, without a gap."""
        parts: dict[bytes, set[int]] = {}
        for value in there:
            transaction, _, number = value.rpartition(b".")
            parts.setdefault(transaction, set()).add(int(number))
        for transaction, numbers in parts.items():
            if numbers != set(range(len(numbers))):
                yield f"ledger: of {transaction!r} only {numbers}"


def run(kills: int, seed: int, directory: Path, progress: float = 0) -> dict[str, int]:
    """A lane of its own; what it did.  Raises AssertionError with what is not as promised."""
    lane = Lane(directory, seed)
    started = said = time.monotonic()
    try:
        for number in range(1, kills + 1):
            lane.kill_once()
            last = number == kills or number % FRESH_EVERY == 0
            # At times no check runs between two kills: then recovery meets what a kill of recovery
            # left.
            if last or lane.rng.random() < 0.7:
                lane.check()
            if number % FRESH_EVERY == 0:
                lane.fresh()
            if progress and time.monotonic() - said >= progress:
                said = time.monotonic()
                print(
                    f"kill    {number} of {kills} in {said - started:.0f} s, "
                    f"{lane.acknowledged} acknowledgements",
                    flush=True,
                )
    finally:
        lane.close()
    return {"kills": lane.kills, "acknowledged": lane.acknowledged, "checks": lane.checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--lanes", type=int, default=1, help="at once, each with its own store")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--progress", type=float, default=10.0, help="seconds between two lines")
    parser.add_argument("--template", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.template is not None:
        template(socket.socket(fileno=arguments.template))
        return
    if arguments.lanes > 1:
        raise SystemExit(side_by_side(arguments))
    with tempfile.TemporaryDirectory() as directory:
        done = run(arguments.kills, arguments.seed, Path(directory), arguments.progress)
    print(json.dumps(done))


def side_by_side(arguments: argparse.Namespace) -> int:
    share = -(-arguments.kills // arguments.lanes)
    lanes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.crash.kill_campaign", "--kills", str(share)),
                *("--seed", str(arguments.seed + number), "--progress", str(arguments.progress)),
            ]
        )
        for number in range(arguments.lanes)
    ]
    return max(lane.wait() for lane in lanes)


if __name__ == "__main__":
    main()
