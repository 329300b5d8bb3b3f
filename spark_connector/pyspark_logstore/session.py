"""A local Spark session, and checks that this machine can run one.

Spark's errors for a missing Java or an old pyspark are unclear.  The checks here run before Spark
and name the remedy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_spark", "java_version", "local_session"]

SPARK_MIN = (4, 0)
JAVA_MIN = 17
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
# Rows come from Python over a socket: one of this machine costs a fifth less than TCP's.
LOCAL_SOCKET = "spark.python.unix.domain.socket.enabled"  # since Spark 4.1


def check_spark() -> None:
    """Raise ImportError with the remedy where pyspark is missing or has no Python data sources."""
    try:
        from pyspark import __version__ as version
    except ImportError:
        raise ImportError(
            'pyspark_logstore needs pyspark: pip install "logstore-engine[spark]"', name="pyspark"
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < SPARK_MIN:
        raise ImportError(
            f"pyspark_logstore needs Spark 4.0 or newer, and this is {version}: "
            f'pip install --upgrade "pyspark>=4.0"',
            name="pyspark",
        )


def java_version() -> int | None:
    """The major version of the Java that Spark would start; None without one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        return None
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True
        ).stderr
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else None


def local_session(threads: int | str = "*", **settings: str) -> SparkSession:
    """A session on this machine: tasks use this Python, filters are pushed down, there is no UI.

    Rows come from Python through Unix sockets.
    `settings` are Spark's, with ``__`` for the dots: ``spark__driver__memory="2g"``.
    Raises RuntimeError when there is no Java that Spark can run on.
    """
    check_spark()
    found = java_version()
    if found is None or found < JAVA_MIN:
        what = "no Java was found" if found is None else f"this is Java {found}"
        raise RuntimeError(
            f"Spark needs Java {JAVA_MIN} or newer, and {what}: install one "
            f"(apt-get install openjdk-{JAVA_MIN}-jre-headless) or point JAVA_HOME at it"
        )
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = (
        SparkSession.builder.master(f"local[{threads}]")
        .appName("logstore")
        .config("spark.ui.enabled", "false")
        .config(PUSH_DOWN, "true")
        .config(LOCAL_SOCKET, "true")
    )
    for name, value in settings.items():
        builder = builder.config(name.replace("__", "."), value)
    return builder.getOrCreate()
