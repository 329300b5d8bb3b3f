"""`logstore doctor`: check whether this machine and this directory are suitable for a log."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import logstore
from logstore.cli.output import plain
from logstore.cli.session import Session, pass_session, verb
from logstore.cli.text import size_text
from logstore.times import time_text

__all__ = ["doctor_verb"]

REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs", "afs"}
GONE_AFTER_REBOOT = {"tmpfs", "ramfs"}
SYNCS = 20
SLOW_SYNC_MS = 20.0
FILES_WANTED = 4096
FREE_WANTED = 1 << 30
PACKAGES = ("numpy", "lz4", "zstandard", "cramjam", "pyarrow", "pandas", "pyspark", "click", "rich")


def _row(check: str, status: str, found: str, advice: str = "") -> dict[str, str]:
    return {"check": check, "status": status, "found": found, "advice": advice}


@verb("doctor")
@click.option("--no-fsync", is_flag=True, help="Skip the fsync test, which writes a file.")
@pass_session
def doctor_verb(session: Session, no_fsync: bool) -> None:
    """Check the file system, free space, fsync, limits, versions and the store.

    The status of a check is ok, warn or bad.  Nothing in the store is changed.
    """
    path = Path(session.path)
    place = path
    while not place.is_dir() and place != place.parent:
        place = place.parent  # the store does not exist yet: check its nearest parent
    rows = [
        *_file_system(place),
        *([] if no_fsync else _fsync_speed(place)),
        *_limits(),
        *_clock(),
        *_versions(),
        *_store(session, path),
        *_listener(path),
        *_cluster(session, path),
    ]
    columns = (plain("check"), plain("status"), plain("found"), plain("advice"))
    session.output.rows(rows, columns)


def _mount_of(path: Path) -> tuple[str, str]:
    """Return the mount point and the type of a directory's file system."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ("?", "unknown")
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                words = before.split()
                if len(words) > 4 and words[2] == wanted and after:
                    found = (words[4], after.split()[0])
    except OSError:
        pass
    return found


def _file_system(place: Path) -> Iterator[dict[str, str]]:
    mount, kind = _mount_of(place)
    found = f"{kind} at {mount}"
    if kind in REMOTE or kind.startswith("fuse."):
        yield _row(
            "file system", "bad", found, "locks and fsync may not hold there: use a local disk"
        )
    elif kind in GONE_AFTER_REBOOT:
        yield _row("file system", "warn", found, "in memory: nothing survives a reboot")
    else:
        yield _row("file system", "ok", found)
    space = os.statvfs(place)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    enough = free >= min(FREE_WANTED, total // 10)
    yield _row(
        "free space",
        "ok" if enough else "warn",
        f"{size_text(free)} of {size_text(total)}",
        "" if enough else "`logstore du` and `logstore retain` show what can be deleted",
    )
    if space.f_files:
        left = space.f_favail
        yield _row("free inodes", "ok" if left > 10_000 else "warn", f"{left:,}")
    writable = os.access(place, os.W_OK | os.X_OK)
    owner = "writable" if writable else "not writable for this user"
    yield _row("directory", "ok" if writable else "warn", f"{place}: {owner}")


def _fsync_speed(place: Path) -> Iterator[dict[str, str]]:
    spans = []
    try:
        with tempfile.TemporaryFile(dir=place, prefix=".doctor-") as file:
            for _ in range(SYNCS):
                file.write(b"\0" * 16384)
                file.flush()
                began = time.perf_counter()
                os.fdatasync(file.fileno())
                spans.append((time.perf_counter() - began) * 1000)
    except OSError as error:
        yield _row("fsync", "warn", f"not measured: {error.strerror}")
        return
    spans.sort()
    middle = spans[len(spans) // 2]
    slow = middle > SLOW_SYNC_MS
    yield _row(
        "fsync",
        "warn" if slow else "ok",
        f"16 KiB in {middle:.2f} ms (slowest of {SYNCS}: {spans[-1]:.2f} ms)",
        "every append waits this long: batch with extend() or a writer" if slow else "",
    )
    if middle < 0.01:
        yield _row("fsync", "warn", "faster than any disk", "fsync may not reach a disk")


def _limits() -> Iterator[dict[str, str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = hard != resource.RLIM_INFINITY and hard < FILES_WANTED
    yield _row(
        "open files",
        "warn" if few else "ok",
        f"{soft:,} (at most {'any' if hard == resource.RLIM_INFINITY else f'{hard:,}'})",
        "a written partition takes 4: raise the hard limit" if few else "",
    )
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if size != resource.RLIM_INFINITY:
        yield _row("file size", "warn", size_text(size), "ulimit -f is below a segment's size")


def _clock() -> Iterator[dict[str, str]]:
    now = time.time()
    sane = now > 1_577_836_800
    advice = "" if sane else "retention by age uses this clock: set it"
    yield _row("clock", "ok" if sane else "bad", time_text(round(now * 1000)), advice)


def _versions() -> Iterator[dict[str, str]]:
    from logstore import _native

    yield _row(
        "logstore", "ok", f"{logstore.__version__}, crc32c by {_native.CRC32C_IMPLEMENTATION}"
    )
    yield _row("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    have = []
    for name in PACKAGES:
        try:
            have.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            have.append(f"{name} -")
    yield _row("packages", "ok", ", ".join(have))
    if sys.maxsize < 1 << 32:
        yield _row("platform", "warn", "32 bits", "logs beyond 2 GiB are not tested there")


def _listener(path: Path) -> Iterator[dict[str, str]]:
    """Show a `logstore serve` that serves the store."""
    from logstore.cli.served import find_listener

    about = find_listener(path)
    if about is None:
        return
    found = f"{', '.join(about['listeners'].values())}, pid {about['pid']}"
    if "requests" in about:
        found += (
            f", {about['connections']:,} connections, {about['requests']:,} requests "
            f"({about['requests_per_second']:,} a second since the start)"
        )
        yield _row("listener", "ok", found)
    elif "metrics" in about:
        yield _row("listener", "bad", found, f"http://{about['metrics']}/metrics does not answer")
    else:
        yield _row("listener", "ok", found, "`logstore serve --metrics` adds its load")


CLUSTER_ADVICE = (
    "replication factor 3, min.insync.replicas=2, unclean.leader.election.enable=false; producers "
    "with acks=all and enable.idempotence=true; racks on all nodes or on none"
)


def _cluster(session: Session, path: Path) -> Iterator[dict[str, str]]:
    """Show the cluster that the store is a node of, and its topics with a risky minimum."""
    from logstore.cli.served import find_listener
    from logstore.replication.embedded import EmbeddedTree

    about = find_listener(path) or {}
    if "node" in about:
        place = f"node {about['node']}, ZooKeeper {about['zookeeper']}"
    elif (path.parent / EmbeddedTree.NAME).exists():
        place = f"{path.name} of the cluster in {path.parent}"
    else:
        return
    yield _row("cluster", "ok", place, CLUSTER_ADVICE)
    yield from _few_replicas(about)
    with contextlib.suppress(logstore.LogStoreError, OSError), session.reading() as store:
        for name in store:
            config = store[name].config
            if not name.startswith("__") and config.min_insync_replicas == 1:
                advice = "'in sync' means one copy: a record may be lost with its node"
                yield _row(f"topic {name}", "warn", "min.insync.replicas is 1", advice)


def _few_replicas(listener: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Show internal topics that were made when there were fewer nodes."""
    from logstore.cli.served import cluster_of

    found = cluster_of(listener) or {}
    nodes = ",".join(str(each["node"]) for each in found.get("nodes", ()) if each["alive"])
    for row in found.get("few_replicas", ()):
        advice = (
            f"what it has is lost with its node: `logstore cluster plan {row['topic']} --nodes "
            f"{nodes} -r 3 > plan.json`, then `logstore cluster reassign plan.json`"
        )
        count = f"{row['replicas']} of {nodes.count(',') + 1} nodes have a replica"
        yield _row(f"topic {row['topic']}", "warn", count, advice)


def _store(session: Session, path: Path) -> Iterator[dict[str, str]]:
    if not path.exists():
        yield _row("store", "ok", f"{path} does not exist yet")
        return
    try:
        with session.reading() as store:
            counts: dict[str, Any] = {"topics": 0, "partitions": 0}
            for name in store:
                counts["topics"] += 1
                counts["partitions"] += len(store[name])
            found = f"{path}: {counts['topics']:,} topics, {counts['partitions']:,} partitions"
            yield _row("store", "ok", found)
            for name in store:
                config = store[name].config
                if config.deletes and 0 <= config.retention_ms < config.segment_ms:
                    yield _row(f"topic {name}", "warn", "segment.ms is above retention.ms",
                               "old records stay until their whole segment is old")  # fmt: skip
    except (logstore.LogStoreError, OSError) as error:
        yield _row("store", "bad", str(error))
