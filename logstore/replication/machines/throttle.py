"""Throttle: a bound of bytes per second for replicas that are moved, and the settings that set it.

`leader.replication.throttled.rate` and `follower.replication.throttled.rate` are settings of a
node.  They bind only the replicas that `leader.replication.throttled.replicas` and
`follower.replication.throttled.replicas` of a topic list, and of those only followers for which the
high watermark does not wait.  The bytes of the others are counted, and never delayed.

`begin_throttle` sets all four for a move and notes it in the request; the controller takes them
away in the write that ends the request (`end_throttle`).

Without I/O: time is an argument, and changes are ops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from logstore.config import INT64_MAX, ConfigError
from logstore.replication.machines.image import ClusterImage, Key, as_json, config_path
from logstore.replication.metadata import Create, Op, Set

__all__ = [
    "ALL_NODES",
    "FOLLOWER",
    "LEADER",
    "LISTS",
    "RATES",
    "Replicas",
    "Throttle",
    "alter_settings",
    "begin_throttle",
    "checked_rate",
    "end_throttle",
    "parse_replicas",
    "rate_of",
]

LEADER, FOLLOWER = "leader", "follower"
RATES = {side: f"{side}.replication.throttled.rate" for side in (LEADER, FOLLOWER)}
LISTS = {side: f"{side}.replication.throttled.replicas" for side in (LEADER, FOLLOWER)}
ALL_NODES = "<default>"  # the owner of settings that every node has

NO_BOUND = 1 << 62  # bytes
LOOK_MS = 1000  # the longest wait: a rate that was raised or removed counts soon

# Pairs of partition and node; None: all.
Replicas = frozenset[tuple[int, int]] | None


class Throttle:
    """A token bucket: the tokens of one second at most, and one for each byte.

    An answer has whole batches, so it may be larger than the room: then the balance is negative,
    and nothing is sent until it is paid.  Small portions are not sent: there is room from a tenth
    of a second's tokens on.

    Bytes that are only counted take at most half of what is earned.  So a move advances with half
    of its rate at least, however much is written.

    >>> throttle = Throttle(1000)
    >>> throttle.room(0), throttle.spend(1500, 0), throttle.room(550), throttle.wait_ms(550)
    (1000, None, 0, 50)
    >>> throttle.room(600)
    100
    """

    __slots__ = ("_balance", "_counted", "_now", "rate")

    def __init__(self, rate: int | None = None) -> None:
        self.rate = rate  # bytes per second; None: no bound
        self._balance = float(rate or 0)
        self._counted = 0.0  # bytes that were counted, and are not taken off the balance yet
        self._now = 0

    def change(self, rate: int | None) -> None:
        """Use another rate.  What is owed stays owed."""
        if rate is not None:
            self._balance = min(self._balance, rate) if self.rate is not None else float(rate)
        self.rate = rate

    def _earn(self, now: int) -> int:
        rate = self.rate
        assert rate is not None
        if now > self._now:
            earned = rate * (now - self._now) / 1000
            counted = min(self._counted, earned / 2)
            self._counted -= counted
            self._balance = min(rate, self._balance + earned - counted)
            self._now = now
        return max(1, rate // 10)  # the least portion

    def room(self, now: int) -> int:
        """Return how many bytes may be sent at `now`, in milliseconds; 0: none yet."""
        if self.rate is None:
            return NO_BOUND
        least = self._earn(now)
        return int(self._balance) if self._balance >= least else 0

    def wait_ms(self, now: int) -> int:
        """Return when to ask for room again."""
        if self.rate is None:
            return 0
        missing = self._earn(now) - self._balance
        return min(LOOK_MS, math.ceil(missing * 1000 / self.rate)) if missing > 0 else 0

    def spend(self, size: int, now: int) -> None:
        """Take off bytes that are sent; less than 0 gives tokens back that were not used."""
        if self.rate is not None:
            self._earn(now)
            self._balance = min(self.rate, self._balance - size)

    def count(self, size: int) -> None:
        """Count bytes that are not bound."""
        if self.rate is not None:
            self._counted = min(self.rate, self._counted + size)


# ---- the settings ----


def checked_rate(name: str, value: object) -> int:
    """Return a rate; raise ConfigError for one that would stop every move."""
    try:
        rate = int(value) if isinstance(value, str) else value
    except ValueError:
        rate = None
    if not isinstance(rate, int) or isinstance(rate, bool) or not 1 <= rate <= INT64_MAX:
        raise ConfigError(f"{name} must be a number of bytes per second, from 1 on, not {value!r}; "
                          f"leave it out, or delete it, for no bound")  # fmt: skip
    return rate


def parse_replicas(name: str, text: str) -> Replicas:
    """Return the replicas of a list as Kafka writes it; raise ConfigError if it is none.

    >>> sorted(parse_replicas("x", "0:1, 0:2")), parse_replicas("x", "*"), parse_replicas("x", "")
    ([(0, 1), (0, 2)], None, frozenset())
    """
    if text.strip() == "*":
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(re.fullmatch(r"[0-9]+:[0-9]+", word) for word in words):
        raise ConfigError(f"{name} must be * or a list of PARTITION:NODE such as 0:1,0:2, "
                          f"not {text!r}")  # fmt: skip
    return frozenset((int(number), int(node)) for number, _, node in
                     (word.partition(":") for word in words))  # fmt: skip


def rate_of(image: ClusterImage, node: int, side: str, default: int) -> int | None:
    """Return the rate of a node: its own, else that of all nodes, else `default`; None: no bound.

    A value that is not valid counts as absent: Admin writes none, and no content of the tree may
    stop a node.
    """
    rate = default
    for owner in (ALL_NODES, str(node)):
        text = image.configs.get(("brokers", owner), ({}, 0))[0].get(RATES[side], "")
        if text.isdecimal() and int(text) > 0:
            rate = int(text)
    return rate if rate < INT64_MAX else None


def alter_settings(
    image: ClusterImage, kind: str, name: str, changes: Mapping[str, str | None]
) -> Op:
    """Return the op that changes settings of a topic or a node; None removes one."""
    before, version = image.configs.get((kind, name), ({}, None))
    after = {key: value for key, value in {**before, **changes}.items() if value is not None}
    path, data = config_path(kind, name), as_json({"version": 1, "config": after})
    return Create(path, data) if version is None else Set(path, data, version)


# ---- for the time of a move ----


def begin_throttle(
    image: ClusterImage, targets: Mapping[Key, Sequence[int] | None], rate: int
) -> tuple[list[Op], dict[str, Any]]:
    """Return the ops that bind a move, and the note for its request: what is to be taken away."""
    lists: dict[str, dict[str, list[str]]] = {}
    nodes = {int(node) for node in _noted(image, "nodes")}
    for (topic, number), target in targets.items():
        assignment = image.assignment((topic, number))
        if target is None or assignment is None:
            continue
        origin = assignment.origin
        rows = lists.setdefault(topic, {LEADER: [], FOLLOWER: []})
        rows[LEADER] += [f"{number}:{node}" for node in origin]
        rows[FOLLOWER] += [f"{number}:{node}" for node in target if node not in origin]
        nodes |= {*origin, *target}
    if not lists:
        raise ConfigError("a throttle is for replicas that move; a cancelled move needs none")
    ops = []
    for topic, rows in lists.items():
        before = image.configs.get(("topics", topic), ({}, 0))[0]
        merged = {LISTS[side]: _merged(before.get(LISTS[side], ""), rows[side]) for side in rows}
        ops.append(alter_settings(image, "topics", topic, merged))
    rates = dict.fromkeys(RATES.values(), str(rate))
    ops += [alter_settings(image, "brokers", str(node), rates) for node in sorted(nodes)]
    topics = sorted({*_noted(image, "topics"), *lists})
    return ops, {"throttled": {"nodes": sorted(nodes), "topics": topics}}


def _merged(before: str, added: Iterable[str]) -> str:
    words = [] if not before.strip() else before.split(",")
    return "*" if before.strip() == "*" else ",".join(dict.fromkeys([*words, *added]))


def _noted(image: ClusterImage, what: str) -> Sequence[Any]:
    """Return the nodes or topics that the note of the request lists."""
    note: object = None if image.reassign is None else image.reassign[0]
    for name in ("logstore", "throttled", what):
        note = note.get(name) if isinstance(note, Mapping) else None
    return note if isinstance(note, list) else ()


def end_throttle(image: ClusterImage) -> list[Op]:
    """Return the ops that take away what `begin_throttle` has set."""
    owners = [("topics", str(name), LISTS) for name in _noted(image, "topics")]
    owners += [("brokers", str(node), RATES) for node in _noted(image, "nodes")]
    return [
        alter_settings(image, kind, name, dict.fromkeys(settings.values()))
        for kind, name, settings in owners
        if not image.configs.get((kind, name), ({}, 0))[0].keys().isdisjoint(settings.values())
    ]
