"""The interrupt explorer: raise Ctrl-C at every place of an operation where it can happen.

CPython runs a signal handler between two bytecodes, and only at some of them: where a function
begins or resumes after a yield, after a call, where a loop jumps back, and where ``with`` waits for
a lock.  The explorer runs an operation once and counts these places in the calling thread.  Then it
runs the operation again for each place, on a fresh set-up, and raises KeyboardInterrupt there.
Afterwards the caller's check examines the subject: its invariants, a normal operation, close and
reopen.  Every try has a time limit, so that a hang is a finding.

It does not interrupt other threads, nor a second time while the first interrupt is handled.

>>> import logstore
>>> from logstore.testing import explore_interrupts
>>> def prepare(directory):
...     return logstore.Partition.open(directory + "/a-0")
>>> def operate(log):
...     log.append(b"one")
>>> def check(log, error):
...     assert log.append(b"two") == log.end_offset - 1
...     values = [record.value for record in log]
...     log.close()
...     assert values in ([b"two"], [b"one", b"two"])
>>> result = explore_interrupts(prepare, operate, check)
>>> result.violations
[]
>>> result.tried == result.places > 10
True
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import os
import random
import shutil
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from logstore.testing.sandbox import Sandbox, quiet

__all__ = ["InterruptExploration", "InterruptViolation", "explore_interrupts", "interrupt_at"]

T = TypeVar("T")
Place = tuple[types.CodeType, int]  # the offset of the instruction that does not run
CALLS: Final = frozenset({"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
# An interrupt while a lock is waited for; a ``with`` of Python code has its own RESUME.
WAITS: Final = frozenset({"BEFORE_WITH", "BEFORE_ASYNC_WITH"})
_RETURN: Final = dis.opmap["RETURN_VALUE"]
_OURS: Final = (__file__, "<frozen importlib")


# ---- one interrupt --------------------------------------------------------------------------


@functools.cache
def _places(code: types.CodeType) -> frozenset[int]:
    """Offsets of instructions before which a signal handler can have run.

    CPython attributes the exception of a handler that runs after a call to the call.  The place is
    left out if the next instruction has another exception handler: tracing cannot raise there.
    """
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> object:
        return next((e.target for e in entries if e.start <= offset < e.end), None)

    found = set()
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        # The instruction after a jump back is not the next to run: take the jump itself.
        if (
            instruction.opname.startswith("JUMP_BACKWARD")
            or instruction.opname in WAITS
            or (
                before is not None
                and before.opname in CALLS
                and handler(before.offset) == handler(instruction.offset)
            )
        ):
            found.add(instruction.offset)
        before = instruction
    return frozenset(found)


def _visit(
    act: Callable[[], T], visit: Callable[[types.FrameType], object], only: Sequence[str]
) -> T:
    """Run `act`; call `visit` at each place of this thread.  `visit` may raise into `act`."""
    wanted = tuple(only)
    returned_to: types.FrameType | None = None

    def trace(frame: types.FrameType, event: str, _: object) -> object:
        nonlocal returned_to
        name = frame.f_code.co_filename
        if name.startswith(_OURS) or (wanted and not name.startswith(wanted)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            # `return f()` of a Python function: CPython looks for signals no earlier than in the
            # caller, and an interrupt here could not be told from one there.
            last = returned_to is frame and frame.f_code.co_code[frame.f_lasti] == _RETURN
            returned_to = None
            if not last and frame.f_lasti in _places(frame.f_code):
                visit(frame)
        elif event == "return":
            returned_to = frame.f_back
        return trace

    before = sys.gettrace()
    # A collection would run destructors of unrelated objects here: their places count too, so the
    # numbers of places would differ from run to run.
    collecting = gc.isenabled()
    gc.disable()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        return act()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()


def interrupt_at(number: int, act: Callable[[], object], *, only: Sequence[str] = ()) -> bool:
    """Run `act` and raise KeyboardInterrupt at a place, counted from 1; False: `act` ended before.

    What `act` raises passes through.  `only`: paths of files or directories; the places are those
    of code below them, by default of all code but imports.
    """
    left = number

    def visit(_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    _visit(act, visit, only)
    return left <= 0


# ---- all of them ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class InterruptViolation:
    """A place where an interrupt breaks a guarantee."""

    place: int
    """The number of the place, for `interrupt_at`."""
    where: str
    """File, line and function."""
    kind: str
    """``hang``: no end within the time limit.  ``error``: the operation raised something that is
    not a KeyboardInterrupt.  ``check``: the check raised."""
    error: str
    """The exception with its traceback; of a hang, the stacks of all threads."""

    def __str__(self) -> str:
        return f"{self.kind} after an interrupt at place {self.place}, {self.where}\n{self.error}"

    __repr__ = __str__


@dataclass(slots=True, repr=False)
class InterruptExploration:
    """The figures of an exploration, and the violations."""

    places: int = 0
    """The number of places where the operation can be interrupted."""
    tried: int = 0
    """The number of places that were tried."""
    swallowed: int = 0
    """Interrupts that did not end the operation; also those of places that it did not reach."""
    violations: list[InterruptViolation] = field(default_factory=list)

    def __str__(self) -> str:
        figures = f"{self.tried} of {self.places} places tried, {self.swallowed} swallowed"
        return "\n".join(
            [f"{figures}, {len(self.violations)} violations", *map(str, self.violations)]
        )

    __repr__ = __str__


def explore_interrupts(
    prepare: Callable[[str], T],
    operate: Callable[[T], object],
    check: Callable[[T, BaseException | None], object],
    *,
    limit: int | None = None,
    seed: int = 0,
    timeout: float = 60.0,
    only: Sequence[str] = (),
    violations_max: int = 3,
) -> InterruptExploration:
    """Interrupt an operation at each of its places and check what is left.

    `prepare(directory)` makes a subject in an empty directory, `operate(subject)` is interrupted,
    and `check(subject, error)` raises if the subject is not usable any more; it also releases the
    subject.  `error` is what `operate` raised, None if it returned.

    `limit`: try this many places, chosen with `seed`, each line of code once first.  None: all.
    `timeout`: seconds for one try.  `only`: as of `interrupt_at`.  The exploration ends after
    `violations_max` violations, and after a hang: the thread that hangs may hold locks.
    """
    result = InterruptExploration()
    with Sandbox() as box, _quiet():
        explorer = _Explorer(prepare, operate, check, box.path, timeout, only)
        explorer.count()  # a first run does the late imports and fills caches
        places = explorer.count()
        result.places = len(places)
        for number in _chosen(places, limit, seed):
            result.tried += 1
            violation = explorer.attempt(number, _where(places[number - 1]))
            if violation is None:
                continue
            result.violations.append(violation)
            if violation.kind == "hang" or len(result.violations) >= violations_max:
                break
        result.swallowed = explorer.swallowed
    return result


@dataclass(slots=True)
class _Explorer(Generic[T]):
    prepare: Callable[[str], T]
    operate: Callable[[T], object]
    check: Callable[[T, BaseException | None], object]
    path: str
    timeout: float
    only: Sequence[str]
    runs: int = 0
    swallowed: int = 0

    def count(self) -> list[Place]:
        """Run the operation without an interrupt.  Return its places."""
        places: list[Place] = []

        def run(directory: str) -> None:
            subject = self.prepare(directory)
            _visit(
                lambda: self.operate(subject),
                lambda frame: places.append((frame.f_code, frame.f_lasti)),
                self.only,
            )
            self.check(subject, None)

        self._bounded(run)
        return places

    def attempt(self, number: int, where: str) -> InterruptViolation | None:
        """Interrupt the operation at one place."""
        kind = "check"

        def run(directory: str) -> None:
            nonlocal kind
            subject = self.prepare(directory)
            error: BaseException | None = None
            try:
                interrupt_at(number, lambda: self.operate(subject), only=self.only)
                self.swallowed += 1  # `operate` returned, although it was interrupted
            except KeyboardInterrupt as interrupt:
                error = interrupt
            except BaseException:
                kind = "error"
                raise
            self.check(subject, error)

        try:
            self._bounded(run)
        except _HangError as hang:
            return InterruptViolation(number, where, "hang", str(hang))
        except BaseException as error:  # noqa: BLE001  any exception is a violation
            return InterruptViolation(number, where, kind, _text(error))
        return None

    def _bounded(self, run: Callable[[str], None]) -> None:
        """Run it in a thread, in a directory of its own; raise _HangError if it does not end."""
        self.runs += 1
        directory = f"{self.path}/{self.runs}"
        os.mkdir(directory)
        raised: list[BaseException] = []

        def guarded() -> None:
            try:
                run(directory)
            except BaseException as error:  # noqa: BLE001  raised below
                raised.append(error)

        # A thread, so that a hang can be noticed; daemon, so that it does not keep the process
        # alive.
        thread = threading.Thread(target=guarded, name="interrupted", daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            # The directory stays: the thread that hangs still uses it.
            raise _HangError(f"no end after {self.timeout} s\n{_stacks()}")
        shutil.rmtree(directory, ignore_errors=True)
        if raised:
            raise raised.pop()


def _text(error: BaseException) -> str:
    """The exception with its traceback below this file."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename == __file__:
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at, chain=False))


class _HangError(Exception):
    """The stacks of all threads."""


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)!r}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


def _chosen(places: list[Place], limit: int | None, seed: int) -> list[int]:
    """Numbers of places, in order; of a sample, each instruction comes once before others again."""
    if limit is None or limit >= len(places):
        return list(range(1, len(places) + 1))
    numbers = list(range(1, len(places) + 1))
    # Shuffled, then sorted by visits: `sorted` is stable, so equal visits stay in random order.
    random.Random(seed).shuffle(numbers)
    visits: dict[Place, int] = {}

    def earlier(number: int) -> int:
        place = places[number - 1]
        visits[place] = visits.get(place, -1) + 1
        return visits[place]

    return sorted(sorted(numbers, key=earlier)[:limit])


def _where(place: Place) -> str:
    code, offset = place
    line = next((at for start, end, at in code.co_lines() if start <= offset < end), None)
    return f"{code.co_filename}:{line or code.co_firstlineno} in {code.co_qualname}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the log, and without the interrupts of destructors, which CPython prints."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)

    sys.unraisablehook = hook
    try:
        with quiet():
            yield
    finally:
        sys.unraisablehook = before
