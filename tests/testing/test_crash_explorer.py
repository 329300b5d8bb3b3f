"""The crash explorer: its model of a disk, that it bites, and what it has found."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore import Partition
from logstore.testing.crash import explore
from logstore.testing.crash_states import Crash, crash_states
from logstore.testing.io import record_io
from logstore.testing.io_calls import Fault, Trace, tree_of
from logstore.testing.oracle import judge
from logstore.testing.sandbox import Sandbox, another_boot
from tests.crash.crash_campaign import MEMORY
from tests.crash.crash_scenarios import NOW, SCENARIOS, Scenario


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory where syncing costs nothing, if the machine has one."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield path


# ---- the disk of its own making -------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_with_everything_done_the_simulated_disk_is_the_real_one(name: str, memory: str) -> None:
    trace = SCENARIOS[name].record(memory)
    *_, last = (c for c in crash_states(trace, models=("kill",)) if "everything" in c.story)
    assert last.tree == tree_of(memory)


def record(memory: str, act: Callable[[Path], None]) -> Trace:
    with record_io(memory) as trace:
        act(Path(memory))
    return trace


def contents(crashes: Iterator[Crash], name: str, step: int) -> set[bytes | None]:
    return {crash.tree.get(name) for crash in crashes if crash.step == step}


def step_of(trace: Trace, kind: str, path: str = "", nth: int = 0) -> int:
    """How many operations are done once this one is."""
    found = [i for i, c in enumerate(trace.operations) if c.kind == kind and path in c.path]
    return found[nth] + 1


def test_what_was_not_synced_may_be_missing_torn_zero_or_garbage(memory: str) -> None:
    def act(root: Path) -> None:
        with Partition.open(root / "a-0") as log:
            log.append(b"value")

    trace = record(memory, act)
    name = "a-0/00000000000000000000.log"
    written = step_of(trace, "pwrite", ".log")
    found = contents(crash_states(trace, models=("ordered", "unordered")), name, written)
    batch = trace.operations[written - 1].data
    assert batch is not None
    size = len(batch)
    assert {b"", batch, batch[: size // 2], bytes(size)} <= found
    assert any(each and len(each) == size and each[0] and each != batch for each in found)
    synced = step_of(trace, "datasync", ".log")
    assert contents(crash_states(trace, models=("ordered",)), name, synced) == {batch}


def test_a_name_lasts_when_its_directory_is_synced_and_before_that_only_in_the_journal(
    memory: str,
) -> None:
    def act(root: Path) -> None:
        with Partition.open(root / "a-0") as log:
            log.append(b"value")

    trace = record(memory, act)
    name = "a-0/00000000000000000000.log"
    created = next(
        i + 1
        for i, call in enumerate(trace.operations)
        if call.kind == "open" and call.path == name
    )
    for model in ("ordered", "unordered"):
        states = crash_states(trace, models=(model,))
        assert contents(states, name, created) == {None, b""}
    # The state file's rename is followed by a sync of the directory: from there on it is there.
    synced = step_of(trace, "sync", "a-0", -1)
    assert None not in contents(crash_states(trace, models=("unordered",)), name, synced)


def test_a_sandbox_holds_one_tree_after_another(tmp_path: Path) -> None:
    with Sandbox(tmp_path) as box:
        first = {"d": None, "d/a": b"1", "b": b"22"}
        second = {"d": None, "d/a": b"2", "e": None, "e/f": b""}
        for tree in (first, second, first, {}, second):
            box.put(tree)
            assert tree_of(tmp_path) == tree
        (tmp_path / "d" / "a").write_bytes(b"3")  # what recovery does
        (tmp_path / "e" / "f").rename(tmp_path / "e" / "g")
        box.put(second)
        assert tree_of(tmp_path) == second


def test_states_are_the_same_for_the_same_seed_and_others_for_another(memory: str) -> None:
    trace = SCENARIOS["append_fsync"].record(memory)

    def digests(seed: int) -> list[bytes]:
        return [crash.digest for crash in crash_states(trace, per_step=5, seed=seed)]

    assert digests(1) == digests(1)
    assert digests(1) != digests(2)


def test_shards_are_the_whole(memory: str) -> None:
    trace = SCENARIOS["create_partition"].record(memory)
    whole = {crash.digest for crash in crash_states(trace)}
    parts = [{c.digest for c in crash_states(trace, shard=(i, 3))} for i in range(3)]
    assert set().union(*parts) == whole


# ---- it bites -------------------------------------------------------------------------------

MUTANTS = [
    ("append_fsync", Fault.pretend("datasync", "*.log")),
    ("roll_fsync", Fault.pretend("sync", "a-0")),
    ("roll_fsync", Fault.pretend("datasync", "*.timeindex")),
    ("create_topic", Fault.pretend("sync", "s/a-1")),
    ("create_topic", Fault.pretend("sync", "s")),
    ("truncate", Fault.pretend("datasync", "*/logstore.durable")),
    ("truncate", Fault.pretend("sync", "*/truncate.plan.*")),
    ("compaction", Fault.pretend("sync", "*.log.cleaned")),
    ("delete_topic", Fault.pretend("sync", "s")),
    ("alter_config", Fault.pretend("sync", "s/logstore.topics.*")),
    ("killed_and_reopened", Fault.pretend("datasync", "*.log")),
]


def explore_one(scenario: Scenario, memory: str, *faults: Fault, per_step: int = 3) -> list[str]:
    trace = scenario.record(memory, *faults)
    result = explore(trace, scenario.recover, judge, per_step=per_step, violations_max=1)
    return [str(violation) for violation in result.violations]


@pytest.mark.parametrize(("name", "fault"), MUTANTS)
def test_a_missing_barrier_is_found(name: str, fault: Fault, memory: str) -> None:
    assert explore_one(SCENARIOS[name], memory, fault)


def test_a_promise_that_was_not_kept_is_found(memory: str) -> None:
    """The judge itself: a ledger with more acknowledgements than there are records."""

    def act(root: str, ledger: object) -> None:
        SCENARIOS["append_fsync"].act(root, ledger)  # type: ignore[arg-type]
        ledger.issue("a-0", {4: (NOW, None, b"never", "record")})  # type: ignore[attr-defined]
        ledger.acknowledge("a-0", 5, durable=True)  # type: ignore[attr-defined]

    scenario = dataclasses.replace(SCENARIOS["append_fsync"], act=act)
    assert any("acknowledged up to 5" in text for text in explore_one(scenario, memory))


# ---- what it has found ----------------------------------------------------------------------

SMALL = {"segment.bytes": 1024, "index.interval.bytes": 100}


def test_a_power_cut_right_after_a_truncation_is_no_damage(memory: str) -> None:
    """How much is durable was lowered, but not on the disk, before the log was cut."""
    with Partition.open(f"{memory}/a-0", config=SMALL) as log:
        log.extend([b"a", b"b", b"c", b"d"])
        with record_io(memory) as trace:
            log.truncate(2)

    def recover(path: str, _: Crash) -> None:
        log = Partition.open(f"{path}/a-0", config=SMALL)
        assert log.recovery.damage == []
        log.parts.discard()

    assert explore(trace, recover, per_step=3).violations == []


def rolled(path: str, count: int = 9) -> None:
    """Several segments, all of it in the page cache, and then a kill."""
    log = Partition.open(f"{path}/a-0", config=SMALL, durability="os")
    for number in range(count):
        log.append(b"%d" % number * 200, timestamp=NOW + number)
    assert len(log.segments) == 3
    log.parts.discard()


def test_a_sealed_segment_that_lost_its_last_batches_whole_ends_the_log(memory: str) -> None:
    """A power cut at the end of a batch leaves no torn bytes, only a hole before the next one."""
    rolled(memory)
    first = Path(memory, "a-0", "00000000000000000000.log")
    content = first.read_bytes()
    assert len(content) % 3 == 0, "three batches"
    first.write_bytes(content[: len(content) // 3 * 2])
    with another_boot(), Partition.open(f"{memory}/a-0", config=SMALL) as log:
        assert [record.offset for record in log] == [0, 1]
        assert log.end_offset == 2
        assert log.append(b"on") == 2


def test_what_a_kill_left_in_the_page_cache_is_synced_before_it_counts(memory: str) -> None:
    """After a kill the sealed segments, too, may be nowhere but in memory."""
    rolled(memory)
    with record_io(memory) as trace, Partition.open(f"{memory}/a-0", config=SMALL) as log:
        log.append(b"durable, with all before it")
    synced = {call.path for call in trace.operations if call.kind == "datasync"}
    for base in (0, 3):
        for suffix in (".log", ".index", ".timeindex"):
            assert f"a-0/{base:020d}{suffix}" in synced


def test_times_are_found_after_a_power_cut_right_behind_a_roll(memory: str) -> None:
    """The indexes of a sealed segment are not checked below the recovery point: they are synced."""
    with record_io(memory) as trace, Partition.open(f"{memory}/a-0", config=SMALL) as log:
        for number in range(6):
            log.append(b"%d" % number * 200, timestamp=NOW + number)
            trace.mark(number)

    def recover(path: str, _: Crash) -> list[tuple[int, int]]:
        log = Partition.open(f"{path}/a-0", config=SMALL)
        found = [(r.offset, log.offset_for_time(r.timestamp)) for r in log]
        log.parts.discard()
        return found

    def check(found: list[tuple[int, int]], crash: Crash) -> None:
        assert all(offset == by_time for offset, by_time in found), found
        assert len(found) >= len(crash.marks)

    result = explore(trace, recover, check, models=("ordered", "unordered"), per_step=2)
    assert result.violations == []
