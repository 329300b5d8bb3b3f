"""What a machine needs for Spark, and the error if it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

import pyspark
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark_logstore import java_version, local_session, register
from pyspark_logstore.session import check_spark


def fake_java(directory: Path, version: str) -> Path:
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\n")
    java.chmod(0o755)
    return directory


@pytest.mark.parametrize(("said", "major"), [("17.0.15", 17), ("1.8.0_402", 8), ("21", 21)])
def test_the_java_that_spark_would_start_is_asked(
    said: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, said)))
    assert java_version() == major


def test_a_missing_java_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeError, match=r"no Java was found: install one .*JAVA_HOME"):
        local_session()


def test_an_old_java_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, "11.0.2")))
    with pytest.raises(RuntimeError, match=r"Java 17 or newer, and this is Java 11"):
        local_session()


def test_an_old_spark_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.4")
    with pytest.raises(ImportError, match=r"Spark 4.0 or newer, and this is 3.5.4: pip install"):
        check_spark()


def test_the_source_registers_itself_by_its_name(spark: SparkSession) -> None:
    """No register() was called: Spark found the package by its name."""
    with pytest.raises(PySparkException) as caught:
        spark.read.format("logstore").load()
    assert caught.value.getCondition() != "DATA_SOURCE_NOT_FOUND"


def test_registering_what_spark_found_by_itself_does_no_harm(spark: SparkSession) -> None:
    register(spark)
    register(spark)
    with pytest.raises(PySparkException, match="option path: is missing"):
        spark.read.format("logstore").load()
