"""Fetcher: which partitions the next Fetch to one leader asks for; and the throttle.

Partitions are asked for in rotation: those that were served move to the end, so that a small
answer cannot leave the same partitions out every time.  One request is under way at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from logstore.replication.machines.image import Key

__all__ = ["Rotation", "Throttle", "is_throttled"]


class Rotation:
    """The partitions that are copied from one leader, the one served last at the end.

    >>> turn = Rotation()
    >>> turn.add(("t", 0)); turn.add(("t", 1)); turn.add(("t", 2))
    >>> turn.served([("t", 0)])
    >>> turn.keys()
    [('t', 1), ('t', 2), ('t', 0)]
    """

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}  # a dict keeps the order of insertion

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """Ask for a partition from now on."""
        self._keys.setdefault(key)

    def remove(self, key: Key) -> None:
        """Ask for it no longer."""
        self._keys.pop(key, None)

    def keys(self) -> list[Key]:
        """Return the partitions in the order in which they are asked for."""
        return list(self._keys)

    def served(self, keys: Iterable[Key]) -> None:
        """Records of these partitions were answered: they are asked for last."""
        for key in keys:
            if key in self._keys:
                del self._keys[key]
                self._keys[key] = None


class Throttle:
    """A bound of bytes per second, for partitions that are moved.

    Bytes are counted after they were sent, so the balance may be negative; nothing is sent until
    it is positive again.

    >>> throttle = Throttle(1000)
    >>> throttle.allows(0), throttle.spend(2500, 0), throttle.allows(1000), throttle.allows(1600)
    (True, None, False, True)
    """

    __slots__ = ("_balance", "_now", "rate")

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate  # bytes per second; None: no bound
        self._balance = rate or 0.0
        self._now = 0

    def change(self, rate: float | None) -> None:
        """Use another rate."""
        if rate != self.rate:
            self.rate = rate
            self._balance = rate or 0.0

    def allows(self, now: int) -> bool:
        """Return whether something may be sent at `now`, in milliseconds."""
        if self.rate is None:
            return True
        if now > self._now:
            earned = self.rate * (now - self._now) / 1000
            self._balance = min(self.rate, self._balance + earned)
            self._now = now
        return self._balance > 0

    def spend(self, size: int, now: int) -> None:
        """Count bytes that were sent."""
        if self.allows(now) or self.rate is not None:
            self._balance -= size


def is_throttled(replicas: str, number: int, node: int) -> bool:
    """Return whether a setting `*.replication.throttled.replicas` names this replica.

    >>> is_throttled("0:1,0:2", 0, 2), is_throttled("0:1", 1, 1), is_throttled("*", 5, 5)
    (True, False, True)
    """
    if replicas.strip() == "*":
        return True
    return f"{number}:{node}" in (each.strip() for each in replicas.split(","))
