"""Throttling: the throttle of one side of a node, for what it sends as a leader or copies.

It has the bucket, and the replicas that the settings of the topics list.  Threads may share it: a
thread that serves a fetch takes tokens before it reads, so that two threads never send the same
tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from logstore.config import ConfigError
from logstore.replication.machines.image import ClusterImage, Key
from logstore.replication.machines.throttle import (
    LISTS,
    Replicas,
    Throttle,
    parse_replicas,
    rate_of,
)

__all__ = ["Throttling"]


class Throttling:
    """The bound of what node `me` sends as a leader, or copies as a follower."""

    def __init__(self, side: str, me: int, default_rate: int, now: Callable[[], int]) -> None:
        self._side = side
        self._me = me
        self._default_rate = default_rate
        self._now = now
        self._lock = threading.Lock()
        self._bucket = Throttle()
        self._listed: dict[str, Replicas] = {}  # by topic; replaced as a whole

    def use(self, image: ClusterImage) -> None:
        """Use the settings of an image."""
        rate = rate_of(image, self._me, self._side, self._default_rate)
        listed: dict[str, Replicas] = {}
        name = LISTS[self._side]
        for (kind, topic), (settings, _) in image.configs.items() if rate is not None else ():
            if kind == "topics" and settings.get(name):
                try:
                    listed[topic] = parse_replicas(name, settings[name])
                except ConfigError:
                    continue  # Admin writes none: as if it were absent
        with self._lock:
            self._bucket.change(rate)
            self._listed = listed

    def binds(self, key: Key) -> bool:
        """Return whether the replica of a partition here is listed, and there is a rate."""
        listed = self._listed
        if key[0] not in listed:
            return False
        replicas = listed[key[0]]
        return replicas is None or (key[1], self._me) in replicas

    def room(self) -> int:
        """Return how many bytes may be sent now; 0: none yet."""
        with self._lock:
            return self._bucket.room(self._now())

    def take(self, most: int) -> int:
        """Take tokens for up to `most` bytes; return how many.  `spend` corrects it afterwards."""
        with self._lock:
            now = self._now()
            taken = min(most, self._bucket.room(now))
            self._bucket.spend(taken, now)
            return taken

    def spend(self, size: int) -> None:
        """Take off bytes; less than 0 gives tokens back."""
        with self._lock:
            self._bucket.spend(size, self._now())

    def count(self, size: int) -> None:
        """Count bytes that are not delayed."""
        with self._lock:
            self._bucket.count(size)

    def wait_ms(self) -> int:
        """Return when to ask again, in milliseconds; at least 1."""
        with self._lock:
            return max(1, self._bucket.wait_ms(self._now()))
