"""A bank in a log: the code that the tests beside this file are about.

Every transfer is one record; balances are what is left when all of them are read.  A teller that
is restarted reads the log and goes on.  Each transfer has a number given by whoever asks for it,
so that asking again, after a crash, does not move the money twice.
"""

from __future__ import annotations

import json

from logstore import Partition

OPENING = 100


class Bank:
    """Accounts that begin with 100 each.  The log is the only thing it keeps."""

    def __init__(self, log: Partition) -> None:
        self._log = log
        self._read = log.start_offset
        self._balances: dict[str, int] = {}
        self._done: dict[int, bool] = {}
        self._catch_up()

    def _catch_up(self) -> None:
        for record in self._log.scan(self._read):
            self._apply(record.value)
            self._read = record.offset + 1

    def _apply(self, value: bytes | None) -> None:
        entry = json.loads(value or b"{}")
        if entry["moved"]:
            self._balances[entry["source"]] = self.balance(entry["source"]) - entry["amount"]
            self._balances[entry["target"]] = self.balance(entry["target"]) + entry["amount"]
        self._done[entry["number"]] = entry["moved"]

    def balance(self, account: str) -> int:
        """What an account holds."""
        return self._balances.get(account, OPENING)

    def transfer(self, number: int, source: str, target: str, amount: int) -> bool:
        """Move money, once for every number; False when the source has too little.

        The answer is in the log before it is given.
        """
        if number in self._done:
            return self._done[number]
        moved = source != target and 0 < amount <= self.balance(source)
        entry = {
            "number": number,
            "source": source,
            "target": target,
            "amount": amount,
            "moved": moved,
        }
        self._log.append(json.dumps(entry).encode(), expect_offset=self._read)
        self._catch_up()
        return moved
