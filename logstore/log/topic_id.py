"""Topic ids: the uuid of a topic, in the partition.metadata file of each of its partitions.

The file is Kafka's, byte for byte: a broker that reads the directory finds its topic by the id.
"""

from __future__ import annotations

import base64
import re
import uuid

from logstore.errors import NotALogError
from logstore.files.directory import Directory

__all__ = ["read_topic_id", "topic_id_text"]


PARTITION_METADATA = "partition.metadata"


def uuid_text(number: uuid.UUID) -> str:
    """Return Kafka's text of an id: URL-safe base64 of the 16 bytes, without padding."""
    return base64.urlsafe_b64encode(number.bytes).rstrip(b"=").decode()


def parse_uuid(text: str) -> uuid.UUID:
    """Return the id that `uuid_text` wrote; raise ValueError for any other text."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{22}", text):
        raise ValueError(f"{text!r} is not an id: 22 characters of base64")
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))


def new_uuid() -> uuid.UUID:
    """Return a random id.  As in Kafka, its text never starts with a dash."""
    while uuid_text(number := uuid.uuid4()).startswith("-"):
        pass
    return number


def read_topic_id(directory: Directory) -> uuid.UUID | None:
    """Return the topic id of a partition directory, or None if it has no such file.

    Raise NotALogError if the file cannot be parsed.
    """
    try:
        text = directory.read(PARTITION_METADATA, 4096).decode("utf-8", "replace")
    except FileNotFoundError:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    # As in Kafka, a later version is accepted, and an id of zeros is not.
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
    """Return the contents of the file: two lines, no newline after the second, as in Kafka."""
    return f"version: 0\ntopic_id: {uuid_text(number)}".encode()
