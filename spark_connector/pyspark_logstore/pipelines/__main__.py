"""``python -m pyspark_logstore.pipelines``: every pipeline as a command.

Progress is printed on stderr, the report on stdout, as text or with --json.  The exit code is 0 if
the report has no problem, 1 if it has one, 2 if the job failed.  Under spark-submit the session is
that of the cluster; otherwise it is a local one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException

from logstore import LogStoreError
from pyspark_logstore.commits import SinkError
from pyspark_logstore.pipelines.audit import audit
from pyspark_logstore.pipelines.compact import compact
from pyspark_logstore.pipelines.export import GRAINS, export_parquet
from pyspark_logstore.pipelines.finish import finish
from pyspark_logstore.pipelines.replay import replay
from pyspark_logstore.pipelines.reports import PipelineError, Progress, Report
from pyspark_logstore.pipelines.verify import verify

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m pyspark_logstore.pipelines",
                                  description="Jobs over a logstore with Spark.")  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about)
        made.add_argument("store", help="directory of the store")
        made.add_argument("--json", action="store_true", help="the report as JSON")
        made.add_argument("--quiet", action="store_true", help="no progress")
        made.add_argument("--threads", default="*", help="on this machine (default: all)")
        return made

    export = command("export", "Add what is new in topics to partitioned Parquet, exactly once.")
    export.add_argument("target", help="directory of the Parquet files")
    export.add_argument("topics", nargs="+")
    export.add_argument("--by", choices=list(GRAINS), default="day")
    export.add_argument("--decode", action="store_true", help="keys and values as text")
    export.add_argument("--compression", default="zstd")
    export.add_argument("--allow-loss", action="store_true",
                        help="go on where retention was faster than the export")  # fmt: skip

    again = command("replay", "Write a range of time of a topic to another topic.")
    again.add_argument("topic")
    again.add_argument("to")
    again.add_argument("--start", help="ms since 1970, ISO-8601 with a zone, or -10m")
    again.add_argument("--end")
    again.add_argument("--target", help="another store (default: the same)")
    again.add_argument("--name", help="a replay of the same name is done once")
    again.add_argument("--transform", metavar="MODULE:FUNCTION",
                       help="from DataFrame to DataFrame")  # fmt: skip

    check = command("verify", "Read every record and say what is wrong.")
    check.add_argument("topics", nargs="*")

    audited = command("audit", "Counts, delays, missing and duplicate keys: tables and a page.")
    audited.add_argument("out", help="directory of the tables and the page")
    audited.add_argument("topics", nargs="+", help="the first is the reference")
    audited.add_argument("--start")
    audited.add_argument("--end")

    clean = command("compact", "Write one record of every key of a topic to another topic.")
    clean.add_argument("topic")
    clean.add_argument("to")
    clean.add_argument("--keep", choices=["last", "first"], default="last")
    clean.add_argument("--by", choices=["key", "key,value"], default="key")
    clean.add_argument("--drop-tombstones", action="store_true")
    clean.add_argument("--target", help="another store (default: the same)")
    clean.add_argument("--name", help="a compaction of the same name is done once")

    ended = command("finish", "Finish commits of sinks that were cut short; no Spark needed.")
    ended.add_argument("--orphan-age", type=float, default=86_400.0, metavar="SECONDS")
    return top


def session(threads: str) -> SparkSession:
    """That of spark-submit, or one on this machine."""
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        from pyspark.sql import SparkSession

        from pyspark_logstore import register

        spark = SparkSession.builder.getOrCreate()
        register(spark)
        return spark
    from pyspark_logstore import local_session, register

    spark = local_session(threads, spark__log__level="ERROR")
    register(spark)
    return spark


def run(arguments: argparse.Namespace, progress: Progress) -> Report:
    """Do what was asked for."""
    if arguments.command == "finish":
        return finish(arguments.store, orphan_age=arguments.orphan_age, progress=progress)
    return JOBS[arguments.command](session(arguments.threads), arguments, progress)


def _export(spark: SparkSession, given: argparse.Namespace, progress: Progress) -> Report:
    return export_parquet(
        spark, given.store, given.target, given.topics, by=given.by, decode=given.decode,
        compression=given.compression, allow_loss=given.allow_loss, progress=progress,
    )  # fmt: skip


def _replay(spark: SparkSession, given: argparse.Namespace, progress: Progress) -> Report:
    transform = None if given.transform is None else _function(given.transform)
    return replay(
        spark, given.store, given.topic, given.to, start=given.start, end=given.end,
        target=given.target, name=given.name, transform=transform, progress=progress,
    )  # fmt: skip


def _verify(spark: SparkSession, given: argparse.Namespace, progress: Progress) -> Report:
    return verify(spark, given.store, given.topics or None, progress=progress)


def _audit(spark: SparkSession, given: argparse.Namespace, progress: Progress) -> Report:
    return audit(
        spark, given.store, given.topics, given.out, start=given.start, end=given.end,
        progress=progress,
    )  # fmt: skip


def _compact(spark: SparkSession, given: argparse.Namespace, progress: Progress) -> Report:
    return compact(
        spark, given.store, given.topic, given.to, keep=given.keep, by=given.by,
        drop_tombstones=given.drop_tombstones, target=given.target, name=given.name,
        progress=progress,
    )  # fmt: skip


JOBS: dict[str, Callable[[Any, argparse.Namespace, Progress], Report]] = {
    "export": _export,
    "replay": _replay,
    "verify": _verify,
    "audit": _audit,
    "compact": _compact,
}


def _function(text: str) -> Callable[[Any], Any]:
    module, _, name = text.partition(":")
    try:
        found: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PipelineError(
            f"--transform must be MODULE:FUNCTION, not {text!r}: {error}"
        ) from error
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    given = parser().parse_args(arguments)
    begun = time.monotonic()

    def progress(line: str) -> None:
        if not given.quiet:
            print(f"{time.monotonic() - begun:7.1f} s  {line}", file=sys.stderr, flush=True)

    try:
        report = run(given, progress)
    except (PipelineError, SinkError, LogStoreError, FileNotFoundError, RuntimeError) as error:
        print(f"{given.command}: {error}", file=sys.stderr)
        return 2
    except PySparkException as error:
        print(f"{given.command}: Spark says: {error}", file=sys.stderr)
        return 2
    print(report.as_json() if given.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
