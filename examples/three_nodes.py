"""Three nodes: every record in three logs, and nothing is lost when nodes are killed.

    python examples/three_nodes.py [directory]

A thread appends orders all the time.  Each node is killed in turn, as if its process had died, and
started again.  At the end every order that was acknowledged is there, once, in all three logs.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

from logstore import Cluster, IndeterminateAppendError, LogStoreError

MAJORITY = {"min.insync.replicas": 2}  # an order is acknowledged when two nodes have it


def sell(cluster: Cluster, sold: list[bytes], over: threading.Event) -> None:
    """Append orders, and note those that were acknowledged."""
    orders = cluster["orders"]
    number = 0
    while not over.is_set():
        order = b"order %d" % number
        number += 1
        try:
            orders.append(order)
        except IndeterminateAppendError:
            continue  # the leader died: the order may be there or not, so it is not noted
        except LogStoreError as error:
            print("refused:", error)
            continue
        sold.append(order)


def main(path: Path) -> None:
    with Cluster(path, nodes=3, durability="os") as cluster:
        cluster.create_topic("orders", replication_factor=3, config=MAJORITY)
        sold: list[bytes] = []
        over = threading.Event()
        seller = threading.Thread(target=sell, args=(cluster, sold, over))
        seller.start()
        for node in (1, 2, 3):
            time.sleep(0.2)
            cluster.kill(node)
            time.sleep(0.2)
            print(f"node {node} is dead; node {cluster.partition('orders', 0).leader} leads")
            cluster.start(node)
            while len(cluster.partition("orders", 0).isr) < 3:
                time.sleep(0.01)
        over.set()
        seller.join()
        print(cluster.status())
        found = [record.value for record in cluster["orders"][0].scan()]
        lost = set(sold) - set(found)
        twice = len(found) - len(set(found))
        print(f"{len(sold)} orders acknowledged, {len(lost)} lost, {twice} twice")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory) / "data")
