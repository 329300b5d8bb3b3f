"""`check`: the finding for every kind of file; it writes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    Compactor,
    CorruptLogError,
    Partition,
    ProblemKind,
    Severity,
    Store,
    with_producer,
)
from logstore.checking.partition_check import PartitionInspection
from logstore.log.segment_digest import SegmentDigest
from tests.conftest import MakeLog
from tests.kit import flip

GOLDEN = Path(__file__).parent.parent / "golden-log-directory" / "log"


def filled(path: Path) -> Path:
    """A closed partition of several segments, one transaction aborted and one committed."""
    with Partition.open(
        path, durability="os", config={"segment.bytes": 2000, "index.interval.bytes": 500}
    ) as log:
        for i in range(60):
            log.append(b"value %03d" % i + bytes(40), key=b"k%d" % (i % 7), timestamp=1000 + i)
        encoder = logstore.BatchEncoder()
        for producer, commit in ((7, True), (8, False)):
            encoder.append(b"in a transaction", timestamp=2000)
            raw = with_producer(
                encoder.take(), producer_id=producer, producer_epoch=0, base_sequence=0,
                transactional=True,
            )  # fmt: skip
            log.append_batch(raw)
            log.end_transaction(producer, 0, commit=commit)
        for i in range(60):
            log.append(b"value %03d" % i + bytes(40), timestamp=3000 + i)
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("template") / "orders-0")


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "orders-0")


def state_of(path: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(path)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in path.rglob("*")
        if p.is_file()
    }


def found(path: Path, **options: object) -> list[logstore.Problem]:
    """What a reader finds; and it has written nothing."""
    before = state_of(path)
    with Partition.open(path, readonly=True) as log:
        problems = log.check(on_corrupt="report", **options)  # type: ignore[arg-type]
    assert state_of(path) == before
    return problems


def segments_of(path: Path, suffix: str = ".log") -> list[Path]:
    return sorted(path.glob(f"*{suffix}"))


def test_a_sound_log_has_no_problem(path: Path) -> None:
    assert found(path) == []
    assert found(path, deep=False) == []


def test_closing_leaves_a_digest_beside_every_sealed_segment(path: Path) -> None:
    logs = segments_of(path)
    assert len(logs) > 4
    assert [p.stem for p in segments_of(path, ".sum")] == [p.stem for p in logs[:-1]]


def test_damage_is_named_with_its_place_and_its_offsets(path: Path) -> None:
    log_file = segments_of(path)[1]
    base = int(log_file.stem)
    second = 12 + int.from_bytes(log_file.read_bytes()[8:12], "big")
    flip(log_file, second + 70)
    (problem,) = found(path)
    assert problem.kind is ProblemKind.DAMAGED_BATCH
    assert problem.severity is Severity.ERROR
    assert (problem.path, problem.position) == (log_file, second)
    assert problem.offsets == range(base + 1, base + 2)
    assert problem.end_position > second
    assert json.loads(json.dumps(problem.as_json()))["offsets"] == [base + 1, base + 2]
    with (
        Partition.open(path, readonly=True) as log,
        pytest.raises(CorruptLogError, match="offsets") as caught,
    ):
        log.check()
    assert caught.value.problems == (problem,)
    assert caught.value.offsets == problem.offsets


def test_all_damage_is_listed_not_only_the_first(path: Path) -> None:
    for log_file in segments_of(path)[1:4]:
        flip(log_file, 100)
    problems = found(path)
    assert [p.kind for p in problems] == [ProblemKind.DAMAGED_BATCH] * 3
    assert [p.path for p in problems] == segments_of(path)[1:4]


@pytest.mark.parametrize("at", [*range(8), 12, 13, 14, 15])
def test_a_digest_finds_what_no_checksum_covers(path: Path, at: int) -> None:
    """Base offset and leader epoch of a batch lie outside of Kafka's CRC."""
    log_file = segments_of(path)[1]
    flip(log_file, at)
    kinds = {problem.kind for problem in found(path)}
    assert kinds & {ProblemKind.DAMAGED_BATCH, ProblemKind.DIGEST_MISMATCH}


def test_a_digest_finds_a_lost_batch_where_gaps_are_allowed(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=2000)
    for i in range(200):
        log.append(b"%d" % i + bytes(40), key=b"k%d" % (i % 30))
    Compactor(log, min_cleanable_dirty_ratio=0).run()
    assert log.check() == []
    log.close()
    log_file = next(p for p in segments_of(log.path) if p.stat().st_size)
    content = log_file.read_bytes()
    size = 12 + int.from_bytes(content[8:12], "big")
    assert size < len(content)
    log_file.write_bytes(content[size:])
    problems = found(log.path)
    assert ProblemKind.DIGEST_MISMATCH in {problem.kind for problem in problems}


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        (".index", ProblemKind.DAMAGED_INDEX),
        (".timeindex", ProblemKind.DAMAGED_TIME_INDEX),
        (".txnindex", ProblemKind.DAMAGED_TRANSACTION_INDEX),
        (".sum", ProblemKind.DAMAGED_DIGEST),
    ],
)
def test_a_flipped_bit_beside_the_log_is_found(path: Path, suffix: str, kind: ProblemKind) -> None:
    file = next(p for p in segments_of(path, suffix) if p.stat().st_size)
    flip(file, 5)
    assert {(p.kind, p.path) for p in found(path)} == {(kind, file)}


def test_a_lost_file_beside_the_log_is_found(path: Path) -> None:
    lost = segments_of(path, ".txnindex")[0]
    lost.unlink()
    problems = found(path, deep=False)
    assert [(p.kind, p.path) for p in problems] == [(ProblemKind.DAMAGED_TRANSACTION_INDEX, lost)]
    lost_index = segments_of(path, ".index")[1]
    lost_index.unlink()
    kinds = {p.path: p.kind for p in found(path, deep=False)}
    assert kinds[lost_index] is ProblemKind.MISSING_INDEX


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("logstore.state", ProblemKind.DAMAGED_STATE),
        ("logstore.durable", ProblemKind.DAMAGED_STATE),
        ("leader-epoch-checkpoint", ProblemKind.DAMAGED_LEADER_EPOCHS),
        ("swap.plan", ProblemKind.DAMAGED_PLAN),
        ("truncate.plan", ProblemKind.DAMAGED_PLAN),
        ("partition.metadata", ProblemKind.DAMAGED_METADATA),
        ("00000000000000000007.snapshot", ProblemKind.DAMAGED_SNAPSHOT),
        ("logstore.cleaner", ProblemKind.DAMAGED_STATE),
    ],
)
def test_nonsense_in_a_side_file_is_found(path: Path, name: str, kind: ProblemKind) -> None:
    (path / name).write_bytes(b"nonsense")
    assert (kind, path / name) in [(p.kind, p.path) for p in found(path, deep=False)]


def test_what_was_kept_and_what_was_left_behind_is_mentioned(path: Path) -> None:
    (path / "00000000000000000000.log.torn-1").write_bytes(b"torn")
    (path / "logstore.state.7.tmp").write_bytes(b"")
    (path / "00000000000000009999.index").write_bytes(b"")
    kinds = [(p.kind, p.severity) for p in found(path)]
    assert kinds == [
        (ProblemKind.KEPT_ASIDE, Severity.NOTE),
        (ProblemKind.STRAY_FILE, Severity.NOTE),
        (ProblemKind.STRAY_FILE, Severity.NOTE),
    ]


def test_a_catalogue_that_is_lost_is_reported_until_there_is_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t", config={"retention.ms": 5}).append(b"v")
    (tmp_path / "logstore.topics").unlink()
    for mode in ({"readonly": True}, {}, {}):
        caplog.clear()
        with logstore.open(tmp_path, **mode) as store:  # type: ignore[arg-type]
            assert "logstore.topics is gone" in caplog.text
            (problem,) = store.check()
            assert problem.kind is ProblemKind.MISSING_CATALOGUE
            assert problem.path == tmp_path / "logstore.topics"
            if not mode:
                store["t"].append(b"w")
    with logstore.open(tmp_path) as store:
        store["t"].alter({"retention.ms": 5})
        assert store.check() == []


def test_a_brokers_directory_has_no_catalogue_and_none_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t").append(b"v")
    for name in ("logstore.topics", "checkpoints.ls", "logstore.clean"):
        (tmp_path / name).unlink()
    for _ in range(2):
        with logstore.open(tmp_path) as store:
            store["t"].append(b"w")
            assert ProblemKind.MISSING_CATALOGUE not in [p.kind for p in store.check()]
    assert "is gone" not in caplog.text


def leave_temporary_files(path: Path) -> None:
    (path / "logstore.topics.7.tmp").write_bytes(b"")
    (path / "t-0" / "logstore.state.7.tmp").write_bytes(b"")
    for suffix in ("log.deleted", "log.cleaned"):
        (path / "t-0" / f"00000000000000009999.{suffix}").write_bytes(b"")
    (path / f"gone-0.{'0' * 32}-delete").mkdir()


def test_temporary_files_of_a_live_store_are_in_use(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t").append(b"v")
        leave_temporary_files(tmp_path)
        assert store.check() == []
        with logstore.open(tmp_path, readonly=True) as reader:
            assert reader.check() == []
        with Partition.open(tmp_path / "t-0", readonly=True) as log:
            assert log.check() == []
    with logstore.open(tmp_path, readonly=True) as reader:
        assert [p.kind for p in reader.check()] == [ProblemKind.STRAY_FILE] * 5


def test_temporary_files_of_a_partition_that_is_open_alone_are_in_use(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t", 2).append(b"v", partition=0)
    with Partition.open(tmp_path / "t-0") as log:
        log.append(b"w")
        for name in ("t-0", "t-1"):
            (tmp_path / name / "logstore.state.7.tmp").write_bytes(b"")
        assert log.check() == []
        with Partition.open(tmp_path / "t-1", readonly=True) as other:
            assert [p.kind for p in other.check()] == [ProblemKind.STRAY_FILE]


def test_progress_reaches_its_end_and_can_stop_the_check(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in segments_of(path))

    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Enough

    with Partition.open(path, readonly=True) as log, pytest.raises(Enough):
        log.check(progress=stop)


def test_an_unknown_choice_is_refused(path: Path) -> None:
    with Partition.open(path, readonly=True) as log, pytest.raises(ValueError, match="'report'"):
        log.check(on_corrupt="skip")


def test_a_check_beside_a_writer_finds_nothing(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=3000, retention_ms=-1)
    with Partition.open(log.path, readonly=True) as reader:
        for i in range(40):
            log.extend([b"%d" % i + bytes(60)] * 20)
            assert log.check() == []
            assert [p for p in reader.check() if p.severity != Severity.NOTE] == []
            if i % 10 == 9:
                log.parts.rewriter.write_digests()
                log.truncate(log.end_offset - 30)
                log.trim(log.start_offset + 10)


def test_digests_follow_every_change_of_a_sealed_segment(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=3000, durability="fsync")
    for i in range(10):
        log.extend([b"%d" % i + bytes(60)] * 20)
    count = len(log.segments)
    assert log.parts.rewriter.write_digests() == count - 1
    assert log.parts.rewriter.write_digests() == 0
    middle = log.segments[count // 2]
    log.truncate(middle.base_offset + 3)
    assert SegmentDigest.known(log.parts.view.directory, middle.base_offset) is None
    assert log.check() == []
    log.trim(log.segments[2].base_offset)
    assert len(segments_of(log.path, ".sum")) == len(log.segments) - 1
    log.extend([b"more" + bytes(60)] * 200)
    log.sync()
    assert log.parts.rewriter.write_digests() > 0
    log.close()
    assert found(log.path) == []


def test_digests_stop_at_the_bytes_that_are_allowed(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=3000, durability="fsync")
    for i in range(10):
        log.extend([b"%d" % i + bytes(60)] * 20)
    sizes = [segment.size_bytes for segment in log.segments[:-1]]
    assert log.parts.rewriter.write_digests(max_bytes=sizes[0] + sizes[1]) == 2
    assert log.parts.rewriter.write_digests() == len(sizes) - 2


# ---- stores ----


@pytest.fixture
def root(make_store: Callable[..., Store]) -> Path:
    store = make_store()
    orders = store.create_topic("orders", 2, config={"segment.bytes": 2000})
    for i in range(100):
        orders.append(b"%d" % i + bytes(40), partition=i % 2)
    store.create_topic("empty")
    store.close()
    return store.path


def found_in_store(root: Path, **options: object) -> list[tuple[ProblemKind, str]]:
    before = state_of(root)
    with logstore.open(root, readonly=True) as store:
        problems = store.check(on_corrupt="report", **options)  # type: ignore[arg-type]
    assert state_of(root) == before
    return [(p.kind, str(p.path.relative_to(root))) for p in problems]


def test_a_sound_store_has_no_problem(root: Path) -> None:
    assert found_in_store(root) == []
    with logstore.open(root) as store:
        assert store.check() == []


def test_problems_of_partitions_come_with_their_paths(root: Path) -> None:
    flip(root / "orders-1" / "00000000000000000000.log", 90)
    assert found_in_store(root) == [
        (ProblemKind.DAMAGED_BATCH, "orders-1/00000000000000000000.log")
    ]
    with logstore.open(root) as store, pytest.raises(CorruptLogError, match="orders-1"):
        store.check()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("recovery-point-offset-checkpoint", ProblemKind.DAMAGED_CHECKPOINT),
        ("replication-offset-checkpoint", ProblemKind.DAMAGED_CHECKPOINT),
        (".kafka_cleanshutdown", ProblemKind.DAMAGED_MARKER),
        ("orders-0/partition.metadata", ProblemKind.DAMAGED_METADATA),
    ],
)
def test_nonsense_in_a_file_of_the_root_is_found(root: Path, name: str, kind: ProblemKind) -> None:
    (root / name).write_bytes(b"nonsense\n1\n2\n")
    assert (kind, name) in found_in_store(root)


def test_a_lost_partition_is_found(root: Path) -> None:
    shutil.rmtree(root / "orders-1")
    assert (ProblemKind.MISSING_PARTITION, "orders-1") in found_in_store(root)


def test_a_partition_of_another_topic_is_found(root: Path) -> None:
    shutil.copy(root / "empty-0" / "partition.metadata", root / "orders-0")
    assert found_in_store(root) == [(ProblemKind.DAMAGED_METADATA, "orders-0/partition.metadata")]


def test_progress_of_a_store_counts_all_partitions(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    found_in_store(root, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(p.stat().st_size for p in root.rglob("*.log"))


def test_a_brokers_directory_has_no_problem() -> None:
    with logstore.open(GOLDEN, readonly=True) as store:
        problems = store.check(on_corrupt="report")
    assert [p for p in problems if p.severity == Severity.ERROR] == []


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("moment", ["_walk", "_inspect_head", "_inspect_indexes"])
def test_a_segment_that_grows_and_rolls_while_it_is_checked_is_no_damage(
    make_log: MakeLog, monkeypatch: pytest.MonkeyPatch, moment: str, deep: bool
) -> None:
    log = make_log(index_interval_bytes=0)
    for number in range(5):
        log.append(b"%d" % number, timestamp=1_700_000_000_000 + number)
    inner = getattr(PartitionInspection, moment)

    def append(rolls: bool) -> None:
        end = log.end_offset
        for number in range(end, end + 5):
            log.append(b"%d" % number, timestamp=1_700_000_000_000 + number)
        if rolls:
            log.roll()

    def grows(inspection: PartitionInspection, *args: Any) -> Any:
        append(False)
        try:
            return inner(inspection, *args)
        finally:
            append(True)
            append(False)

    monkeypatch.setattr(PartitionInspection, moment, grows)
    assert log.check(deep=deep) == []
    assert log.check(deep=deep) == []
