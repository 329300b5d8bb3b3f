"""Codec: Kafka's messages from bytes to dicts and back.

A pair of functions for each message and version is generated from its schema when it is first
used, compiled and kept.  The generator reads the schema table only, never bytes of a peer.

A decoded message is a dict with the schema's field names.  A field that the version does not have
has its default.  `records` is a memoryview of the frame; every other value is a copy.  An encoder
takes the same dict; a field that is missing has its default.  A piece of a response that is not in
memory yet (records in a file) stays a hole: the encoder notes where it belongs.

Bounds, so that a hostile frame costs no more than its own bytes: every length is compared with the
end of the frame; an array has at most as many elements as the bytes left can hold, and a frame has
at most ELEMENTS_MAX of them in all; the nesting is the schema's.  A decoder raises one of
MALFORMED, and its caller closes the connection.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from logstore.kafka.protocol.schema import Field, Message, message

__all__ = [
    "ELEMENTS_MAX",
    "MALFORMED",
    "Decode",
    "Encode",
    "Hole",
    "MalformedFrameError",
    "decoder",
    "encoder",
    "read_uvarint",
    "uvarint",
]

ELEMENTS_MAX = 200_000


class MalformedFrameError(Exception):
    """The bytes are no message of this schema."""


# What a decoder raises for bytes that are no message.
MALFORMED = (MalformedFrameError, IndexError, struct.error, UnicodeDecodeError)


class Hole(Protocol):
    """Bytes of a response that are read when they are sent."""

    size_bytes: int


# (frame, position, end of the frame) -> (message, position after it)
Decode: TypeAlias = "Callable[[memoryview, int, int], tuple[dict[str, Any], int]]"
# (message, bytes so far, holes so far: (position in the bytes, hole))
Encode: TypeAlias = "Callable[[dict[str, Any], bytearray, list[tuple[int, Hole]]], None]"

# Fixed-width types: the letter of `struct`, the width, the zero.
_FIXED: dict[str, tuple[str, int, object]] = {
    "bool": ("?", 1, False),
    "int8": ("b", 1, 0),
    "int16": ("h", 2, 0),
    "uint16": ("H", 2, 0),
    "int32": ("i", 4, 0),
    "uint32": ("I", 4, 0),
    "int64": ("q", 8, 0),
    "float64": ("d", 8, 0.0),
    "uuid": ("16s", 16, b"\0" * 16),
}


def read_uvarint(frame: memoryview, at: int) -> tuple[int, int]:
    """Return an unsigned varint below 2^31 and the position after it."""
    number = shift = 0
    while True:
        byte = frame[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            if number > 0x7FFFFFFF:
                raise MalformedFrameError("a varint above 2^31 - 1")
            return number, at
        shift += 7
        if shift > 28:
            raise MalformedFrameError("a varint of more than five bytes")


def uvarint(number: int) -> bytes:
    """Encode an unsigned varint."""
    if number < 0x80:
        return bytes((number,))
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@functools.cache
def decoder(key: int, kind: str, version: int) -> Decode:
    """Return the decoder of a message."""
    schema = message(key, kind)
    source = _Decoder(schema, version).source()
    made: Decode = _compiled(source, f"{schema.name} {kind} v{version} decoder")["decode"]
    return made


@functools.cache
def encoder(key: int, kind: str, version: int) -> Encode:
    """Return the encoder of a message."""
    schema = message(key, kind)
    source = _Encoder(schema, version).source()
    made: Encode = _compiled(source, f"{schema.name} {kind} v{version} encoder")["encode"]
    return made


def _compiled(source: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {
        "Malformed": MalformedFrameError,
        "ELEMENTS_MAX": ELEMENTS_MAX,
        "read_uvarint": read_uvarint,
        "uvarint": uvarint,
        "S": struct.Struct,
    }
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return namespace


def default_of(field: Field, version: int) -> Any:
    """Return what a message has where the field is not sent."""
    if field.default == "null":
        return None
    if field.array:
        return []
    if field.type in _FIXED:
        if field.default in (None, ""):
            return _FIXED[field.type][2]
        if field.type == "bool":
            return field.default == "true"
        return int(str(field.default), 0)
    if field.type == "string":
        return field.default or ""
    if field.type in ("bytes", "records"):
        return b""
    return {each.name: default_of(each, version) for each in field.fields}


class _Generator:
    """Lines of a function, with blocks and names of their own."""

    def __init__(self, schema: Message, version: int) -> None:
        self.schema = schema
        self.version = version
        self.flexible = version in schema.flexible
        self.lines: list[str] = []
        self.layouts: dict[str, str] = {}  # of struct: name by format
        self.depth = 1
        self.names = 0

    def put(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, of: str) -> str:
        self.names += 1
        return f"{of}{self.names}"

    def layout(self, letters: str) -> str:
        return self.layouts.setdefault(letters, f"layout{len(self.layouts)}")

    def untagged(self, fields: tuple[Field, ...]) -> list[Field]:
        """Fields of this version that are sent in their place."""
        return [
            each
            for each in fields
            if self.version in each.versions and self.version not in each.tagged
        ]

    def tagged(self, fields: tuple[Field, ...]) -> list[Field]:
        """Fields of this version that are sent with a tag, by tag."""
        found = [
            each for each in fields if self.version in each.versions and self.version in each.tagged
        ]
        return sorted(found, key=lambda each: each.tag)

    def least(self, field: Field) -> int:
        """The fewest bytes of one element of an array of this type."""
        if field.type in _FIXED:
            return _FIXED[field.type][1]
        if not field.fields:
            return 1 if self.flexible else 2 if field.type == "string" else 4
        total = 1 if self.flexible else 0
        for each in self.untagged(field.fields):
            total += (1 if self.flexible else 4) if each.array else self.least(each)
        return max(1, total)

    def head(self) -> list[str]:
        return [f"{name} = S('>{letters}').{self.method}" for letters, name in self.layouts.items()]

    method = ""


class _Decoder(_Generator):
    """Generates ``decode(frame, at, end)``."""

    method = "unpack_from"

    def source(self) -> str:
        self.put("budget = ELEMENTS_MAX")
        made = self.struct(self.schema.fields, "end")
        self.put(f"return {made}, at")
        return "\n".join([*self.head(), "def decode(frame, at, end):", *self.lines, ""])

    def struct(self, fields: tuple[Field, ...], end: str) -> str:
        """Decode a struct; return the expression of its dict."""
        names = {each.name: repr(default_of(each, self.version)) for each in fields}
        run: list[tuple[Field, str]] = []
        for each in self.untagged(fields):
            if each.type in _FIXED and not each.array:
                names[each.name] = variable = self.name("v")
                run.append((each, variable))
            else:
                self.fixed(run, end)
                names[each.name] = self.value(each, end)
        self.fixed(run, end)
        if self.flexible:
            self.tags(fields, names, end)
        return "{" + ", ".join(f"{name!r}: {code}" for name, code in names.items()) + "}"

    def fixed(self, run: list[tuple[Field, str]], end: str) -> None:
        """Unpack fields of fixed width that follow each other with one call."""
        if not run:
            return
        letters = "".join(_FIXED[field.type][0] for field, _ in run)
        width = sum(_FIXED[field.type][1] for field, _ in run)
        targets = ", ".join(variable for _, variable in run)
        self.put(f"if at + {width} > {end}: raise Malformed('cut off')")
        self.put(f"{targets}, = {self.layout(letters)}(frame, at)")
        self.put(f"at += {width}")
        run.clear()

    def length(self, field: Field, variable: str, wide: bool, end: str) -> None:
        """Read a length or count; -1 is null."""
        if self.flexible:
            self.put(f"{variable} = frame[at]; at += 1")
            self.put(f"if {variable} > 127: {variable}, at = read_uvarint(frame, at - 1)")
            self.put(f"{variable} -= 1")
        else:
            letters, width = ("i", 4) if wide else ("h", 2)
            self.put(f"if at + {width} > {end}: raise Malformed('cut off')")
            self.put(f"{variable}, = {self.layout(letters)}(frame, at); at += {width}")
        if self.version not in field.nullable:
            self.put(f"if {variable} < 0: raise Malformed('{field.name} is null')")
        elif not self.flexible:
            self.put(f"if {variable} < -1: raise Malformed('{field.name} has a negative length')")

    def value(self, field: Field, end: str) -> str:
        """Decode an array, a string, bytes or a struct; return the variable."""
        variable = self.name("v")
        if not field.array and field.fields:
            self.nullable_struct(field, variable, end)
            return variable
        count = self.name("n")
        self.length(field, count, field.array or field.type != "string", end)
        nullable = self.version in field.nullable
        if nullable:
            self.put(f"if {count} < 0: {variable} = None")
            self.put("else:")
            self.depth += 1
        if field.array:
            self.array(field, variable, count, end)
        else:
            self.put(f"if {count} > {end} - at: raise Malformed('{field.name} is cut off')")
            cut = f"frame[at:at + {count}]"
            kind = {"string": f"str({cut}, 'utf-8')", "records": cut}.get(
                field.type, f"bytes({cut})"
            )
            self.put(f"{variable} = {kind}; at += {count}")
        if nullable:
            self.depth -= 1
        return variable

    def nullable_struct(self, field: Field, variable: str, end: str) -> None:
        if self.version not in field.nullable:
            self.put(f"{variable} = {self.struct(field.fields, end)}")
            return
        self.put(f"if at >= {end}: raise Malformed('cut off')")
        self.put("at += 1")
        self.put("if frame[at - 1] == 255:")
        self.put(f"    {variable} = None")
        self.put("else:")
        self.depth += 1
        self.put(f"{variable} = {self.struct(field.fields, end)}")
        self.depth -= 1

    def array(self, field: Field, variable: str, count: str, end: str) -> None:
        least = self.least(field)
        self.put(f"if {count} * {least} > {end} - at: raise Malformed('{field.name} is cut off')")
        self.put(f"budget -= {count}")
        self.put("if budget < 0: raise Malformed('more than %d elements' % ELEMENTS_MAX)")
        if field.type in _FIXED:
            letter, width, _ = _FIXED[field.type]
            one = letter.lstrip("0123456789")
            if len(letter) == 1:
                self.put(f"{variable} = list(S('>%d{one}' % {count}).unpack_from(frame, at))")
            else:  # uuids
                place = self.name("i")
                self.put(
                    f"{variable} = [bytes(frame[{place}:{place} + {width}]) "
                    f"for {place} in range(at, at + {count} * {width}, {width})]"
                )
            self.put(f"at += {count} * {width}")
            return
        self.put(f"{variable} = []")
        self.put(f"for _ in range({count}):")
        self.depth += 1
        if field.fields:
            self.put(f"{variable}.append({self.struct(field.fields, end)})")
        else:
            element = field._replace(array=False, nullable=field.nullable._replace(first=1, last=0))
            self.put(f"{variable}.append({self.value(element, end)})")
        self.depth -= 1

    def tags(self, fields: tuple[Field, ...], names: dict[str, str], end: str) -> None:
        """Decode the tagged fields at the end of a struct; skip the tags that are not known."""
        known = self.tagged(fields)
        for each in known:
            variable = self.name("v")
            self.put(f"{variable} = {names[each.name]}")
            names[each.name] = variable
        count, last, tag, size, stop = (self.name(of) for of in ("n", "last", "tag", "size", "end"))
        self.put(f"{count} = frame[at]; at += 1")
        self.put(f"if {count} > 127: {count}, at = read_uvarint(frame, at - 1)")
        self.put(f"if {count}:")
        self.depth += 1
        self.put(f"if {count} > {end} - at: raise Malformed('tagged fields are cut off')")
        self.put(f"{last} = -1")
        self.put(f"for _ in range({count}):")
        self.depth += 1
        self.put(f"{tag}, at = read_uvarint(frame, at)")
        self.put(f"{size}, at = read_uvarint(frame, at)")
        self.put(f"{stop} = at + {size}")
        self.put(f"if {stop} > {end} or {tag} <= {last}: raise Malformed('bad tagged field')")
        self.put(f"{last} = {tag}")
        for number, each in enumerate(known):
            self.put(f"{'elif' if number else 'if'} {tag} == {each.tag}:")
            self.depth += 1
            if each.type in _FIXED and not each.array:
                self.fixed([(each, names[each.name])], stop)
            else:
                self.put(f"{names[each.name]} = {self.value(each, stop)}")
            self.put(f"if at != {stop}: raise Malformed('a tagged field has another size')")
            self.depth -= 1
        self.put(f"at = {stop}")
        self.depth -= 2


class _Encoder(_Generator):
    """Generates ``encode(message, out, holes)``."""

    method = "pack"

    def source(self) -> str:
        self.struct(self.schema.fields, "message", "out")
        return "\n".join([*self.head(), "def encode(message, out, holes):", *self.lines, ""])

    def struct(self, fields: tuple[Field, ...], given: str, out: str) -> None:
        get = self.name("get")
        self.put(f"{get} = {given}.get")
        run: list[str] = []
        letters = ""
        for each in self.untagged(fields):
            taken = f"{get}({each.name!r}, {default_of(each, self.version)!r})"
            if each.type in _FIXED and not each.array:
                run.append(taken)
                letters += _FIXED[each.type][0]
                continue
            if run:
                self.put(f"{out} += {self.layout(letters)}({', '.join(run)})")
                run, letters = [], ""
            self.value(each, taken, out)
        if run:
            self.put(f"{out} += {self.layout(letters)}({', '.join(run)})")
        if self.flexible:
            self.tags(fields, given, out)

    def length(self, expression: str, wide: bool, out: str) -> None:
        if not self.flexible:
            self.put(f"{out} += {self.layout('i' if wide else 'h')}({expression})")
        elif expression == "-1":
            self.put(f"{out}.append(0)")
        else:
            number = self.name("n")
            self.put(f"{number} = {expression} + 1")
            self.put(f"if {number} < 128: {out}.append({number})")
            self.put(f"else: {out} += uvarint({number})")

    def value(self, field: Field, taken: str, out: str) -> None:
        variable = self.name("v")
        self.put(f"{variable} = {taken}")
        if not field.array and field.fields:
            self.nullable_struct(field, variable, out)
            return
        if self.version in field.nullable:
            self.put(f"if {variable} is None:")
            self.depth += 1
            self.length("-1", field.array or field.type != "string", out)
            self.depth -= 1
            self.put("else:")
            self.depth += 1
        if field.array:
            self.array(field, variable, out)
        elif field.type == "string":
            self.put(f"{variable} = {variable}.encode()")
            self.length(f"len({variable})", False, out)
            self.put(f"{out} += {variable}")
        elif field.type == "bytes":
            self.length(f"len({variable})", True, out)
            self.put(f"{out} += {variable}")
        else:
            self.records(variable, out)
        if self.version in field.nullable:
            self.depth -= 1

    def records(self, variable: str, out: str) -> None:
        self.put(f"if hasattr({variable}, 'size_bytes'):")
        self.depth += 1
        self.length(f"{variable}.size_bytes", True, out)
        self.put(f"holes.append((len({out}), {variable}))")
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        self.length(f"len({variable})", True, out)
        self.put(f"{out} += {variable}")
        self.depth -= 1

    def nullable_struct(self, field: Field, variable: str, out: str) -> None:
        if self.version not in field.nullable:
            self.struct(field.fields, variable, out)
            return
        self.put(f"if {variable} is None:")
        self.put(f"    {out} += b'\\xff'")
        self.put("else:")
        self.depth += 1
        self.put(f"{out} += b'\\x01'")
        self.struct(field.fields, variable, out)
        self.depth -= 1

    def array(self, field: Field, variable: str, out: str) -> None:
        self.length(f"len({variable})", True, out)
        if field.type in _FIXED:
            letter = _FIXED[field.type][0]
            if len(letter) == 1:
                self.put(f"{out} += S('>%d{letter}' % len({variable})).pack(*{variable})")
            else:
                self.put(f"{out} += b''.join({variable})")
            return
        each = self.name("each")
        self.put(f"for {each} in {variable}:")
        self.depth += 1
        if field.fields:
            self.struct(field.fields, each, out)
        else:
            element = field._replace(array=False, nullable=field.nullable._replace(first=1, last=0))
            self.value(element, each, out)
        self.depth -= 1

    def tags(self, fields: tuple[Field, ...], given: str, out: str) -> None:
        """Encode the tagged fields that differ from their default."""
        known = self.tagged(fields)
        if not known:
            self.put(f"{out}.append(0)")
            return
        pieces = self.name("pieces")
        self.put(f"{pieces} = []")
        for each in known:
            default = repr(default_of(each, self.version))
            variable, piece = self.name("v"), self.name("piece")
            self.put(f"if {each.name!r} in {given} and {given}[{each.name!r}] != {default}:")
            self.depth += 1
            self.put(f"{variable} = {given}[{each.name!r}]")
            self.put(f"{piece} = bytearray()")
            if each.type in _FIXED and not each.array:
                self.put(f"{piece} += {self.layout(_FIXED[each.type][0])}({variable})")
            else:
                self.value(each, variable, piece)
            self.put(f"{pieces}.append(uvarint({each.tag}) + uvarint(len({piece})) + {piece})")
            self.depth -= 1
        self.put(f"if {pieces}: {out} += uvarint(len({pieces})) + b''.join({pieces})")
        self.put(f"else: {out}.append(0)")
