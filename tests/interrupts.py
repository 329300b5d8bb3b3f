"""An interrupt at a chosen place of Python code, as a signal would bring it.

A signal handler runs between two instructions, at a few of them only: where a function begins,
behind a call, where a loop turns back.  `interrupt_at(n, act)` raises KeyboardInterrupt at the n-th
such place, so that a test can go through all of them: no timer, no luck.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import logstore

CALLS = frozenset({"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"})
PACKAGE = str(Path(logstore.__file__).parent)


def handler_of(code: types.CodeType) -> Callable[[int], object]:
    """Which handler an exception at an instruction goes to."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def find(offset: int) -> object:
        return next((e.target for e in entries if e.start <= offset < e.end), None)

    return find


@functools.cache
def places(code: types.CodeType) -> frozenset[int]:
    """Offsets of instructions before which a handler can have run.

    An exception of a handler that runs behind a call counts as the call's.  Where the instruction
    behind it belongs to another block, the place is left out: it cannot be told by tracing.
    """
    handler = handler_of(code)
    found = set()
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        # What stands behind a jump back is not what runs behind it: take the jump itself.
        if instruction.opname.startswith("JUMP_BACKWARD") or (
            before is not None
            and before.opname in CALLS
            and handler(before.offset) == handler(instruction.offset)
        ):
            found.add(instruction.offset)
        before = instruction
    return frozenset(found)


def interrupt_at(number: int, act: Callable[[], object]) -> bool:
    """Run `act` and interrupt it at a place, counted from 1; False: it ended before.

    What it raises passes through.
    """
    left = number

    def trace(frame: types.FrameType, event: str, _: object) -> object:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(before)
    return left <= 0
