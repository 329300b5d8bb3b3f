"""`repair`: plans first, changes only what the plan has, keeps what it cuts, and can be killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore import CorruptLogError, Partition, ProblemKind, Severity, Store, repair
from logstore.testing import Fault, inject_io
from tests.kit import flip, kill

MakeStore = Callable[..., Store]

CONFIG = {"segment.bytes": 2000, "index.interval.bytes": 500}


def state_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def second_batch(path: Path) -> int:
    return 12 + int.from_bytes(path.read_bytes()[8:12], "big")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "orders-0"
    with Partition.open(path, durability="os", config=CONFIG) as log:
        for i in range(120):
            log.append(b"value %03d" % i + bytes(40), key=b"k%d" % (i % 7), timestamp=1000 + i)
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "orders-0")


def problems(path: Path) -> list[ProblemKind]:
    with Partition.open(path, readonly=True, config=CONFIG) as log:
        found = log.check(on_corrupt="report")
    return [problem.kind for problem in found if problem.severity != Severity.NOTE]


def test_a_sound_log_needs_no_repair(path: Path) -> None:
    before = state_of(path)
    for dry_run in (True, False):
        done = repair(path, config=CONFIG, dry_run=dry_run)
        assert (done.steps, done.left, done.receipt) == ([], [], None)
    assert state_of(path).keys() >= before.keys()
    assert {k: v for k, v in state_of(path).items() if k in before and k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


def test_a_plan_changes_nothing(path: Path) -> None:
    flip(sorted(path.glob("*.log"))[1], 100)
    flip(sorted(path.glob("*.index"))[1], 5)
    before = state_of(path)
    done = repair(path, accept_loss=True, config=CONFIG)
    assert done.dry_run
    assert {step.action for step in done.steps} == {"cut", "rebuild"}
    assert "offsets are given up" in str(done)
    assert json.loads(json.dumps(done.as_json()))["steps"]
    assert state_of(path) == before


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".sum"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_what_can_be_made_again_is(path: Path, suffix: str, how: str) -> None:
    good = state_of(path)
    file = sorted(path.glob(f"*{suffix}"))[2]
    if how == "gone":
        file.unlink()
    else:
        flip(file, 5)
    done = repair(path, dry_run=False, config=CONFIG)
    assert done.left == []
    assert problems(path) == []
    if how == "gone" and suffix == ".sum":
        return  # a digest that is missing is no problem
    assert file.read_bytes() == good[file.name]
    assert done.receipt is not None
    receipt = json.loads(done.receipt.read_text())
    assert receipt["finished"]
    assert [step["path"] for step in receipt["done"]] == [str(file)]
    if how == "flipped":
        assert (path / f"{file.name}.cut-1").exists()


def test_damage_is_not_touched_without_consent(path: Path) -> None:
    log_file = sorted(path.glob("*.log"))[1]
    flip(log_file, 100)
    before = log_file.read_bytes()
    done = repair(path, dry_run=False, config=CONFIG)
    assert [problem.kind for problem in done.left] == [ProblemKind.DAMAGED_BATCH]
    assert log_file.read_bytes() == before


@pytest.mark.parametrize("which", [0, 2, -1])
def test_damage_is_cut_out_and_kept(path: Path, which: int) -> None:
    log_file = sorted(path.glob("*.log"))[which]
    start = second_batch(log_file)
    content = log_file.read_bytes()
    end = start + 12 + int.from_bytes(content[start + 8 : start + 12], "big")
    flip(log_file, start + 70)
    damaged = log_file.read_bytes()
    lost = int(log_file.stem) + 1
    done = repair(path, dry_run=False, accept_loss=True, config=CONFIG)
    assert [step.action for step in done.steps] == ["cut"]
    assert done.steps[0].loses == (range(lost, lost + 1),)
    assert done.left == []
    assert problems(path) == []
    assert (path / f"{log_file.name}.cut-1").read_bytes() == damaged[start:end]
    with Partition.open(path, config=CONFIG) as log:
        found = {record.offset: record.value for record in log}
        assert found == {i: b"value %03d" % i + bytes(40) for i in range(120) if i != lost}
        assert log.append(b"next") == 120
        assert [p for p in log.check() if p.severity != Severity.NOTE] == []
    receipt = json.loads((path / "logstore.repair-1.json").read_text())
    step = receipt["done"][0]
    assert step["before"][0] == len(damaged)
    assert step["after"][0] == len(damaged) - (end - start)


def test_a_digest_that_does_not_match_is_noted_anew_with_consent(path: Path) -> None:
    log_file = sorted(path.glob("*.log"))[1]
    flip(log_file, 15)  # the leader epoch: outside of the batch's checksum
    assert problems(path) == [ProblemKind.DIGEST_MISMATCH]
    assert repair(path, config=CONFIG).steps == []
    repair(path, dry_run=False, accept_loss=True, config=CONFIG)
    assert problems(path) == []


def test_someone_else_who_writes_keeps_a_repair_out(path: Path) -> None:
    with Partition.open(path, config=CONFIG), pytest.raises(logstore.LockedError):
        repair(path, dry_run=False, config=CONFIG)


def test_mending_one_file_does_not_cost_the_records_behind_damage_in_another(path: Path) -> None:
    """The state is written again, without the boot id that it had."""
    flip(sorted(path.glob("*.log"))[1], 100)
    flip(path / "logstore.state", 100)
    done = repair(path, dry_run=False, config=CONFIG)
    assert [(step.action, step.loses) for step in done.steps] == [("set-aside", ())]
    assert [problem.kind for problem in done.left] == [ProblemKind.DAMAGED_BATCH]
    with Partition.open(path, config=CONFIG) as log:
        assert sum(1 for _ in log.scan(on_corrupt="skip")) == 119
        assert log.end_offset == 120
        assert not log.recovery.torn


# ---- stores ----


@pytest.fixture
def root(make_store: MakeStore) -> Path:
    store = make_store(config=CONFIG)
    orders = store.create_topic("orders", 2)
    for i in range(100):
        orders.append(b"%d" % i + bytes(40), partition=i % 2)
    store.close()
    return store.path


def test_a_store_is_repaired_as_a_whole(root: Path) -> None:
    (root / "orders-0" / "partition.metadata").write_text("nonsense")
    (root / "recovery-point-offset-checkpoint").write_text("nonsense\n1\n2\n")
    flip(root / "orders-1" / f"{0:020d}.log", 100)
    flip(sorted((root / "orders-1").glob("*.timeindex"))[1], 3)
    done = repair(root, dry_run=False, accept_loss=True, config=CONFIG)
    assert {step.action for step in done.steps} == {"rewrite", "set-aside", "cut", "rebuild"}
    assert done.receipt == root / "logstore.repair-1.json"
    with logstore.open(root, config=CONFIG) as store:
        store.sync()
        assert [p for p in store.check() if p.severity != Severity.NOTE] == []
        assert sum(1 for _ in store["orders"][0]) == 50
        assert sum(1 for _ in store["orders"][1]) == 49
        assert store["orders"].id is not None


def test_a_repaired_active_segment_can_be_appended_to(make_store: MakeStore) -> None:
    store = make_store()
    store.create_topic("orders")[0].extend([b"%d" % i for i in range(3)])
    for i in range(3, 10):
        store["orders"].append(b"%d" % i)
    store.close()
    log_file = store.path / "orders-0" / f"{0:020d}.log"
    flip(log_file, second_batch(log_file) + 70)
    repair(store.path, dry_run=False, accept_loss=True)
    with logstore.open(store.path) as again:
        assert again["orders"][0].append(b"next") == 10
        assert [p for p in again.check() if p.severity != Severity.NOTE] == []


def test_a_catalogue_that_cannot_be_read_is_set_aside_with_consent(root: Path) -> None:
    (root / "logstore.topics").write_text("nonsense")
    done = repair(root, dry_run=False, config=CONFIG)
    assert [problem.kind for problem in done.left] == [ProblemKind.DAMAGED_CATALOGUE]
    repair(root, dry_run=False, accept_loss=True, config=CONFIG)
    assert (root / "logstore.topics.cut-1").read_text() == "nonsense"
    with logstore.open(root, config=CONFIG) as store:
        assert len(store["orders"]) == 2


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_lost_state_does_not_make_damage_a_power_cut(make_store: MakeStore, how: str) -> None:
    store = make_store(config=CONFIG)
    log = store.create_topic("orders")[0]
    for i in range(60):
        log.append(b"%d" % i + bytes(40), durability="fsync")
    kill(store)
    directory = store.path / "orders-0"
    flip(sorted(directory.glob("*.log"))[1], 100)
    if how == "gone":
        (directory / "logstore.state").unlink()
    else:
        flip(directory / "logstore.state", 100)
    with logstore.open(store.path, config=CONFIG) as again:
        log = again["orders"][0]
        assert sum(1 for _ in log.scan(on_corrupt="skip")) == 59
        assert log.end_offset == 60
        assert not log.recovery.torn


# ---- killed in the middle ----


@pytest.mark.parametrize(
    "first", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_repair_can_be_killed_at_any_call_and_run_again(tmp_path: Path, first: int) -> None:
    """Every change of a file is a place to die; afterwards each record is there, once."""
    with Partition.open(tmp_path / "made" / "orders-0", durability="os", config=CONFIG) as made:
        made.extend([b"value %03d" % i + bytes(40) for i in range(10)])
        for i in range(10, 40):
            made.append(b"value %03d" % i + bytes(40))
    lost = None
    for call in range(first, 400, 3):
        path = shutil.copytree(made.path, tmp_path / "orders-0")
        log_file = sorted(path.glob("*.log"))[1]
        flip(log_file, second_batch(log_file) + 70)
        flip(sorted(path.glob("*.index"))[0], 5)
        lost = int(log_file.stem) + 1
        changes = ("pwrite", "truncate", "rename", "unlink", "open", "sync", "datasync")
        child = os.fork()
        if child == 0:
            try:
                with inject_io(Fault.kill(changes, f"*{path.name}/*", call=call)):
                    repair(path, dry_run=False, accept_loss=True, config=CONFIG)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        with Partition.open(path, readonly=True, config=CONFIG) as reader:
            try:
                seen = [record.offset for record in reader]
            except CorruptLogError:
                seen = [r.offset for r in reader.scan(on_corrupt="skip")]
        assert seen == [i for i in range(40) if i != lost], call
        repair(path, dry_run=False, accept_loss=True, config=CONFIG)
        with Partition.open(path, config=CONFIG) as log:
            assert [record.offset for record in log] == [i for i in range(40) if i != lost], call
        assert problems(path) == []
        shutil.rmtree(path)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    else:
        pytest.fail("the repair never ended by itself")
    assert call > 20
