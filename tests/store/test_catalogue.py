"""Catalogue: the file is the JSON document of all entries, although only changes are encoded."""

from __future__ import annotations

import errno
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from logstore.files.directory import Directory
from logstore.root.catalogue import Catalogue, TopicEntry
from logstore.testing import Fault, inject_io

ENTRIES = {
    "plain": TopicEntry(uuid.UUID(int=1), 3),
    "A.configured_one": TopicEntry(uuid.UUID(int=2), 1, {"retention.ms": 5, "cleanup.policy": "x"}),
    "on-demand": TopicEntry(uuid.UUID(int=3), 50, made=(2, 7)),
    "unmade": TopicEntry(uuid.UUID(int=4), 50, made=()),
    "growing": TopicEntry(uuid.UUID(int=5), 4, creating_from=2),
}


def document(entries: dict[str, TopicEntry], deleted: tuple[str, ...] = ()) -> bytes:
    content: dict[str, Any] = {
        "version": 1,
        "topics": {name: entries[name].as_json() for name in sorted(entries)},
    }
    if deleted:
        content["deleted"] = list(deleted)
    return json.dumps(content, indent=1).encode() + b"\n"


def test_every_change_leaves_the_document_of_all_entries(tmp_path: Path) -> None:
    catalogue, file = Catalogue(Directory(tmp_path), {}), tmp_path / Catalogue.NAME
    expected: dict[str, TopicEntry] = {}
    for name, entry in [*ENTRIES.items(), ("plain", TopicEntry(uuid.UUID(int=6), 9))]:
        catalogue.put(name, entry)
        expected[name] = entry
        assert file.read_bytes() == document(expected)
    gone = TopicEntry(uuid.UUID(int=2), 1, deleting=True)
    catalogue.begin_deletion("A.configured_one", gone, noted=True)
    catalogue.begin_deletion("plain", expected["plain"], noted=True)
    expected["A.configured_one"] = gone
    assert file.read_bytes() == document(expected, ("A.configured_one", "plain"))
    for name in list(expected):
        catalogue.remove(name)
        del expected[name]
        assert file.read_bytes() == document(expected, ("A.configured_one", "plain"))
    catalogue.forget_deleted(["plain", "A.configured_one"])
    assert file.read_bytes() == document({})


def test_a_change_that_failed_is_not_in_the_next_document(tmp_path: Path) -> None:
    catalogue = Catalogue(Directory(tmp_path), {})
    catalogue.put("plain", ENTRIES["plain"])
    with inject_io(Fault.fail(errno.EIO, "rename")), pytest.raises(OSError):
        catalogue.put("plain", TopicEntry(uuid.UUID(int=9), 7))
    catalogue.put("unmade", ENTRIES["unmade"])
    expected = {"plain": ENTRIES["plain"], "unmade": ENTRIES["unmade"]}
    assert (tmp_path / Catalogue.NAME).read_bytes() == document(expected)
