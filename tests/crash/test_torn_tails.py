"""A write torn at every byte of a 16 KiB segment: what is left is the whole batches before it.

Four kinds of tail for each byte: the file ends there (a killed process), or it has its full length
and holds zeros, old bytes or garbage from there on (a power cut).  All 65,536 cases run the
recovery that a user's open runs, in place, by two processes: this file run as a program is
one of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logstore import Partition, PartitionConfig
from logstore.files.boot import boot_id
from logstore.files.directory import Directory
from logstore.log.state import PartitionState
from logstore.testing import ReferenceBatch, as_reference, check_invariants, read_log
from tests.campaign import sized

if TYPE_CHECKING:
    from tests.conftest import RunShares

LOG = f"{0:020d}.log"
CONFIG = PartitionConfig(segment_bytes=1 << 20, index_interval_bytes=1_000)
SEGMENT_BYTES = 16 << 10
KINDS = ("cut", "zeros", "old", "garbage")


def fill(log: Partition) -> None:
    """At least 16 KiB in batches of every kind of payload."""
    for number in range(100):
        if log.segments[-1].size_bytes >= SEGMENT_BYTES:
            return
        compression = ("none", "lz4", "none", "zstd", "gzip", "none")[number % 6]
        with log.writer(compression=compression, batch_bytes=1 << 20, linger=None) as out:
            for index in range(1 + 7 * (number % 4)):
                out.append(
                    b"record %d of batch %d " % (index, number) + bytes([index]) * 60,
                    key=b"key %d" % index,
                    headers=[("h", None), ("trace", b"%d" % index)],
                    timestamp=1_000 * number + index,
                )
    raise AssertionError("it does not grow")


class TornLog:
    """What a killed process left of a log of one segment, to be torn and recovered in place."""

    def __init__(self, root: Path) -> None:
        with Partition.open(root / "orders-0", durability="os", config=CONFIG) as log:
            fill(log)
            self.path = root / "killed" / "orders-0"
            shutil.copytree(log.path, self.path)
        self.log = self.path / LOG
        self.contents = self.log.read_bytes()
        self.batches = read_log(self.log)
        self.records = [record for batch in self.batches for record in batch.records]
        self.ends = [batch.position + batch.size for batch in self.batches]
        self.others = {name: (self.path / name).read_bytes() for name in self._names()}
        directory = Directory(self.path)
        state = PartitionState.read(directory)
        directory.close()
        assert state is not None
        assert state.boot == boot_id()
        self.state = state.encode()
        self.state_before_boot = dataclasses.replace(state, boot="an earlier one").encode()
        assert len(self.contents) >= SEGMENT_BYTES
        # Blocks that a file is given again may hold what an older one held: valid batches, of
        # offsets that the log has passed.  None starts where a batch of the log does: the offset
        # is not under the checksum, so an old batch with a new offset would be a valid one.
        # (That is why a cut is durable before anything is appended where the old batches were.)
        passed = bytes(7) + self.contents
        self.old = passed[: len(self.contents)]
        starts = {batch.position for batch in self.batches}
        assert starts.isdisjoint(start + 7 for start in starts)
        self.garbage = random.Random(3).randbytes(len(self.contents))

    def _names(self) -> list[str]:
        return [
            name for name in os.listdir(self.path) if name not in (LOG, ".lock", "logstore.reserve")
        ]

    def tear(self, kind: str, at: int) -> bytes:
        """Put the files back as they were left, and tear the log; its bytes then."""
        for name in self._names():
            if name not in self.others:
                os.unlink(self.path / name)
        for name, contents in self.others.items():
            if name == PartitionState.NAME:
                # A kill leaves the boot as it is; the other tails are a power cut's.
                contents = self.state if kind == "cut" else self.state_before_boot
            self._put(name, contents)
        tail = {
            "cut": b"",
            "zeros": bytes(len(self.contents) - at),
            "old": self.old[at:],
            "garbage": self.garbage[at:],
        }[kind]
        torn = self.contents[:at] + tail
        self._put(LOG, torn)
        return torn

    def _put(self, name: str, contents: bytes) -> None:
        fd = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(fd, contents)
        finally:
            os.close(fd)

    def whole_before(self, at: int) -> list[ReferenceBatch]:
        return [b for b, end in zip(self.batches, self.ends, strict=True) if end <= at]

    def check(self, kind: str, at: int, *, thorough: bool) -> bool:
        """Recover one case; whether anything was cut."""
        torn = self.tear(kind, at)
        whole = self.whole_before(at)
        # What happens to be there may be what was written.
        while len(whole) < len(self.batches) and torn.startswith(
            self.contents[: self.ends[len(whole)]]
        ):
            whole.append(self.batches[len(whole)])
        valid = self.ends[len(whole) - 1] if whole else 0
        end = whole[-1].next_offset if whole else 0
        what = f"{kind} at byte {at}"
        log = Partition.open(self.path, durability="os", config=CONFIG)
        try:
            assert log.end_offset == log.durable_offset == end, what
            assert not log.recovery.damage, what
            assert self.log.read_bytes() == self.contents[:valid], what
            if thorough:
                assert [as_reference(record) for record in log.scan()] == self.records[:end], what
                check_invariants(log)
                assert log.append(b"the next one") == end, what
                assert log[end].value == b"the next one", what
            tails = log.recovery.torn
        finally:
            log.parts.discard()
        if valid == len(torn):
            assert tails == [], what
            return False
        (tail,) = tails
        assert (tail.position, tail.size_bytes, tail.offset) == (valid, len(torn) - valid, end), (
            what
        )
        if tail.kept_as is None:
            assert not torn[valid:].strip(b"\0"), what  # zeros are not worth keeping
        else:
            assert tail.kept_as.read_bytes() == torn[valid:], what
        return True


def run_share(share: int, shares: int, root: Path) -> dict[str, int]:
    """Every case whose byte falls to this share; how many there were of each kind."""
    log = TornLog(root)
    counts = dict.fromkeys(KINDS, 0) | {"cut off": 0, "thorough": 0}
    for at in range(share, SEGMENT_BYTES, shares):
        for kind in KINDS:
            thorough = at // shares % 40 == 0
            counts["cut off"] += log.check(kind, at, thorough=thorough)
            counts["thorough"] += thorough
            counts[kind] += 1
    return counts


ONE_BYTE_IN = sized(16, 1, 1)


@pytest.mark.campaign
def test_a_write_torn_at_any_byte_leaves_all_whole_batches(run_shares: RunShares) -> None:
    counts = run_shares(__file__, shares=2 * ONE_BYTE_IN, chosen=(0, ONE_BYTE_IN))
    bytes_torn = SEGMENT_BYTES // ONE_BYTE_IN
    assert {kind: counts[kind] for kind in KINDS} == dict.fromkeys(KINDS, bytes_torn)
    assert sum(counts[kind] for kind in KINDS) == 65_536 // ONE_BYTE_IN
    assert counts["cut off"] > 60_000 // ONE_BYTE_IN
    assert counts["thorough"] > 1_000 // ONE_BYTE_IN


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=sys.argv[3]) as directory:
        print(json.dumps(run_share(int(sys.argv[1]), int(sys.argv[2]), Path(directory))))
