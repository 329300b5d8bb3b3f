"""The examples run as they stand, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark_logstore import java_version

ROOT = Path(__file__).resolve().parent.parent.parent


def run(example: str, *arguments: object) -> str:
    if (java_version() or 0) < 17:
        pytest.skip("Spark needs Java 17 or newer")
    path = os.pathsep.join([str(ROOT / "spark_connector"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_from_a_log_to_a_plot(tmp_path: Path) -> None:
    said = run("log_to_plot.py", tmp_path / "plot.png")
    assert "minutes;" in said
    assert "no plot without matplotlib" in said or (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_all_pipelines(tmp_path: Path) -> None:
    said = run("pipelines.py", tmp_path)
    assert "1000 records of orders into orders.louder" in said
    assert "5 keys of orders missing" in said or "6 keys of orders missing" in said
    assert "all sound" in said
    assert (tmp_path / "audit" / "audit.html").exists()
