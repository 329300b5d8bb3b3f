"""Replica files: check that the replicas of a cluster that was stopped agree.

The rules:

* every replica of a partition whose committed end is known has every byte below that end, and the
  bytes are equal;
* two replicas of another partition have the same bytes below the highest high watermark that a node
  has written to its checkpoint, as far as both have records;
* `Store.check` finds no problem in the store of any node;
* no file of a change that was not finished is left, and no directory of a stray partition.

The stores are opened readonly: nothing is repaired.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from logstore import CorruptLogError, Partition, Store
from logstore import open as open_store
from logstore.root.checkpoints import HIGH_WATERMARKS, parse_offsets

__all__ = ["committed_bytes", "leftovers", "replica_problems"]

Key = tuple[str, int]

# What a change leaves if it is not finished, and a replica that no assignment names.
LEFT_SUFFIXES = (".tmp", ".cleaned", ".swap", ".plan", "-delete", "-stray")
PIECE_BYTES = 4 << 20


def replica_problems(
    stores: Mapping[int, str | os.PathLike[str]],
    replicas: Mapping[Key, Collection[int]],
    ends: Mapping[Key, int],
) -> list[str]:
    """Return what is wrong, one line each.

    `stores`: the directory of each node.  `replicas`: the nodes of each partition.  `ends`: the end
    of the committed records of a partition, where it is known.
    """
    found: list[str] = []
    digests: dict[Key, dict[int, tuple[int, int, str]]] = {}
    common = _common_ends(stores, replicas)
    for node, path in sorted(stores.items()):
        found += [f"node {node}: {name} is left" for name in leftovers(Path(path))]
        with open_store(path, readonly=True) as store:
            found += [f"node {node}: {problem}" for problem in store.check(on_corrupt="report")]
            for key, nodes in sorted(replicas.items()):
                if node not in nodes:
                    continue
                partition = _partition(store, key)
                if partition is None:
                    found.append(f"node {node}: {key[0]}-{key[1]} is missing")
                    continue
                end = ends.get(key, common[key])
                try:
                    digests.setdefault(key, {})[node] = _digest(partition, end)
                except CorruptLogError as error:
                    found.append(f"node {node}: {error}")
    for key, by_node in sorted(digests.items()):
        if len(set(by_node.values())) > 1:
            shown = "; ".join(
                f"node {node} has [{start}, {end}) with {digest[:12]}"
                for node, (start, end, digest) in sorted(by_node.items())
            )
            found.append(f"{key[0]}-{key[1]} differs below {ends.get(key, common[key])}: {shown}")
        wanted = ends.get(key)
        for node, (_, end, _) in sorted(by_node.items()):
            if wanted is not None and end < wanted:
                found.append(f"node {node}: {key[0]}-{key[1]} ends at {end}, not at {wanted}")
    return found


def _common_ends(
    stores: Mapping[int, str | os.PathLike[str]], replicas: Mapping[Key, Collection[int]]
) -> dict[Key, int]:
    """Return up to where records are committed by a checkpoint, and in every replica.

    The last records of a cluster that is stopped need not reach all nodes.
    """
    committed: dict[Key, int] = {}
    ends: dict[Key, int] = {}
    for node, path in stores.items():
        with open_store(path, readonly=True) as store:
            for key, offset in _checkpoint(Path(path)).items():
                committed[key] = max(offset, committed.get(key, 0))
            for key, nodes in replicas.items():
                partition = _partition(store, key) if node in nodes else None
                if partition is not None:
                    ends[key] = min(partition.end_offset, ends.get(key, partition.end_offset))
    return {key: min(committed.get(key, 0), ends.get(key, 0)) for key in replicas}


def _checkpoint(path: Path) -> dict[Key, int]:
    """Return the high watermarks that a node has written; none if the file is damaged."""
    try:
        found = parse_offsets((path / HIGH_WATERMARKS).read_bytes())
    except FileNotFoundError:
        return {}
    return {} if isinstance(found, str) else dict(found)


def leftovers(path: Path) -> list[str]:
    """Return the names below a store that no finished change leaves."""
    return sorted(
        each.relative_to(path).as_posix()
        for each in path.rglob("*")
        if each.name.endswith(LEFT_SUFFIXES)
    )


def committed_bytes(partition: Partition, end: int) -> Iterator[bytes]:
    """Yield the batches of a partition from its start up to `end`."""
    offset = partition.start_offset
    end = min(end, partition.end_offset)
    while offset < end:
        for batch in partition.read_batches(offset, PIECE_BYTES):
            base = int.from_bytes(batch[:8], "big")
            if base >= end:
                return
            yield batch
            offset = base + int.from_bytes(batch[23:27], "big") + 1


def _digest(partition: Partition, end: int) -> tuple[int, int, str]:
    digest = hashlib.sha256()
    for batch in committed_bytes(partition, end):
        digest.update(batch)
    return partition.start_offset, min(end, partition.end_offset), digest.hexdigest()


def _partition(store: Store, key: Key) -> Partition | None:
    topic, number = key
    if topic not in store:
        return None
    return next((each for each in store[topic] if each.number == number), None)
