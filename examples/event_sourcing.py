"""Event sourcing with optimistic concurrency: an account whose state is its log.

    python examples/event_sourcing.py [directory]

The balance is never stored: it is what the events add up to.  Two tellers decide at the same time
from what they have read, and append with ``expect_offset``: the one whose view is out of date gets
a ConflictError, reads what has happened, and decides again.  No record is lost, no rule is broken,
and nobody waits for a lock while thinking.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

from logstore import ConflictError, Partition


class Account:
    """The state at `version`: all events with smaller offsets have been taken in."""

    def __init__(self, log: Partition) -> None:
        self.log = log
        self.version = 0
        self.balance = 0

    def catch_up(self) -> None:
        for record in self.log.scan(self.version):
            event = json.loads(record.value or b"{}")
            self.balance += event["amount"]
            self.version = record.offset + 1

    def withdraw(self, amount: int, who: str) -> int:
        """How often it had to decide again; ValueError when there is not enough."""
        retries = 0
        while True:
            self.catch_up()
            if self.balance < amount:
                raise ValueError(f"{amount} wanted, {self.balance} there")
            event = json.dumps({"who": who, "amount": -amount}).encode()
            try:
                self.log.append(event, expect_offset=self.version)
            except ConflictError:
                retries += 1  # someone was faster: what was decided may not hold any more
            else:
                return retries


def teller(log: Partition, name: str, outcome: dict[str, tuple[int, int]]) -> None:
    account = Account(log)  # each has a view of its own
    paid = retries = 0
    while True:
        try:
            retries += account.withdraw(10, name)
        except ValueError:
            outcome[name] = paid, retries
            return
        paid += 10


def run(directory: Path) -> None:
    with Partition.open(directory / "account-0") as log:
        log.append(json.dumps({"who": "opening", "amount": 1005}).encode())
        outcome: dict[str, tuple[int, int]] = {}
        tellers = [
            threading.Thread(target=teller, args=(log, name, outcome)) for name in ("anna", "ben")
        ]
        for each in tellers:
            each.start()
        for each in tellers:
            each.join()
        account = Account(log)
        account.catch_up()
        for name, (paid, retries) in sorted(outcome.items()):
            print(f"{name} paid out {paid}, and decided again {retries} times")
        print(f"balance {account.balance} after {account.version} events")
        assert account.balance == 5
        assert sum(paid for paid, _ in outcome.values()) == 1000

    # The state is gone with the process; the events are not.
    with Partition.open(directory / "account-0", readonly=True) as log:
        account = Account(log)
        account.catch_up()
        print(f"balance {account.balance} after reopening")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
