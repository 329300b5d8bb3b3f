"""Topic patterns: Java's regular expressions, as far as Python's mean the same.

``subscribePattern`` is written for Spark's Kafka source, so it is a Java pattern.  What differs in
spelling only is translated; what Python reads differently, or not at all, is refused by name.
"""

from __future__ import annotations

import re

__all__ = ["java_pattern"]

# \d, \w and friends mean ASCII in Java, hence re.ASCII below.
SAME_ESCAPES = frozenset("dDwWsSbBAtnrf123456789xu")
GROUPS = re.compile(r"\(\?(?:[:=!>]|<[=!]|<[A-Za-z][A-Za-z0-9]*>)")


def java_pattern(text: str) -> re.Pattern[str]:
    """Compile a Java pattern.  Raises ValueError for syntax that Python reads differently."""
    parts = []
    at, in_class = 0, False
    while at < len(text):
        letter = text[at]
        if text.startswith("\\Q", at):
            end = text.find("\\E", at)
            end = len(text) if end < 0 else end
            parts.append(re.escape(text[at + 2 : end]))
            at = end + 2
            continue
        if letter == "\\":
            following = text[at + 1 : at + 2]
            if not following:
                raise ValueError("it ends in a backslash")
            if following == "k" and text.startswith("<", at + 2):
                end = text.find(">", at)
                parts.append(f"(?P={text[at + 3 : end]})")
                at = end + 1
                continue
            if following.isalnum() and following not in SAME_ESCAPES:
                raise ValueError(f"\\{following} does not mean the same in Python")
            parts.append(letter + following)
            at += 2
            continue
        if in_class:
            if letter == "[" or text.startswith("&&", at):
                raise ValueError("a character class inside another, or &&, is Java's alone")
            in_class = letter != "]" or text[at - 1] in "[^"
        elif letter == "[":
            in_class = True
        elif text.startswith("(?", at):
            group = GROUPS.match(text, at)
            flags = re.match(r"\(\?[ims]+\)", text) if at == 0 else None
            found = group or flags
            if found is None:
                raise ValueError(f"the group at {text[at : at + 6]!r} is Java's alone")
            named = group is not None and group[0].endswith(">") and group[0] != "(?>"
            parts.append(found[0].replace("(?<", "(?P<") if named else found[0])
            at += len(found[0])
            continue
        parts.append(letter)
        at += 1
    try:
        return re.compile("".join(parts), re.ASCII)
    except re.error as error:
        raise ValueError(str(error)) from None
