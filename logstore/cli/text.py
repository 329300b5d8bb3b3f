"""Text for a terminal: sizes, times, and data with its control characters escaped.

A key may hold escape sequences that clear the screen, rename the window or type input.  So all text
from a log, a file name or an error is passed through `printable` before it is printed.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["bytes_text", "json_text", "printable", "size_text", "span_text"]

# C0 and C1 controls, invisible characters, changes of the text direction, surrogates, line and
# paragraph separators.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff]"
)
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escaped(match: re.Match[str]) -> str:
    letter = match[0]
    named = _NAMED.get(letter)
    if named is not None:
        return named
    number = ord(letter)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def printable(text: object) -> str:
    r"""Return the text with every character that a terminal would act on escaped.

    >>> printable("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNSAFE.sub(_escaped, str(text))


def bytes_text(data: bytes | None) -> str:
    r"""Return bytes as readable text: UTF-8 where valid, other bytes escaped.

    >>> bytes_text(b"caf\xc3\xa9 \xff")
    'café \\xff'
    """
    return "null" if data is None else printable(data.decode("utf-8", "backslashreplace"))


def _json_escaped(match: re.Match[str]) -> str:
    number = ord(match[0])
    if number < 0x10000:
        return f"\\u{number:04x}"
    number -= 0x10000
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""Return JSON with non-ASCII letters unchanged and terminal controls escaped.

    >>> json_text({"a": "é\x9b"})
    '{"a":"é\\u009b"}'
    """
    import json  # not at start-up: --help does not need it

    if indent is None:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return _UNSAFE.sub(_json_escaped, text)
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    return "\n".join(_UNSAFE.sub(_json_escaped, line) for line in lines)


def size_text(size_bytes: int) -> str:
    """Return a number of bytes with a unit.

    >>> size_text(1536), size_text(12)
    ('1.5 KiB', '12 B')
    """
    size = float(size_bytes)
    if abs(size) < 1024:
        return f"{size_bytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kmgt])(i?)b?|b)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a size in bytes: KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB of 1000.

    >>> parse_size("1.5MiB"), parse_size("10MB"), parse_size("64k")
    (1572864, 10000000, 64000)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a size: write 4096, 64KiB, 1.5GiB, 10MB")
    power = " kmgt".index((found[2] or " ").lower())
    unit: int = (1024 if found[3] else 1000) ** power
    return round(float(found[1]) * unit)


def span_text(span_ms: int) -> str:
    """Return a span of time in its two largest units.

    >>> span_text(93_784_000), span_text(1500), span_text(20)
    ('1d 2h', '1.5s', '20ms')
    """
    if span_ms < 0:
        return f"-{span_text(-span_ms)}"
    if span_ms < 1000:
        return f"{span_ms}ms"
    if span_ms < 60_000:
        return f"{span_ms / 1000:g}s"
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        count, span_ms = divmod(span_ms, size)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)
