# %% [markdown]
# # From a log to a plot
#
# A notebook in a file: run it as it is, or cell by cell in an editor that knows `# %%`.
#
#     pip install ".[spark]" matplotlib
#     python examples/log_to_plot.py [plot.png]
#
# A shop writes orders to a topic. Spark reads the segments straight from disk, a stream keeps
# totals per minute in another topic, exactly once, and a plot shows both.

# %%
from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

from pyspark.sql import functions as f
from pyspark_logstore import local_session, register

import logstore

place = Path(tempfile.mkdtemp(prefix="log_to_plot-"))
store_path = place / "store"

# %% [markdown]
# ## The log: two hours of orders, more of them towards the end

# %%
COUNTRIES = ("DE", "FR", "IT", "PL")
START = 1_700_000_000_000
random.seed(7)
with logstore.open(store_path, durability="os") as store:
    orders = store.create_topic("orders", partitions=4)
    when = START
    while when < START + 7_200_000:
        when += random.randrange(1, 200 - int(150 * (when - START) / 7_200_000))
        country = random.choice(COUNTRIES)
        body = {"country": country, "amount": round(random.lognormvariate(3, 1), 2)}
        orders.append(json.dumps(body).encode(), key=country.encode(), timestamp=when)
    print(sum(partition.end_offset for partition in orders), "orders in", store_path)

# %% [markdown]
# ## A DataFrame of it

# %%
spark = local_session(spark__sql__session__timeZone="UTC", spark__sql__shuffle__partitions="4",
                      spark__log__level="ERROR")  # fmt: skip
register(spark)
SHAPE = "country string, amount double"
frame = (
    spark.read.format("logstore").option("path", str(store_path)).option("subscribe", "orders")
    .load()
    .select("timestamp", f.from_json(f.col("value").cast("string"), SHAPE).alias("order"))
    .select("timestamp", "order.*")
)  # fmt: skip
frame.groupBy("country").agg(f.count("*").alias("orders"), f.sum("amount").alias("total")).show()

# %% [markdown]
# ## A stream: totals per minute, into another topic

# %%
stream = (
    spark.readStream.format("logstore").option("path", str(store_path))
    .option("subscribe", "orders").option("startingOffsets", "earliest")
    .load()
    .select("timestamp", f.from_json(f.col("value").cast("string"), SHAPE).alias("order"))
    .withWatermark("timestamp", "5 minutes")
    .groupBy(f.window("timestamp", "1 minute"))
    .agg(f.count("*").alias("orders"), f.sum("order.amount").alias("total"))
    .select(
        f.col("window.start").cast("string").alias("key"),
        f.to_json(f.struct("orders", "total")).alias("value"),
        f.col("window.start").alias("timestamp"),
    )
)  # fmt: skip
query = (
    stream.writeStream.format("logstore").outputMode("append").trigger(availableNow=True)
    .option("path", str(store_path)).option("topic", "totals")
    .option("checkpointLocation", str(place / "checkpoint"))
    .start()
)  # fmt: skip
query.awaitTermination()

# %% [markdown]
# ## The plot

# %%
with logstore.open(store_path, readonly=True) as store:
    minutes = [
        (record.timestamp, json.loads(record.value or b"{}"))
        for partition in store["totals"]
        for record in partition.scan(isolation="read_committed")
    ]
minutes.sort(key=lambda minute: minute[0])
print(len(minutes), "minutes;", sum(minute["orders"] for _, minute in minutes), "orders in them")
spark.stop()

try:
    import matplotlib
except ImportError:
    print("no plot without matplotlib: pip install matplotlib")
else:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    target = Path(sys.argv[1]) if len(sys.argv) > 1 else place / "orders.png"
    figure, axes = pyplot.subplots(figsize=(9, 4))
    axes.plot([(t - START) / 60_000 for t, _ in minutes], [m["orders"] for _, m in minutes])
    axes.set_xlabel("minutes")
    axes.set_ylabel("orders per minute")
    axes.set_title("orders, counted by a stream from log to log")
    figure.savefig(target, dpi=120)
    print(target)
