"""Every pipeline once, on a small store: replay, compact, verify, export, audit.

    python examples/pipelines.py [directory]

The same functions run on a cluster whose machines share the store's directory; as commands they are
``python -m pyspark_logstore.pipelines``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark_logstore import local_session, register
from pyspark_logstore.pipelines import audit, compact, export_parquet, replay, verify

import logstore
from logstore import Record

HOUR = 3_600_000
START = 1_700_000_000_000


def fill(path: Path) -> None:
    """Orders of three hours, and their payments, of which some never came."""
    with logstore.open(path, durability="os") as store:
        store.create_topic("orders", partitions=3).extend(
            Record(b"order %d" % n, key=b"%d" % n, timestamp=START + n * 3 * HOUR // 3000)
            for n in range(3000)
        )
        store.create_topic("payments").extend(
            Record(b"paid", key=b"%d" % n, timestamp=START + n * 3 * HOUR // 3000 + 40 * (n % 97))
            for n in range(3000)
            if n % 500
        )


def louder(frame: DataFrame) -> DataFrame:
    """What a recomputation may do."""
    return frame.withColumn("value", f.upper(f.col("value").cast("string")))


def main(place: Path) -> None:
    store = place / "store"
    fill(store)
    spark = local_session(spark__sql__shuffle__partitions="4", spark__log__level="ERROR")
    register(spark)
    try:
        last_hour = START + 2 * HOUR
        print(replay(spark, store, "orders", "orders.louder", start=last_hour, transform=louder))
        print(compact(spark, store, "orders", "orders.newest"))
        print(export_parquet(spark, store, place / "lake", ["orders", "payments"], by="hour"))
        print(export_parquet(spark, store, place / "lake", ["orders", "payments"], by="hour"))
        print(audit(spark, store, ["orders", "payments"], place / "audit"))
        print(verify(spark, store))
    finally:
        spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="pipelines-")))
