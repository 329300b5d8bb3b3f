"""TopicPattern: a regular expression as a subscription.

Kafka's coordinator uses RE2, which has no look-around and no back-references.  So it can follow all
ways to match at the same time, and a client cannot send a pattern that takes exponential time.
Python's `re` tries one way after the other.  Here a pattern becomes a short program, as in RE2, and
`re` matches only single characters.  The time for one topic is at most the length of its name times
PROGRAM_MAX.

Served are RE2's literals, classes, groups, ``|``, repeats, the anchors ``^`` and ``$`` and the flag
``(?i)``; not ``\\b``, ``\\p`` and ``\\Q``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

__all__ = ["InvalidPatternError", "TopicPattern", "matching"]

LENGTH_MAX = 10_000
PROGRAM_MAX = 2000
DEPTH_MAX = 50
COUNT_MAX = 1000  # of a repeat, as in RE2


class InvalidPatternError(ValueError):
    """The pattern is not a regular expression of RE2, or its program is too long."""


class Step(NamedTuple):
    """One instruction: match a character, or go on at one or two other places."""

    test: Callable[[str], object] | None  # of one character; None: go to each place of `jumps`
    jumps: tuple[int, ...] = ()  # relative to this instruction
    anchor: str = ""  # "^" or "$": go on only at the start, or the end, of the name


Program: TypeAlias = tuple[Step, ...]

_GROUP = re.compile(r"\(\?(?P<flags>[ism]*)(?P<close>[:)])|\(\?P?<\w+>")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?\w*:\]|[^\]\\])*\]")
_REPEAT = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}")
_ESCAPED = re.compile(r"\\[dDwWsStnrfv\W_]")
_NAMED_CLASS = re.compile(r"\[:(\^?\w*):\]")
_NAMED_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f", "punct": r"!-/:-@\[-`{-~", "space": r"\t-\r ",
}  # fmt: skip


class TopicPattern:
    """A compiled pattern.  Raises InvalidPatternError."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > LENGTH_MAX:
            raise InvalidPatternError(f"more than {LENGTH_MAX} characters")
        self._pattern = pattern
        self._at = 0
        self._flags = re.ASCII
        self._program = self._alternatives(0)
        if self._at < len(pattern):
            raise InvalidPatternError("unexpected )")

    def matches(self, name: str) -> bool:
        """Return whether the whole name matches."""
        places = self._reach({0}, at_start=True, at_end=not name)
        for number, character in enumerate(name, 1):
            passed = {
                place + 1
                for place in places
                if place < len(self._program)
                and (test := self._program[place].test) is not None
                and test(character)
            }
            places = self._reach(passed, at_start=False, at_end=number == len(name))
        return len(self._program) in places

    def _reach(self, places: set[int], *, at_start: bool, at_end: bool) -> set[int]:
        """Return all places that can be reached without a character."""
        reached: set[int] = set()
        left = list(places)
        while left:
            place = left.pop()
            if place in reached:
                continue
            reached.add(place)
            step = self._program[place] if place < len(self._program) else None
            if step is None or (step.anchor == "^" and not at_start):
                continue
            if step.anchor != "$" or at_end:
                left += [place + jump for jump in step.jumps]
        return reached

    # ---- parsing: each method reads a part of the pattern and returns its program ----

    def _alternatives(self, depth: int) -> Program:
        if depth > DEPTH_MAX:
            raise InvalidPatternError("expression nests too deeply")
        flags = self._flags
        found = self._sequence(depth)
        while self._pattern.startswith("|", self._at):
            self._at += 1
            other = self._sequence(depth)
            found = _bounded(
                (Step(None, (1, len(found) + 2)), *found, Step(None, (len(other) + 1,)), *other)
            )
        self._flags = flags
        return found

    def _sequence(self, depth: int) -> Program:
        found: Program = ()
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            found = _bounded((*found, *self._repeated(self._atom(depth))))
        return found

    def _atom(self, depth: int) -> Program:
        character = self._pattern[self._at]
        if character == "(":
            return self._group(depth)
        if character in "^$":
            self._at += 1
            return (Step(None, (1,), character),)
        if character in "*+?":
            raise InvalidPatternError(f"missing argument to repetition operator: {character}")
        text = character if character == "." else re.escape(character)
        unit = {"[": _CLASS, "\\": _ESCAPED}.get(character)
        if unit is not None:
            whole = unit.match(self._pattern, self._at)
            if whole is None:
                raise InvalidPatternError(
                    "missing closing ]" if character == "[" else "invalid escape sequence"
                )
            text = _NAMED_CLASS.sub(_plain_class, whole.group())
            self._at += len(whole.group()) - 1
        self._at += 1
        return (Step(_test(text, self._flags)),)

    def _group(self, depth: int) -> Program:
        extended = _GROUP.match(self._pattern, self._at)
        if extended is None and self._pattern.startswith("(?", self._at):
            raise InvalidPatternError("invalid or unsupported Perl syntax")
        flags = self._flags
        self._at += 1 if extended is None else len(extended.group())
        if extended is not None and "i" in (extended["flags"] or ""):
            self._flags |= re.IGNORECASE
        if extended is not None and extended["close"] == ")":
            return ()  # flags for the rest of the group around it
        found = self._alternatives(depth + 1)
        self._flags = flags
        if not self._pattern.startswith(")", self._at):
            raise InvalidPatternError("missing closing )")
        self._at += 1
        return found

    def _repeated(self, atom: Program) -> Program:
        repeat = _REPEAT.match(self._pattern, self._at)
        if repeat is None:
            return atom
        self._at = repeat.end()
        if self._pattern.startswith("?", self._at):  # fewest first: the same names match
            self._at += 1
        if _REPEAT.match(self._pattern, self._at):
            raise InvalidPatternError("invalid nested repetition operator")
        size, kind = len(atom), repeat.group()
        optional = (Step(None, (1, size + 1)), *atom)
        forever = (Step(None, (1, size + 2)), *atom, Step(None, (-size - 1,)))
        if kind in "*+?":
            return {"*": forever, "+": (*atom, *forever), "?": optional}[kind]
        least, comma, most = repeat.groups()
        low = int(least)
        high = int(most) if most else low
        if max(low, high) > COUNT_MAX or high < low:
            raise InvalidPatternError(f"invalid repeat count: {kind}")
        _bounded(optional, max(1, high))
        return atom * low + (forever if comma and not most else optional * (high - low))


def _bounded(program: Program, times: int = 1) -> Program:
    if len(program) * times > PROGRAM_MAX:
        raise InvalidPatternError("expression too large")
    return program


@functools.lru_cache(1000)
def _test(text: str, flags: re.RegexFlag) -> Callable[[str], object]:
    try:
        return re.compile(text, flags).fullmatch
    except re.error as error:
        raise InvalidPatternError(str(error)) from None


def _plain_class(found: re.Match[str]) -> str:
    try:
        return _NAMED_CLASSES[found[1]]
    except KeyError:
        raise InvalidPatternError(f"invalid character class range: {found[0]}") from None


def matching(pattern: str, topics: Iterable[str]) -> tuple[str, ...]:
    """Return the topics that match, sorted; none if the pattern is not valid."""
    try:
        compiled = TopicPattern(pattern)
    except InvalidPatternError:
        return ()
    return tuple(sorted(name for name in topics if compiled.matches(name)))
