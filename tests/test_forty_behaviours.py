"""Behaviours that Kafka's own tests pin down, in Kafka's order; the number is that of the list.

Where logstore means to differ (bytes are kept aside, never thrown away) the test says so.
"""

from __future__ import annotations

import random
from pathlib import Path

import logstore
from logstore import Partition, PartitionConfig

# ---- opening a log with what the root's checkpoints say ----

SMALL = {"segment.bytes": 1024, "index.interval.bytes": 100}


def leave_as_broker(path: Path, records: int, *, recovery_point: int, start: int = 0) -> bytes:
    """A directory that a broker left in a crash: no state of ours, checkpoints at the root.

    Returns the offset index of the last segment.
    """
    with Partition.open(path / "t-0", durability="os", config=SMALL) as log:
        for i in range(records):
            log.append(b"%d" % i * 20, timestamp=1000 + i)
        index = log.segments[-1].offset_index.entries
    for name in ("logstore.state", "logstore.durable", ".lock"):
        (path / "t-0" / name).unlink()
    (path / "recovery-point-offset-checkpoint").write_text(f"0\n1\nt 0 {recovery_point}\n")
    if start:
        (path / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {start}\n")
    return index


def recovery_points(path: Path) -> list[str]:
    return (path / "recovery-point-offset-checkpoint").read_text().splitlines()[2:]


def test_22_an_unclean_log_is_all_there_and_its_recovery_point_waits_for_a_flush(
    tmp_path: Path,
) -> None:
    index = leave_as_broker(tmp_path, 40, recovery_point=10)
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.offset for record in partition] == list(range(40))
        assert partition.segments[-1].offset_index.entries == index, "rebuilt as it was"
        assert recovery_points(tmp_path) == ["t 0 10"]
        store.sync()
        assert recovery_points(tmp_path) == ["t 0 40"]


def test_23_random_bytes_behind_the_log_and_its_index_are_cut(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 30, recovery_point=0)
    seed = 23
    rng = random.Random(seed)
    last = max((tmp_path / "t-0").glob("*.log"))
    for file in (last, last.with_suffix(".index")):
        with file.open("ab") as out:
            out.write(rng.randbytes(rng.randrange(1, 200)))
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.value for record in partition] == [b"%d" % i * 20 for i in range(30)]
        assert partition.end_offset == 30
        assert partition.recovery.torn, "logstore keeps the bytes aside and says so"


def test_24_a_log_that_ends_below_its_start_begins_anew_there(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 30, recovery_point=0, start=25)
    first = min((tmp_path / "t-0").glob("*.log"))
    content = bytearray(first.read_bytes())
    content[80] ^= 0xFF  # in the value of the first record, far below the start
    first.write_bytes(content)
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert (partition.start_offset, partition.end_offset) == (25, 25)
        assert [segment.base_offset for segment in partition.segments] == [25]
        assert store["t"].append(b"next").offset == 25
    kept = list((tmp_path / "t-0").glob("*.torn-*"))
    assert len(kept) == 5, "what Kafka deletes, logstore keeps aside: a tail, four segments"


def test_29_lost_indexes_are_rebuilt_and_orphans_removed(tmp_path: Path) -> None:
    index = leave_as_broker(tmp_path, 40, recovery_point=40)
    (tmp_path / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":3}')
    for file in (tmp_path / "t-0").glob("*.index"):
        file.unlink()
    orphan = tmp_path / "t-0" / "00000000000000000777.timeindex"
    orphan.write_bytes(bytes(12))
    with logstore.open(tmp_path, config=SMALL) as store:
        partition = store["t"][0]
        assert [record.offset for record in partition] == list(range(40))
        assert partition.segments[-1].offset_index.entries == index
        assert partition[3].value == b"3" * 20
        assert not orphan.exists()


def test_40_a_dirty_offset_beyond_the_end_starts_over(tmp_path: Path) -> None:
    leave_as_broker(tmp_path, 10, recovery_point=10)
    (tmp_path / "cleaner-offset-checkpoint").write_text("0\n1\nt 0 5000\n")
    settings = PartitionConfig(cleanup_policy="compact")
    with logstore.open(tmp_path, config=settings) as store:
        assert store["t"][0].first_dirty_offset == 0
    assert (tmp_path / "cleaner-offset-checkpoint").read_text() == "0\n0\n"
