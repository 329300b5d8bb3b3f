"""From a log to frames: Arrow, pandas, polars and DuckDB on the same bytes, no object per record.

pip install ".[arrow,pandas]" polars duckdb        (what is missing is left out)
python examples/frames.py [directory]
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

import logstore

RECORDS = 50_000


def there(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        print(f"{name}: not installed, left out")
        return False
    return True


def run(directory: Path) -> None:
    luck = random.Random(11)
    with logstore.open(directory, durability="os") as store:
        log = store.create_topic("sales", exist_ok=True)[0]
        with log.writer(compression="zstd") as out:
            for number in range(RECORDS):
                shop = b"shop-%d" % luck.randrange(5)
                out.append(
                    b"%d" % luck.randrange(1000), key=shop, timestamp=1_767_225_600_000 + number
                )

        # numpy, straight from the decoder: one chunk after the other, memory stays flat.
        size = sum(
            int(chunk.values.lengths.sum()) for chunk in log.scan().columns(fields=["value"])
        )
        print(f"numpy: {size} bytes of values in {RECORDS} records")

        if not there("pyarrow"):
            return
        import pyarrow.compute as pc

        table = log.scan().to_arrow(fields=["offset", "key", "value"])
        amount = pc.cast(pc.cast(table["value"], "string"), "int64")
        shop = pc.cast(table["key"], "string")
        table = table.append_column("amount", amount).append_column("shop", shop)
        total = int(np.asarray(amount).sum())
        print(f"arrow: {table.num_rows} rows, total {total}")

        if there("pandas"):
            frame = table.select(["shop", "amount"]).to_pandas()
            best = frame.groupby("shop")["amount"].sum()
            print(f"pandas: {best.idxmax()} sold {best.max()}")
            assert best.sum() == total
        if there("polars"):
            import polars as pl

            grouped = pl.DataFrame(table.select(["shop", "amount"])).group_by("shop")
            sums = grouped.agg(pl.col("amount").sum()).sort("amount")
            print(f"polars: {sums['shop'][-1]} sold {sums['amount'][-1]}")
            assert sums["amount"].sum() == total
        if there("duckdb"):
            import duckdb

            query = "select shop, sum(amount) as sold from t group by shop order by sold"
            with duckdb.connect() as database:
                database.register("t", table.select(["shop", "amount"]))
                rows = database.execute(query).fetchall()
            print(f"duckdb: {rows[-1][0]} sold {rows[-1][1]}")
            assert sum(row[1] for row in rows) == total


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        run(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
