"""The crash explorer: every state in which a crash could have left the disk, tried out.

It takes a recording (`logstore.testing.record_io`) and plays it on a disk of its own making, which
knows for every file what is durable and what is only in the page cache, and the same for the names
in every directory.  After each call it enumerates what a crash at this moment may leave:

- a kill: everything that was done, and any part of the write that was under way;
- a power cut: of what is not durable everything, nothing, each change alone missing and alone
  there, all subsets (or some, where there are many), the last write torn, its rest old, zeros or
  garbage, and a file grown without its data.

Names obey one of two models.  *ordered* is a journal: directory changes last in the order in which
they were made, and to sync a file is to make its name durable.  *unordered* promises nothing but
what was asked for: of the changes in directories that were not synced, any may be missing.

Each distinct state is written into a directory, the code under test recovers from it, and its
result is judged.  What was promised by then, the test has put into the recording as marks.

>>> import tempfile, logstore
>>> from logstore.testing import explore, record_io
>>> def run(directory):
...     with record_io(directory) as trace, logstore.Partition.open(directory + "/a-0") as log:
...         for value in (b"one", b"two"):
...             trace.mark((log.append(value), value))        # acknowledged, so it must survive
...     return trace
>>> def recover(directory, crash):
...     with logstore.Partition.open(directory + "/a-0") as log:
...         return {record.offset: record.value for record in log}
>>> def judge(found, crash):
...     for offset, value in crash.marks:
...         assert found[offset] == value
>>> with tempfile.TemporaryDirectory() as directory:
...     result = explore(run(directory), recover, judge)
>>> result.violations
[]
>>> result.distinct > 500
True
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from logstore.testing.crash_states import Crash, Model, crash_states
from logstore.testing.io import record_io
from logstore.testing.io_calls import Trace
from logstore.testing.sandbox import Sandbox, another_boot, quiet

__all__ = ["CrashViolation", "Exploration", "explore", "explore_recovery"]


# ---- the disk -------------------------------------------------------------------------------


# ---- one state ------------------------------------------------------------------------------


# ---- all states -----------------------------------------------------------------------------


# ---- trying them ----------------------------------------------------------------------------


Recover = Callable[[str, Crash], Any]
Judge = Callable[[Any, Crash], None]


@dataclass(frozen=True, slots=True, repr=False)
class CrashViolation:
    """A crash after which a promise was broken."""

    crash: Crash
    error: str
    """The exception, with the last calls that led to it."""

    def __str__(self) -> str:
        return f"{self.crash}\n{self.error}"

    __repr__ = __str__


@dataclass(slots=True, repr=False)
class Exploration:
    """What came of it.  Its repr is its str: a test that fails shows the violations."""

    steps: int = 0
    """Calls of the recording after which a crash was tried."""
    tried: int = 0
    """States that were judged; one that is judged against other promises counts again."""
    digests: set[bytes] = field(default_factory=set)
    """Of the distinct states."""
    violations: list[CrashViolation] = field(default_factory=list)

    @property
    def distinct(self) -> int:
        """How many different states of the disk were recovered from."""
        return len(self.digests)

    def add(self, other: Exploration) -> None:
        """Take another's figures into this one."""
        self.steps += other.steps
        self.tried += other.tried
        self.digests |= other.digests
        self.violations += other.violations

    def __str__(self) -> str:
        figures = f"{self.distinct} distinct states after {self.steps} calls, {self.tried} judged"
        return "\n".join(
            [f"{figures}, {len(self.violations)} violations", *map(str, self.violations)]
        )

    __repr__ = __str__


def explore(
    trace: Trace,
    recover: Recover,
    judge: Judge | None = None,
    *,
    models: Sequence[Model] = ("kill", "ordered", "unordered"),
    per_step: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    sandbox: Sandbox | None = None,
    violations_max: int = 3,
    stop_after: int | None = None,
    skip: Container[bytes] = (),
) -> Exploration:
    """Recover from every state that a crash may have left, and judge what came of it.

    `recover(path, crash)` opens what is in the directory and tells what it found; `judge(found,
    crash)` raises AssertionError when that breaks a promise that ``crash.marks`` tells of.
    Recovery is run once for a distinct state, judging again whenever there are new marks.  After a
    power cut logstore is made to believe that the machine has booted.  Any exception of either is a
    violation; after `violations_max` of them, or `stop_after` distinct states, it ends.  States
    whose digests are in `skip` were tried before.
    """
    own = sandbox is None
    box = sandbox or Sandbox()
    result = Exploration()
    known: dict[tuple[bytes, bool], Any] = {}
    judged: set[tuple[bytes, bool, int]] = set()
    last_step = -1
    try:
        for crash in crash_states(trace, models=models, per_step=per_step, seed=seed, shard=shard):
            if crash.step != last_step:
                result.steps += 1
                last_step = crash.step
            digest, power = crash.digest, crash.model != "kill"
            if (digest, power, len(crash.marks)) in judged or digest in skip:
                continue
            judged.add((digest, power, len(crash.marks)))
            result.tried += 1
            result.digests.add(digest)
            try:
                if (digest, power) not in known:
                    box.put(crash.tree)
                    with quiet(), another_boot("after a power cut" if power else None):
                        known[digest, power] = recover(box.path, crash)
                if judge is not None:
                    judge(known[digest, power], crash)
            except Exception as error:  # noqa: BLE001  whatever it is, it must not be
                text = "".join(traceback.format_exception(error, limit=-3))
                result.violations.append(CrashViolation(crash, text))
                if len(result.violations) >= violations_max:
                    break
            if stop_after is not None and result.distinct >= stop_after:
                break
    finally:
        if own:
            box.close()
    return result


def explore_recovery(
    crash: Crash,
    recover: Recover,
    judge: Judge | None = None,
    *,
    per_step: int | None = None,
    seed: int = 0,
    sandbox: Sandbox | None = None,
    violations_max: int = 3,
) -> Exploration:
    """Crash again, at every call of the recovery from `crash`, and recover from that.

    Each second recovery must come to what the first, left alone, comes to; and `judge` is asked as
    it would be after the first crash.
    """
    power = crash.model != "kill"
    own = sandbox is None
    box = sandbox or Sandbox()
    try:
        box.put(crash.tree)
        first_boot = another_boot("the first recovery" if power else None)
        with quiet(), first_boot, record_io(box.path) as trace:
            expected = recover(box.path, crash)

        def judge_again(found: Any, _: Crash) -> None:
            if judge is not None:
                judge(found, crash)
            if found != expected:
                raise AssertionError(
                    f"a recovery that was stopped came to {found}\n"
                    f"left alone it comes to {expected}\nthe first crash was: {crash}"
                )

        models: tuple[Model, ...] = ("kill", "ordered", "unordered") if power else ("kill",)

        def recover_again(path: str, again: Crash) -> Any:
            if again.model == "kill" and power:
                with another_boot("the first recovery"):
                    return recover(path, crash)
            return recover(path, crash)

        return explore(
            trace,
            recover_again,
            judge_again,
            models=models,
            per_step=per_step,
            seed=seed,
            sandbox=box,
            violations_max=violations_max,
        )
    finally:
        if own:
            box.close()
