"""The crash explorer: recover from every disk state that a crash could leave.

The explorer replays a recording (`logstore.testing.record_io`) on a model of a disk.  The model
knows for every file which bytes are durable and which are only in the page cache, and the same for
the names in every directory.  After each call the explorer enumerates the states that a crash at
this moment may leave:

- after a kill: all finished calls, and any prefix of the write in progress;
- after a power cut: of the changes that are not durable all, none, each one missing, each one
  alone, all subsets (or a sample of them); the last write torn, with old bytes, zeros or garbage
  after the tear; a file that has grown without its data.

Names follow one of two models.  *ordered* is a journal: directory changes become durable in the
order in which they were made, and an fsync of a file makes its name durable.  *unordered* is
POSIX's minimum: any change in a directory that was not synced may be missing.

Each distinct state is written to a directory, the code under test recovers from it, and the test
judges the result.  The test records its guarantees so far as marks between the calls.

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
    """A crash state from which recovery broke a guarantee."""

    crash: Crash
    error: str
    """The exception with its traceback."""

    def __str__(self) -> str:
        return f"{self.crash}\n{self.error}"

    __repr__ = __str__


@dataclass(slots=True, repr=False)
class Exploration:
    """The result of an exploration.  repr is str, so a failing assert prints the violations."""

    steps: int = 0
    """Calls of the recording after which a crash was tried."""
    tried: int = 0
    """States that were judged.  A state that is judged again with other marks counts again."""
    digests: set[bytes] = field(default_factory=set)
    """Of the distinct states."""
    violations: list[CrashViolation] = field(default_factory=list)

    @property
    def distinct(self) -> int:
        """Return the number of distinct disk states."""
        return len(self.digests)

    def add(self, other: Exploration) -> None:
        """Add the figures of another exploration."""
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
    """Recover from every state that a crash may leave, and judge each result.

    `recover(path, crash)` opens the directory and returns what it finds.  `judge(found, crash)`
    raises AssertionError if that breaks a guarantee in ``crash.marks``.  Recovery runs once per
    distinct state; the result is judged again if there are new marks.  After a power cut logstore
    reads a new boot id.  Any exception of either function is a violation.  The exploration stops
    after `violations_max` violations or `stop_after` distinct states.  States whose digests are in
    `skip` are not tried.
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
            except Exception as error:  # noqa: BLE001  any exception is a violation
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
    """Crash the recovery from `crash` at every call, and recover again.

    Each second recovery must give the same result as a first recovery that is not interrupted, and
    that result must pass `judge`.
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
