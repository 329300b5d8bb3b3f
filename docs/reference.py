"""Writes docs/reference.md: every public name of logstore, from its signature and docstring.

python docs/reference.py            writes the page
python docs/reference.py --check    exits with 1 when the page is not what would be written
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import logstore
import logstore.testing

PAGE = Path(__file__).with_name("reference.md")

# What belongs together, in the order in which a reader meets it; the rest follows by name.
CHAPTERS = {
    "Stores and topics": ["open", "open_member", "Store", "Topic", "Position", "TopicDescription",
                          "PartitionDescription", "StoreRecovery"],
    "Partitions": ["Partition", "Writer", "Scan", "Record", "Columns", "BytesColumn", "Segment",
                   "Skipped", "LocatedBatch", "PartitionConfig"],
    "Producers and transactions": ["Producer", "AsyncProducer", "Transaction"],
    "Consumers and groups": ["Consumer", "AsyncConsumer"],
    "Clusters": ["Cluster", "ClusterTopic", "ClusterPartition", "Reassignment", "ClusterStatus",
                 "NodeStatus", "PartitionStatus", "NodeConfig", "Node"],
    "Forgetting": ["RetentionPolicy", "RetentionDecision", "Compactor", "CompactionReport",
                   "CompactedSegment", "Maintenance", "MaintenanceReport", "MaintenanceAct",
                   "MaintenanceFault"],
    "Recovery and checking": ["RecoveryReport", "TornTail", "Damage", "DiscardedSnapshot"],
    "Time": ["Clock", "SystemClock", "ManualClock", "GuardedClock"],
}  # fmt: skip


def anchor(name: str) -> str:
    return name.lower()


def signature_of(thing: Any, *, bound: bool) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    parameters = list(signature.parameters.values())
    if bound and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    # Annotations are long and the docstring says what matters: names, order and defaults.
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<factory>|<[^<>]* object at 0x[0-9a-f]+>", "...", text)


def documentation(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return "" if text.startswith("Initialize self") else text


def members_of(cls: type) -> list[tuple[str, Any]]:
    """What a class says of itself, in the order of its definition; then what its bases say."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] != "logstore":
            continue
        for name, member in vars(base).items():
            if not name.startswith("_") or name in ("__getitem__", "__iter__", "__len__"):
                found.setdefault(name, member)
    return list(found.items())


def describe_member(name: str, member: Any) -> str | None:
    kind = type(member).__name__
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if isinstance(member, property) or kind in ("getset_descriptor", "member_descriptor"):
        text = documentation(member)
        return f"**`{name}`**\n: {flat(text)}\n" if text else None
    if not callable(member) or isinstance(member, type):
        return None
    text = documentation(member)
    if not text:
        return None
    shown = {"__getitem__": "self[...]", "__iter__": "iter(self)", "__len__": "len(self)"}
    head = shown.get(name) or f"{name}{signature_of(member, bound=True)}"
    return f"**`{head}`**\n: {flat(text)}\n"


def flat(text: str) -> str:
    """A docstring as the body of a definition: paragraphs are kept, indented."""
    return "\n  ".join(line.rstrip() for line in text.splitlines()).rstrip()


def describe(name: str, thing: Any) -> str:
    lines = [f"### {name}", ""]
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
        return "\n".join([*lines, f"An error; also {bases}.", "", documentation(thing), ""])
    if inspect.isclass(thing):
        if dataclasses.is_dataclass(thing) or issubclass(thing, tuple):
            names = getattr(thing, "_fields", None) or [
                field.name for field in dataclasses.fields(thing)
            ]
            lines += [f"`{name}({', '.join(names)})`", ""]
        elif issubclass(thing, enum.Enum):
            lines += [", ".join(f"`{member.name}`" for member in thing), ""]
        elif "__init__" in vars(thing):
            lines += [f"`{name}{signature_of(thing.__init__, bound=True)}`", ""]
        lines += [documentation(thing), ""]
        for member_name, member in members_of(thing):
            text = describe_member(member_name, member)
            if text is not None:
                lines.append(text)
        return "\n".join(lines)
    if callable(thing):
        lines += [f"`{name}{signature_of(thing, bound=False)}`", ""]
    return "\n".join([*lines, documentation(thing), ""])


def page() -> str:
    names = {name: getattr(logstore, name) for name in logstore.__all__}
    errors = sorted(
        name
        for name, thing in names.items()
        if inspect.isclass(thing) and issubclass(thing, BaseException)
    )
    chapters = {
        title: [name for name in wanted if name in names] for title, wanted in CHAPTERS.items()
    }
    told = {name for wanted in chapters.values() for name in wanted} | set(errors)
    chapters["Further names"] = sorted(set(names) - told)
    chapters["Errors"] = errors
    parts = [
        "# Reference",
        "",
        "Every public name, as its docstring tells it. Written by `python docs/reference.py`.",
        "",
    ]
    for title, wanted in chapters.items():
        if wanted:
            links = ", ".join(f"[{name}](#{anchor(name)})" for name in wanted)
            parts += [f"- {title}: {links}"]
    parts.append("")
    for title, wanted in chapters.items():
        if wanted:
            parts += [f"## {title}", ""]
            parts += [describe(name, names[name]) for name in wanted]
    testing = sorted(logstore.testing.__all__)
    parts += ["## logstore.testing", "", documentation(logstore.testing), ""]
    parts += [describe(name, getattr(logstore.testing, name)) for name in testing]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv:
        return PAGE.read_text(encoding="utf-8") != text
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
