"""Spark's own Kafka source and sink read and write the listener as logstore's data source does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .kafka import KafkaUnavailableError, spark_jar_directory

pytestmark = [pytest.mark.interop, pytest.mark.campaign, pytest.mark.slow]

pytest.importorskip("pyspark")

ROOT = Path(__file__).resolve().parents[2]


def test_sparks_source_and_sink(tmp_path: Path) -> None:
    try:
        jars = sorted(map(str, spark_jar_directory().glob("*.jar")))
    except KafkaUnavailableError as error:
        pytest.skip(f"no Kafka source of Spark: {error}")
    paths = [str(ROOT), str(ROOT / "spark_connector"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.interop.spark_kafka", str(tmp_path), *jars],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert done.stdout.splitlines() == [
        "batch everything 304",
        "batch committed 301",
        "batch by offset 166",
        "batch by time 159",
        "batch more tasks 304",
        "batch a lost start 304",
        "stream everything 304",
        "stream committed 301",
        "stream in parts 304",
        "sink batch 304",
        "sink stream 304",
    ]
