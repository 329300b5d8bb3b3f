"""Topic ids: the uuid of a topic, in the partition.metadata file of each of its partitions."""

from __future__ import annotations

import base64
import re
import uuid

from logstore.errors import NotALogError
from logstore.files.directory import Directory

__all__ = ["read_topic_id", "topic_id_text"]


PARTITION_METADATA = "partition.metadata"


def uuid_text(number: uuid.UUID) -> str:
    """Kafka's spelling: URL-safe base64 of the 16 bytes, without padding."""
    return base64.urlsafe_b64encode(number.bytes).rstrip(b"=").decode()


def parse_uuid(text: str) -> uuid.UUID:
    """The reverse of `uuid_text`; ValueError for anything else."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{22}", text):
        raise ValueError(f"{text!r} is not an id: 22 characters of base64")
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))


def new_uuid() -> uuid.UUID:
    """A random id; as in Kafka its text never starts with a dash."""
    while uuid_text(number := uuid.uuid4()).startswith("-"):
        pass
    return number


def read_topic_id(directory: Directory) -> uuid.UUID | None:
    """The id of the topic that a partition directory belongs to; None when it has none."""
    try:
        text = directory.read(PARTITION_METADATA, 4096).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    try:
        number = parse_uuid(fields["topic_id"].strip())
        if int(fields["version"]) < 0 or not number.int:
            raise ValueError("a version below 0, or an id of zeros")
    except (KeyError, ValueError) as error:
        raise NotALogError(
            f"{directory.path / PARTITION_METADATA} does not name a topic: {error}"
        ) from None
    return number


def topic_id_text(number: uuid.UUID) -> bytes:
    """Two lines, no newline behind the second: as a broker writes it."""
    return f"version: 0\ntopic_id: {uuid_text(number)}".encode()
