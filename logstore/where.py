"""Where: a small language that selects records, for the command line and the web page.

    key == "alice" and header.source =~ /^web/ and $.total > 3

Fields: ``key``, ``value``, ``offset``, ``partition``, ``timestamp``, ``topic``, ``header.NAME`` (or
``header["any name"]``), ``$`` with a path for the value as JSON (``$.items[0].id``), and ``$key``
for the key as JSON.  ``length(key)``, ``length(value)``: their bytes, -1 for null.

Operators: ``== != < <= > >=``, ``=~`` and ``!~`` with a /regular expression/ (``/x/i`` ignores
case), ``contains``, ``startswith``, ``endswith``, ``in [a, b]``, ``and``, ``or``, ``not`` and
parentheses.  Literals: strings in either quote, numbers, ``true``, ``false``, ``null``.  A
timestamp is compared with milliseconds or with a time in quotes: ``"-15m"``, ``"2026-01-31"``.

Invariant: no part of an expression is run as Python.  Length and depth of an expression are
limited.

If a record has no value to compare (a missing path, a string where a number is compared), the
comparison is false, and no error is raised; ``!=`` and ``!~`` are true.  An expression that cannot
be parsed raises WhereError with the position.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from logstore.errors import LogStoreError
from logstore.record import Record
from logstore.times import parse_time

__all__ = ["Where", "WhereError"]

LENGTH_MAX = 10_000  # characters of an expression
DEPTH_MAX = 50  # nested parentheses and `not`s: the parser is recursive


class WhereError(LogStoreError, ValueError):
    """The expression cannot be parsed: ``.position`` is the first wrong character."""

    def __init__(self, reason: str, text: str, position: int) -> None:
        start = max(0, position - 20)
        near = text[start : position + 20]
        super().__init__(f"where: {reason} at character {position + 1}, near {near!r}")
        self.position = position


class Where:
    """A parsed expression: call it with a record.

    >>> from logstore import Record
    >>> Where('key == "a" and $.n >= 2')(Record(b'{"n": 2}', key=b"a"))
    True

    Times such as ``"-15m"`` are relative to `now_ms`; None: to the time of the parsing.
    """

    def __init__(self, text: str, *, now_ms: int | None = None) -> None:
        self.text = text
        self._test = _Parser(text, now_ms).parse()

    def __call__(self, record: Record) -> bool:
        """Return whether the expression selects the record."""
        return bool(self._test(_Row(record)))

    def __repr__(self) -> str:
        return f"Where({self.text!r})"


# The value of a missing header or path, or of bytes that are not JSON.  Not None, which is null.
_ABSENT: Any = object()


class _Row:
    """A record and its JSON, which is parsed at its first use."""

    __slots__ = ("_key", "_value", "record")

    def __init__(self, record: Record) -> None:
        self.record = record
        # `self` means "not parsed yet": JSON has no such value.
        self._key: Any = self
        self._value: Any = self

    @property
    def key_json(self) -> Any:
        if self._key is self:
            self._key = _as_json(self.record.key)
        return self._key

    @property
    def value_json(self) -> Any:
        if self._value is self:
            self._value = _as_json(self.record.value)
        return self._value


_Value = Callable[[_Row], Any]


def _as_json(data: bytes | None) -> Any:
    if data is None:
        return _ABSENT
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _ABSENT


def _text(value: Any) -> str | None:
    """Return a value as text to search in, or None if it has no text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None or value is _ABSENT:
        return None
    return str(value) if isinstance(value, int | float) else None


def _comparable(left: Any, right: Any) -> tuple[Any, Any] | None:
    """Return both values as one type that has an order, or None if there is none.

    Keys and values of records are bytes, and literals are str: str is encoded for the comparison.
    """
    if isinstance(left, bytes) or isinstance(right, bytes):
        left = left.encode("utf-8", "surrogateescape") if isinstance(left, str) else left
        right = right.encode("utf-8", "surrogateescape") if isinstance(right, str) else right
        both = isinstance(left, bytes) and isinstance(right, bytes)
        return (left, right) if both else None
    if isinstance(left, bool) or isinstance(right, bool):
        return (left, right) if isinstance(left, bool) and isinstance(right, bool) else None
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left, right
    if isinstance(left, str) and isinstance(right, str):
        return left, right
    return None


def _equal(left: Any, right: Any) -> bool:
    # A missing value equals null: ``header.x == null`` is true without such a header.
    if left is _ABSENT or right is _ABSENT:
        return (left is _ABSENT or left is None) and (right is _ABSENT or right is None)
    pair = _comparable(left, right)
    if pair is not None:
        return bool(pair[0] == pair[1])
    if left is None or right is None:
        return left is right
    return type(left) is type(right) and bool(left == right)  # whole lists and objects of JSON


def _ordered(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(left: Any, right: Any) -> bool:
        pair = _comparable(left, right)
        return pair is not None and bool(test(*pair))

    return compare


def _contains(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return any(_equal(each, right) for each in left)
    if isinstance(left, dict):
        return isinstance(right, str) and right in left
    whole, part = _text(left), _text(right)
    return whole is not None and part is not None and part in whole


def _starts(left: Any, right: Any) -> bool:
    whole, part = _text(left), _text(right)
    return whole is not None and part is not None and whole.startswith(part)


def _ends(left: Any, right: Any) -> bool:
    whole, part = _text(left), _text(right)
    return whole is not None and part is not None and whole.endswith(part)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": _equal,
    "!=": lambda left, right: not _equal(left, right),
    "<": _ordered(lambda left, right: left < right),
    "<=": _ordered(lambda left, right: left <= right),
    ">": _ordered(lambda left, right: left > right),
    ">=": _ordered(lambda left, right: left >= right),
    "contains": _contains,
    "startswith": _starts,
    "endswith": _ends,
}

_FIELDS: dict[str, _Value] = {
    "key": lambda row: row.record.key,
    "value": lambda row: row.record.value,
    "offset": lambda row: row.record.offset,
    "partition": lambda row: row.record.partition,
    "timestamp": lambda row: row.record.timestamp,
    "topic": lambda row: row.record.topic,
}
_CONSTANTS = {"true": True, "false": False, "null": None}

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    | (?P<number>-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?)
    | (?P<string>"(\\.|[^"\\])*"|'(\\.|[^'\\])*')
    | (?P<regex>/(\\.|[^/\\])+/[a-z]*)
    | (?P<path>\$key\b|\$)
    | (?P<word>[A-Za-z_][A-Za-z0-9_-]*)
    | (?P<symbol>==|!=|<=|>=|=~|!~|&&|\|\||[<>()\[\],.!])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            hint = "; equal is ==" if text[at] == "=" else ""
            raise WhereError(f"{text[at]!r} is not understood{hint}", text, at)
        if match.lastgroup != "space":
            found.append(_Token(str(match.lastgroup), match[0], at))
        at = match.end()
    return found


def _unquote(text: str) -> str:
    def replaced(match: re.Match[str]) -> str:
        body = match[1]
        if len(body) > 1:
            return chr(int(body[1:], 16))
        return _ESCAPES.get(body, body)

    return _ESCAPE.sub(replaced, text[1:-1])


class _Parser:
    """A recursive-descent parser: or, and, not, comparison, value.

    Each method of the grammar consumes its tokens and returns a function of a row.
    """

    def __init__(self, text: str, now_ms: int | None) -> None:
        if len(text) > LENGTH_MAX:
            raise WhereError(f"longer than {LENGTH_MAX} characters", text, LENGTH_MAX)
        self.text = text
        self.now_ms = now_ms
        self.tokens = _tokens(text)
        self.at = 0
        self.depth = 0

    def parse(self) -> _Value:
        if not self.tokens:
            raise WhereError("there is nothing", self.text, 0)
        test = self.either()
        if self.at < len(self.tokens):
            raise self.fault(f"{self.tokens[self.at].text!r} is too much")
        return test

    # ---- the tokens ----

    def fault(self, reason: str, *, back: int = 0) -> WhereError:
        at = self.at - back
        position = self.tokens[at].position if at < len(self.tokens) else len(self.text)
        return WhereError(reason, self.text, position)

    def peek(self) -> _Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else _Token("end", "", 0)

    def take(self, *texts: str) -> str | None:
        """Consume the next token and return its text, if it is one of `texts`; else None."""
        token = self.peek()
        if token.text in texts and token.kind in ("word", "symbol"):
            self.at += 1
            return token.text
        return None

    def expect(self, text: str) -> None:
        if self.take(text) is None:
            found = self.peek().text
            raise self.fault(f"{text!r} is missing" + (f" before {found!r}" if found else ""))

    # ---- the grammar ----

    def either(self) -> _Value:
        tests = [self.both()]
        while self.take("or", "||"):
            tests.append(self.both())
        return tests[0] if len(tests) == 1 else lambda row: any(test(row) for test in tests)

    def both(self) -> _Value:
        tests = [self.negated()]
        while self.take("and", "&&"):
            tests.append(self.negated())
        return tests[0] if len(tests) == 1 else lambda row: all(test(row) for test in tests)

    def negated(self) -> _Value:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise self.fault(f"more than {DEPTH_MAX} levels")
        try:
            if self.take("not", "!"):
                test = self.negated()
                return lambda row: not test(row)
            return self.comparison()
        finally:
            self.depth -= 1

    def comparison(self) -> _Value:
        if self.take("("):
            inner = self.either()
            self.expect(")")
            return inner
        first = self.at
        left = self.value()
        is_time = self.tokens[first].text == "timestamp"
        matching = self.take("=~", "!~")
        if matching:
            return self.match(left, wanted=matching == "=~")
        if self.take("in"):
            return self.member(left, is_time=is_time)
        operator = self.take(*_OPERATORS)
        if operator is None:
            # A value alone is true if it exists and is neither null nor false.
            return lambda row: left(row) not in (None, False, _ABSENT)
        right = self.moment() if is_time else self.value()
        compare = _OPERATORS[operator]
        return lambda row: compare(left(row), right(row))

    def match(self, left: _Value, *, wanted: bool) -> _Value:
        token = self.peek()
        if token.kind not in ("regex", "string"):
            raise self.fault("a /regular expression/ is missing")
        self.at += 1
        pattern, flags = _unquote(token.text), ""
        if token.kind == "regex":
            body, _, flags = token.text[1:].rpartition("/")
            pattern = body.replace("\\/", "/")
        if set(flags) - set("ims"):
            raise self.fault(f"flags {flags!r}: known are i, m and s", back=1)
        try:
            search = re.compile(f"(?{flags}:{pattern})" if flags else pattern).search
        except (re.error, RecursionError, OverflowError) as error:
            raise self.fault(f"this is no regular expression ({error})", back=1) from None

        def test(row: _Row) -> bool:
            found = _text(left(row))
            return (found is not None and search(found) is not None) is wanted

        return test

    def member(self, left: _Value, *, is_time: bool) -> _Value:
        self.expect("[")
        wanted = []
        while not self.take("]"):
            wanted.append(self.moment() if is_time else self.value())
            if self.take("]"):
                break
            self.expect(",")

        def test(row: _Row) -> bool:
            value = left(row)
            return any(_equal(value, each(row)) for each in wanted)

        return test

    def moment(self) -> _Value:
        """Return the value that a timestamp is compared with; a string is parsed as a time."""
        token = self.peek()
        if token.kind != "string":
            return self.value()
        self.at += 1
        try:
            when = parse_time(_unquote(token.text), self.now_ms)
        except ValueError as error:
            raise self.fault(str(error), back=1) from None
        return lambda row: when

    def value(self) -> _Value:
        token = self.peek()
        self.at += 1
        if token.kind == "number":
            plain = token.text.lstrip("-").isdigit()
            number = int(token.text) if plain else float(token.text)
            return lambda row: number
        if token.kind == "string":
            text = _unquote(token.text)
            return lambda row: text
        if token.kind == "path":
            return self.path(of_key=token.text == "$key")
        if token.kind == "word":
            if token.text in _CONSTANTS:
                constant = _CONSTANTS[token.text]
                return lambda row: constant
            if token.text in _FIELDS:
                return _FIELDS[token.text]
            if token.text in ("header", "headers"):
                return self.header()
            if token.text in ("length", "len"):
                return self.length()
        self.at -= 1
        if token.kind == "end":
            raise self.fault("a value is missing")
        known = ", ".join((*_FIELDS, "header.NAME", "$.path", "length(...)"))
        raise self.fault(f"{token.text!r} is no field or value; known are {known}")

    def header(self) -> _Value:
        if self.take("["):
            token = self.peek()
            if token.kind != "string":
                raise self.fault("the name of a header in quotes is missing")
            self.at += 1
            self.expect("]")
            name = _unquote(token.text)
        else:
            self.expect(".")
            token = self.peek()
            if token.kind not in ("word", "number"):
                raise self.fault("the name of a header is missing")
            self.at += 1
            name = token.text

        # A record may have several headers of a name: the last one counts, as in Kafka.
        def last(row: _Row) -> Any:
            for each, value in reversed(row.record.headers):
                if each == name:
                    return value
            return _ABSENT

        return last

    def length(self) -> _Value:
        self.expect("(")
        inner = self.value()
        self.expect(")")

        def size(row: _Row) -> int:
            value = inner(row)
            return len(value) if isinstance(value, bytes | str | list | dict) else -1

        return size

    def path(self, *, of_key: bool) -> _Value:
        steps: list[str | int] = []
        while True:
            if self.take("."):
                token = self.peek()
                if token.kind != "word":
                    raise self.fault("a name is missing after the dot")
                self.at += 1
                steps.append(token.text)
            elif self.take("["):
                token = self.peek()
                if token.kind == "string":
                    steps.append(_unquote(token.text))
                elif token.kind == "number" and re.fullmatch(r"-?[0-9]+", token.text):
                    steps.append(int(token.text))
                else:
                    raise self.fault("a number or a name in quotes is missing")
                self.at += 1
                self.expect("]")
            else:
                break

        def found(row: _Row) -> Any:
            return _follow(row.key_json if of_key else row.value_json, steps)

        return found


def _follow(value: Any, steps: Sequence[str | int]) -> Any:
    for step in steps:
        if isinstance(value, dict):
            value = value.get(step, _ABSENT) if isinstance(step, str) else _ABSENT
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step] if -len(value) <= step < len(value) else _ABSENT
        else:
            return _ABSENT
    return value
