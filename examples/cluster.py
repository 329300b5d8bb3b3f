"""Three nodes on one machine: one is killed, and nothing that was acknowledged is lost.

    python examples/cluster.py directory host:port          (a ZooKeeper)

Needs `pip install "logstore-engine[cli,zookeeper]" confluent-kafka`.  Without a ZooKeeper the same
works in one process: `logstore.Cluster`, see examples/three_nodes.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition

COMMAND = [sys.executable, "-m", "logstore"]


def start(path: Path, number: int, zookeeper: str) -> tuple[subprocess.Popen[str], str]:
    """Start a node; return its process and its address."""
    options = ["--node", str(number), "--zookeeper", zookeeper, "--listen", "127.0.0.1:0"]
    # A dead node is noticed after this time.  The default is 6000.
    options += ["-c", "zookeeper.session.timeout.ms=2000"]
    process = subprocess.Popen(
        [*COMMAND, "serve", "-s", str(path / f"node-{number}"), *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["listeners"]["PLAINTEXT"]


def cluster(zookeeper: str, *arguments: str) -> list[dict[str, object]]:
    """Run `logstore cluster`; return the rows that it prints."""
    line = [*COMMAND, "cluster", *arguments, "--zookeeper", zookeeper, "-o", "jsonl"]
    ended = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(row) for row in ended.stdout.splitlines()]


def main(directory: str, zookeeper: str) -> None:
    nodes = {number: start(Path(directory), number, zookeeper) for number in (1, 2, 3)}
    servers = ",".join(address for _, address in nodes.values())
    try:
        cluster(zookeeper, "create", "orders", "-r", "3", "-c", "min.insync.replicas=2")
        acknowledged = []
        producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})

        def delivered(error: object, message: object) -> None:
            assert error is None, error
            acknowledged.append(message)

        for number in range(2000):
            producer.produce("orders", b"order %d" % number, on_delivery=delivered)
            producer.poll(0)
            if number == 1000:
                producer.flush()
                leader = int(str(cluster(zookeeper, "partitions", "orders")[0]["leader"]))
                nodes[leader][0].kill()
                print(f"node {leader} led, and was killed")
        began = time.monotonic()
        producer.flush()
        print(
            f"{len(acknowledged)} acknowledged; the fail-over took {time.monotonic() - began:.1f} s"
        )

        consumer = Consumer({"bootstrap.servers": servers, "group.id": "example"})
        consumer.assign([TopicPartition("orders", 0, 0)])
        found: set[bytes] = set()
        while len(found) < 2000:
            found |= {message.value() for message in consumer.consume(500, 5)}
        consumer.close()
        print(f"{len(found)} read: nothing lost")
    finally:
        for process, _ in nodes.values():
            process.terminate()
            process.wait()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("skipped: name a directory and a ZooKeeper, host:port[/chroot]")
    main(sys.argv[1], sys.argv[2])
