"""Kafka Streams on the listener: words are counted exactly once, through a restart."""

from __future__ import annotations

import contextlib
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Store
from logstore.kafka.server import KafkaServer

pytest.importorskip("kafka")

from tests.kafka.clients import wait_until

from .kafka import KafkaUnavailableError, streams_jar_directory
from .tools import JVM

pytestmark = [pytest.mark.interop, pytest.mark.campaign, pytest.mark.slow]

SOURCE = Path(__file__).parent / "java" / "WordCount.java"


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run the application; end it and see that it closed well."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
        output, _ = process.communicate(timeout=60)
        assert output.split() == ["true", "NOT_RUNNING"]
    finally:
        process.kill()
        process.communicate()


def test_words_are_counted_exactly_once(store: Store, tmp_path: Path) -> None:
    try:
        jars = f"{streams_jar_directory()}/*"
        subprocess.run(["javac", "-cp", jars, "-d", tmp_path, SOURCE], check=True, timeout=120)
    except (KafkaUnavailableError, FileNotFoundError) as error:
        pytest.skip(f"no Kafka Streams: {error}")
    store.create_topic("lines", partitions=2)
    store.create_topic("counts")
    expected: Counter[str] = Counter()

    def write(first: int) -> None:
        for number in range(first, first + 200):
            line = f"word{number % 7} word{number % 3} all"
            expected.update(line.split())
            store["lines"][number % 2].append(line.encode())

    def counted() -> dict[str, list[int]]:
        """Return the counts of each word, in the order in which they were committed."""
        found: dict[str, list[int]] = {}
        with logstore.Consumer(store, "counts", isolation="read_committed", timeout=0) as reader:
            for record in reader:
                assert record.key is not None and record.value is not None
                found.setdefault(record.key.decode(), []).extend(struct.unpack(">q", record.value))
        return found

    def is_counted() -> bool:
        return {word: rows[-1] for word, rows in counted().items()} == expected

    with KafkaServer(store) as server:
        command = ["java", *JVM, "-cp", f"{tmp_path}:{jars}", "WordCount"]
        for run in range(2):  # the second has its state from the changelog topic
            write(200 * run)
            with running([*command, server.bootstrap_servers, str(tmp_path / f"state {run}")]):
                wait_until(is_counted, f"{counted()} is not {expected}", timeout=60)
    for word, rows in counted().items():
        assert rows == sorted(set(rows)), f"{word} was counted twice"
