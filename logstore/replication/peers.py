"""Peers: how a node asks other nodes.  Answers are given later, by a call.

A request is a value, an answer is a value or None: the connection broke, or no answer came in
time.  `LocalPeers` connects the nodes of one process; the `kafka` package has the one over TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import Key

__all__ = [
    "FetchRequest",
    "FetchRow",
    "Fetches",
    "LeaderOffsets",
    "OffsetsRequest",
    "Peers",
]


class FetchRow(NamedTuple):
    """One partition of a follower's fetch."""

    key: Key
    topic_id: str
    offer: Offer
    max_bytes: int


class FetchRequest(NamedTuple):
    """A follower's fetch: it is answered when one row has an answer, or after `max_wait_ms`."""

    node: int  # the follower
    broker_epoch: int
    max_wait_ms: int
    max_bytes: int
    rows: tuple[FetchRow, ...]


Fetches = Mapping[Key, Fetched]


class OffsetsRequest(NamedTuple):
    """A follower's question for the start and the end of its leader's log."""

    node: int
    key: Key
    topic_id: str
    leader_epoch: int


class LeaderOffsets(NamedTuple):
    """The answer: an error code of Kafka, or 0 and the offsets."""

    code: int
    start: int = -1
    end: int = -1


class Peers(Protocol):
    """Sends requests of one node to the others.

    A method returns at once.  `done` is called once, from any thread that holds no lock; it may
    take the locks of replicas, append, and wait for a disk.
    """

    @property
    def direct(self) -> bool:
        """Whether one request for each partition is as cheap as one for many."""

    def fetch(
        self, leader: int, request: FetchRequest, done: Callable[[Fetches | None], None]
    ) -> None:
        """Fetch from a leader."""

    def offsets(
        self, leader: int, request: OffsetsRequest, done: Callable[[LeaderOffsets | None], None]
    ) -> None:
        """Ask a leader for the offsets of its log."""

    def close(self) -> None:
        """Break all requests: `done` of each is called with None."""
