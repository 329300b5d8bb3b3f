"""`logstore export` and `import`: every format there and back."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import logstore
from logstore import Record
from tests.cli.conftest import NOON, Command

RECORDS = [
    Record(b"", key=b"", timestamp=NOON),
    Record(None, key=b"\xff\x00", timestamp=NOON + 1),
    Record("é,\"x\"\n;\r\n".encode(), headers=[("h", None), ("h", b"\x80"), ("ü", b"")],
           timestamp=NOON + 2),
    Record(b'{"a": 1}', key=b"k", timestamp=NOON + 3),
]  # fmt: skip


def fill(command: Command) -> None:
    with logstore.open(command.store) as store:
        topic = store.create_topic("a", 2)
        for number in (0, 1):
            topic.extend(RECORDS, partition=number)


def contents(command: Command, topic: str) -> list[list[Record]]:
    with logstore.open(command.store, readonly=True) as store:
        return [list(log) for log in store[topic]]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("condition", [(), ("--where", "timestamp >= 0")], ids=["all", "where"])
def test_nothing_is_lost(
    command: Command, tmp_path: Path, form: str, condition: tuple[str, ...]
) -> None:
    if form != "jsonl":
        pytest.importorskip("pyarrow")
    fill(command)
    path = tmp_path / f"out.{form}"
    done = command("export", "a", path, *condition)
    assert done.rows == [{"topic": "a", "file": str(path), "format": form, "records": 8}]
    command("topic", "create", "b", "-p", 2)
    command("import", "b", path, "--keep-partitions")
    for one, two in zip(contents(command, "a"), contents(command, "b"), strict=True):
        assert [(r.key, r.value, r.headers, r.timestamp) for r in one] == [
            (r.key, r.value, r.headers, r.timestamp) for r in two
        ]


def test_csv_is_for_spreadsheets(command: Command, tmp_path: Path) -> None:
    fill(command)
    path = tmp_path / "out.csv"
    command("export", "a", path, "-p", 0)
    command("topic", "create", "b")
    command("import", "b", path)
    ((*found,),) = contents(command, "b")
    assert [(r.key, r.value, r.headers, r.timestamp) for r in found[1:]] == [
        (r.key, r.value, r.headers, r.timestamp) for r in RECORDS[1:]
    ]
    assert found[0].key is None  # an empty cell stands for both None and b""


def test_a_stretch_and_a_condition(command: Command, tmp_path: Path) -> None:
    command.fill("a", count=10)
    path = tmp_path / "out.jsonl"
    command("export", "a", path, "--from", 2, "--to", 8, "--where", "$.n != 5")
    numbers = [json.loads(json.loads(line)["value"])["n"] for line in path.read_text().splitlines()]
    assert numbers == [2, 3, 4, 6, 7]


def test_a_file_is_complete_or_not_there(command: Command, tmp_path: Path) -> None:
    command.fill("a", count=5)
    path = tmp_path / "out.jsonl"
    path.write_text("precious")
    assert "--force" in command("export", "a", path, code=3).err
    assert path.read_text() == "precious"
    log = command.store / "a-0" / "00000000000000000000.log"
    content = bytearray(log.read_bytes())
    content[-3] ^= 1
    log.write_bytes(content)
    assert "00000000000000000000.log" in command("export", "a", path, "--force", code=4).err
    assert path.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["data", "out.jsonl"]


def test_stdin_and_stdout(command: Command) -> None:
    fill(command)
    out = command("export", "a", "-", "--format", "jsonl", "-p", 1).out
    assert len(out.splitlines()) == 4
    command("import", "--create", "b", "-", "--format", "jsonl", input=out)
    assert len(contents(command, "b")[0]) == 4


def test_a_bad_record_is_named_and_those_before_it_are_kept(
    command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"value":"1"}\n{"value":"2"}\nnonsense\n')
    command("topic", "create", "b")
    bad = command("import", "b", path, code=1)
    assert "not JSON" in bad.err
    assert "record 3; the 2 before it are in the log" in bad.err
    assert len(contents(command, "b")[0]) == 2
    (tmp_path / "in.csv").write_text("a,b\n1,2\n")
    assert "no column 'value'" in command("import", "b", tmp_path / "in.csv", code=1).err
    (tmp_path / "in.csv").write_text("key,value\n1,2,3\n")
    assert "more or fewer cells" in command("import", "b", tmp_path / "in.csv", code=1).err
    assert "which format" in command("import", "b", command.store / "meta.properties", code=1).err


def test_parquet_that_is_none(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    command("topic", "create", "b")
    for form in ("parquet", "arrow"):
        path = tmp_path / f"in.{form}"
        path.write_bytes(b"nonsense" * 10)
        command("import", "b", path, code=1)
    assert contents(command, "b") == [[]]
