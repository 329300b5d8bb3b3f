"""Spark's view of logstore: ``spark.read.format("logstore")``, batch and stream.

Spark looks for packages named ``pyspark_*`` with a ``DefaultSource`` and registers it by its name,
so that no call is needed after ``pip install "logstore-engine[spark]"``.  A package that is not on
``sys.path`` as a directory (an editable install) is not seen by that search: call `register`.

Everything here is pickled, sent to another process and used there.  So classes hold plain values
only, and what takes long to import is imported where it is used.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import TYPE_CHECKING

from pyspark_logstore.session import check_spark, java_version, local_session

check_spark()

from pyspark_logstore.source import LogstoreDataSource  # noqa: E402  after the check

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DefaultSource", "LogstoreDataSource", "java_version", "local_session", "register"]

DefaultSource = LogstoreDataSource  # the name Spark looks for


def _compare_pythons(spark: SparkSession) -> None:
    # A classic session has the command of its workers; Spark Connect does not expose it.
    command = getattr(getattr(spark, "_sc", None), "pythonExec", None)
    found = shutil.which(command) if command else None
    # Compare directories: bin/python and bin/python3 are one, a venv and its base are two.
    if found and os.path.dirname(found) != os.path.dirname(sys.executable):
        warnings.warn(
            f"Spark's workers run {found}, this process runs {sys.executable}: if the workers fail "
            "with ModuleNotFoundError for pyspark_logstore, set the environment variable "
            f"PYSPARK_PYTHON={sys.executable} before the session is made",
            stacklevel=3,
        )


def register(spark: SparkSession) -> None:
    """Make ``format("logstore")`` known to a session that did not find it by itself.

    Warns if Spark's workers run a Python of another installation: this package must be there too.
    """
    from pyspark.errors import AnalysisException

    _compare_pythons(spark)
    try:
        spark.dataSource.register(LogstoreDataSource)
    except AnalysisException as error:
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):  # then it did
            raise
