"""observing: the cluster of one run of the command; and what its verbs share.

`offsets_of` asks the nodes for the ends of their logs.  A node that does not answer is left out.
"""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from logstore.cli import exits
from logstore.cli.progress import Progress
from logstore.cli.session import Session

if TYPE_CHECKING:
    from logstore.replication.hosting.observer import Observer
    from logstore.replication.machines.image import ClusterImage, Key, Registration
    from logstore.replication.metadata import Metadata

__all__ = ["Offsets", "Watermark", "keys_of", "numbers", "observing", "offsets_of", "wait_for"]

CONNECT_SECONDS = 10.0
ASK_SECONDS = 3.0  # for one node
LOOK_SECONDS = 0.2  # between two updates of the progress
LIST_OFFSETS, LATEST = 2, -1
CLIENT, ANY_REPLICA = -1, -2  # as the id of who asks: a client is told what is committed


def session_with(servers: str) -> Metadata:
    """Return a new session with the metadata of a cluster."""
    from logstore.replication.zookeeper import ZooKeeperMetadata  # slow to import

    return ZooKeeperMetadata(servers)


@contextlib.contextmanager
def observing(session: Session) -> Iterator[Observer]:
    """See the cluster that the command line names."""
    from logstore.replication.hosting.observer import Observer

    servers = session.servers
    with Observer(session_with(servers), timeout=CONNECT_SECONDS) as observer:
        if not observer.image.cluster_id:
            raise exits.CommandError(
                exits.NOT_FOUND,
                f"no cluster at {servers}: `logstore serve --node 1 --zookeeper {servers}` starts "
                f"its first node; is the part after / right?",
            )
        yield observer


def wait_for(
    observer: Observer,
    what: str,
    unit: str,
    left: Callable[[ClusterImage], Collection[object]],
    timeout: float,
) -> bool:
    """Show progress until nothing is left; return False after `timeout` seconds."""
    until = time.monotonic() + timeout
    with observer.lock:
        total = len(left(observer.image))
    with Progress(what, unit=unit, total=total) as progress:
        while not observer.wait(lambda image: not left(image), LOOK_SECONDS):
            with observer.lock:
                progress.reached(total - len(left(observer.image)), total)
            if time.monotonic() >= until or observer.lost_since is not None:
                return False
    return True


def keys_of(image: ClusterImage, place: str) -> list[Key]:
    """Return the partitions of ``TOPIC`` or ``TOPIC:NUMBER``; raise if there is none."""
    from logstore.errors import UnknownTopicError

    # A topic name has no colon.
    name, colon, number = place.rpartition(":")
    if not colon:
        name = place
    if name not in image.topics:
        near = tuple(difflib.get_close_matches(name, image.topics, n=1))
        raise UnknownTopicError(name, where="the cluster", near=near)
    keys = image.keys_of(name)
    if not colon:
        return keys
    if not number.isdigit():
        raise click.UsageError(f"a partition is TOPIC:NUMBER, not {place!r}")
    if (name, int(number)) not in keys:
        raise IndexError(f"topic {name!r} has {len(keys)} partitions, no partition {number}")
    return [(name, int(number))]


def numbers(nodes: Iterable[int]) -> str:
    """Return numbers of nodes for a table."""
    return ",".join(map(str, nodes)) or "-"


# ---- ends of logs ----


class Offsets(NamedTuple):
    """The end of one replica's log, and the leader epoch of its last record; -1: not known."""

    end: int
    epoch: int


Watermark = dict["Key", int]


def offsets_of(
    image: ClusterImage, keys: Iterable[Key]
) -> tuple[dict[Key, dict[int, Offsets]], Watermark]:
    """Ask every node for the ends of its replicas, and the leaders for their high watermarks."""
    ends: dict[Key, dict[int, Offsets]] = {key: {} for key in keys}
    watermarks: Watermark = {}
    wanted: dict[int, list[Key]] = {}
    for key in ends:
        assignment = image.assignment(key)
        for node in () if assignment is None else assignment.replicas:
            wanted.setdefault(node, []).append(key)
    for node, its_keys in wanted.items():
        found = image.nodes.get(node)
        if found is None or found.port < 0:
            continue  # not alive, or without a listener
        led = [key for key in its_keys if key in image.states and image.states[key].leader == node]
        # Ends first: a high watermark that is asked for later may be newer, and is shown as it is.
        for key, offsets in _asked(found, its_keys, ANY_REPLICA).items():
            ends[key][node] = offsets
        watermarks |= {key: each.end for key, each in _asked(found, led, CLIENT).items()}
    return ends, watermarks


def _asked(node: Registration, keys: Collection[Key], who: int) -> dict[Key, Offsets]:
    from logstore.kafka.client import KafkaPeer, PeerGoneError

    if not keys:
        return {}
    topics: dict[str, list[dict[str, int]]] = {}
    for name, number in keys:
        row = {"partition_index": number, "current_leader_epoch": -1, "timestamp": LATEST}
        topics.setdefault(name, []).append(row)
    body = {
        "replica_id": who,
        "isolation_level": 0,
        "topics": [{"name": name, "partitions": rows} for name, rows in topics.items()],
    }
    try:
        with KafkaPeer(node.host, node.port, timeout=ASK_SECONDS) as peer:
            answer = peer.request(LIST_OFFSETS, peer.version(LIST_OFFSETS, 4, 7), body)
    except PeerGoneError:
        return {}  # it may have died a moment ago, and still be registered
    return {
        (topic["name"], row["partition_index"]): Offsets(row["offset"], row["leader_epoch"])
        for topic in answer["topics"]
        for row in topic["partitions"]
        if not row["error_code"]
    }
