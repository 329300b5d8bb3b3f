"""One Spark session for all tests here: starting a JVM takes seconds, a query a tenth of one.

Without pyspark or a Java it can run on, everything in this directory is skipped, with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.collected import Collected

CONNECTOR = Path(__file__).resolve().parent.parent.parent / "spark_connector"


def why_no_spark() -> str | None:
    """The reason why Spark cannot run here, or None."""
    pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')
    from pyspark_logstore import java_version

    found = java_version()
    if found is None or found < 17:
        return f"Spark needs Java 17 or newer; here is {'none' if found is None else found}"
    return None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    reason = why_no_spark()
    if reason is not None:
        pytest.skip(reason)
    from pyspark_logstore import local_session

    # The directory is on the path of every process Spark starts, as site-packages would be: it
    # finds the package there by its name.  The root is there for sources that are made in tests.
    known = os.environ.get("PYTHONPATH")
    paths = [str(CONNECTOR), str(CONNECTOR.parent), *([known] if known else [])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    scratch = tmp_path_factory.mktemp("spark")
    session = local_session(
        2,
        spark__sql__shuffle__partitions="2",
        spark__local__dir=str(scratch / "local"),
        spark__sql__warehouse__dir=str(scratch / "warehouse"),
        spark__driver__memory="1g",
        spark__sql__session__timeZone="UTC",
        spark__log__level="ERROR",
    )
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture
def collected(spark: SparkSession, tmp_path: Path) -> Collected:
    from tests.spark.collected import Collected

    return Collected(spark, tmp_path)


def rows_of(frame: Any) -> list[tuple[Any, ...]]:
    """Rows as plain tuples, bytes as bytes, in the order of topic, partition and offset."""
    rows = frame.orderBy("topic", "partition", "offset").collect()
    return [tuple(bytes(v) if isinstance(v, bytearray) else v for v in row) for row in rows]
