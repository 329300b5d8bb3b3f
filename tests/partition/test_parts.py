"""The parts of a Partition: how long they live, and what keeps a log open."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logstore import LockedError, Partition, ReadOnlyError


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Reference counting alone frees objects."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("readonly", [False, True])
def test_the_parts_of_a_dropped_partition_are_freed_at_once(tmp_path: Path, readonly: bool) -> None:
    Partition.open(tmp_path / "t-0").close()
    log = Partition.open(tmp_path / "t-0", readonly=readonly)
    parts = log.parts
    refs = [weakref.ref(part) for part in (parts.view, parts.active, parts.reader, parts.appender)]
    refs += [weakref.ref(part) for part in (parts.cutter, parts.rewriter, parts.active.durability)]
    log.close()
    del log, parts
    assert [ref() for ref in refs] == [None] * len(refs)


USES: dict[str, Callable[[Partition], Any]] = {
    "scan": lambda log: log.scan(),
    "writer": lambda log: log.writer(),
    "append": lambda log: log.append,
    "scan method": lambda log: log.scan,
    "slice": lambda log: log[0:],
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", sorted(USES))
def test_what_uses_a_log_keeps_it_locked(tmp_path: Path, use: str) -> None:
    log = Partition.open(tmp_path / "t-0")
    log.extend([b"a", b"b"])
    held = USES[use](log)
    del log
    with pytest.raises(LockedError):
        Partition.open(tmp_path / "t-0")
    with pytest.warns(ResourceWarning, match="dropped without close"):
        del held
    Partition.open(tmp_path / "t-0").close()


@pytest.mark.parametrize("use", sorted(USES))
def test_a_log_is_in_use_while_something_holds_a_part(tmp_path: Path, use: str) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.extend([b"a", b"b"])
        assert not log.parts.in_use
        held = USES[use](log)
        assert log.parts.in_use
        if use == "writer":
            held.close()
        del held
        assert not log.parts.in_use
        assert [record.value for record in log] == [b"a", b"b"]
        assert not log.parts.in_use


def test_every_change_of_a_readonly_log_is_refused(tmp_path: Path) -> None:
    with Partition.open(tmp_path / "t-0") as log:
        log.append(b"a")
    with Partition.open(tmp_path / "t-0", readonly=True) as log:
        changes: list[Callable[[], Any]] = [
            *(lambda: log.append(b"b"), lambda: log.extend([b"b"]), log.writer, log.roll, log.sync),
            *(lambda: log.trim(1), lambda: log.truncate(0), log.enforce, log.expire_producers),
            *(lambda: log.become_leader(1), lambda: log.end_transaction(1, 0, commit=True)),
            *(log.parts.rewriter.write_digests, lambda: log.parts.rewriter.rewriting().__enter__()),
        ]
        for change in changes:
            with pytest.raises(ReadOnlyError):
                change()
        assert log.enforce(dry_run=True)
        assert log.failure is None and not log.parts.active.asleep
