"""Kafka's checkpoint files in the root: one offset for every partition, as text."""

from __future__ import annotations

from collections.abc import Mapping

from logstore.files.directory import Directory
from logstore.log.state import log

__all__ = ["offsets_text", "parse_offsets", "read_offsets", "write_offsets"]


RECOVERY_POINTS = "recovery-point-offset-checkpoint"

START_OFFSETS = "log-start-offset-checkpoint"

HIGH_WATERMARKS = "replication-offset-checkpoint"

CLEANER_OFFSETS = "cleaner-offset-checkpoint"

CHECKPOINTS = (RECOVERY_POINTS, START_OFFSETS, HIGH_WATERMARKS, CLEANER_OFFSETS)

TopicPartition = tuple[str, int]


def read_offsets(directory: Directory, name: str) -> dict[TopicPartition, int]:
    """Return the offsets of a root checkpoint by (topic, partition).

    Return none if the file is missing or cannot be read: recovery then takes longer, and loses no
    record.
    """
    try:
        offsets = parse_offsets(directory.read(name, 1 << 26))
    except FileNotFoundError:
        return {}
    if isinstance(offsets, str):
        log.warning("%s cannot be read (%s): ignored", directory.path / name, offsets)
        return {}
    return offsets


def parse_offsets(content: bytes) -> dict[TopicPartition, int] | str:
    """Return the offsets in a root checkpoint, or the reason why it cannot be read."""
    try:
        lines = content.decode("utf-8").split("\n")
        if not any(line.strip() for line in lines[1:]):
            return {}
        rows = [line.split() for line in lines[2:] if line.strip()]
        offsets = {(topic, int(number)): int(offset) for topic, number, offset in rows}
        if (
            lines[0].strip() != "0"
            # A cut file has fewer rows than its count: none of it is used.
            or len(rows) != int(lines[1])
            or not all(0 <= offset < 1 << 63 for offset in offsets.values())
        ):
            return f"version {lines[0]!r}, {len(rows)} rows of {lines[1]!r}"
    except ValueError as error:
        return str(error)
    return offsets


def write_offsets(
    directory: Directory, name: str, offsets: Mapping[TopicPartition, int], *, sync: bool = True
) -> None:
    """Kafka's text form: version, count, ``topic partition offset`` lines; replaced atomically."""
    directory.replace(name, offsets_text(offsets), sync=sync)


def offsets_text(offsets: Mapping[TopicPartition, int]) -> bytes:
    """The contents of a root checkpoint."""
    rows = [f"{topic} {number} {offset}" for (topic, number), offset in sorted(offsets.items())]
    return ("\n".join(["0", str(len(rows)), *rows]) + "\n").encode()
