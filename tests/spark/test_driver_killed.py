"""kill -9 of the driver in mid-batch: from its checkpoint, nothing is lost and nothing is twice.

The driver is a process of its own with its own JVM; it is killed with everything it started, at
moments that differ from run to run, and started again on the same checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

from pyspark_logstore import java_version

import logstore
from logstore import Store

CONNECTOR = Path(__file__).resolve().parent.parent.parent / "spark_connector"

DRIVER = """
import sys
from pyspark_logstore import local_session, register
store, checkpoint = sys.argv[1:]
spark = local_session(2, spark__log__level="ERROR", spark__sql__shuffle__partitions="2")
register(spark)
frame = (spark.readStream.format("logstore").option("path", store).option("subscribe", "source")
         .option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "4000").load())
query = (frame.drop("topic").writeStream.format("logstore").option("path", store)
         .option("topic", "copy").option("partitions", "2")
         .option("checkpointLocation", checkpoint).trigger(availableNow=True).start())
print("started", flush=True)
query.awaitTermination()
print("done", flush=True)
"""


def run_driver(store: Path, checkpoint: Path, *, kill_after: int | None) -> bool:
    """Run it, killed when so many records are copied; whether it came to its end."""
    known = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CONNECTOR), known]),
                   "PYSPARK_PYTHON": sys.executable}  # fmt: skip
    environment.pop("PYSPARK_GATEWAY_PORT", None)
    environment.pop("PYSPARK_GATEWAY_SECRET", None)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(store), str(checkpoint)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # killed as a group: driver, JVM and workers
    ) as driver:
        with logstore.open(store, readonly=True) as reader:
            while kill_after is not None and driver.poll() is None:
                if copied(reader) >= kill_after:  # appended, but perhaps not committed yet
                    os.killpg(driver.pid, signal.SIGKILL)
                    break
                time.sleep(0.005)
        assert driver.stdout is not None
        said = driver.stdout.read().decode()
    if kill_after is None:
        assert "done" in said
    return "done" in said


def copied(store: Store) -> int:
    if "copy" not in store:
        return 0
    return sum(partition.end_offset for partition in store["copy"])


@pytest.mark.parametrize(
    ("records", "kills"),
    [
        pytest.param(8000, (3000,), id="once"),  # two micro-batches; killed when one is there
        pytest.param(20_000, tuple(range(1, 20_000, 1250)), marks=pytest.mark.slow, id="campaign"),
    ],
)
def test_a_killed_driver_goes_on_where_it_was(
    tmp_path: Path, records: int, kills: tuple[int, ...]
) -> None:
    if (java_version() or 0) < 17:
        pytest.skip("Spark needs Java 17 or newer")
    root = tmp_path / "store"
    with logstore.open(root, durability="os") as store:
        source = store.create_topic("source", partitions=2)
        for number in range(2):
            with source[number].writer() as out:
                for n in range(number, records, 2):
                    out.append(b"%d" % n, key=b"%d" % (n % 1000))
    killed = sum(not run_driver(root, tmp_path / "c", kill_after=at) for at in kills)
    assert killed > 0
    run_driver(root, tmp_path / "c", kill_after=None)
    with logstore.open(root) as store:
        for isolation in ("read_committed", "read_uncommitted"):
            values = [r.value for log in store["copy"] for r in log.scan(isolation=isolation)]
            assert len(values) == records, isolation
            assert sorted(int(value or b"") for value in values) == list(range(records))
        # A narrow query keeps the order of each partition.
        for old, new in zip(store["source"], store["copy"], strict=True):
            assert [r.value for r in new] == [r.value for r in old]
        store.check()
