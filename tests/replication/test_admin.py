"""Admin, with a tree and no controller: the test writes what a controller would write."""

from __future__ import annotations

import threading

from logstore.replication.embedded import EmbeddedTree
from logstore.replication.hosting.observer import Observer
from logstore.replication.machines.image import Registration, broker_path, state_path
from logstore.replication.machines.leader_and_isr import LeaderAndIsr
from logstore.replication.metadata import Create, Op, Set
from tests.kit import wait_until

KEY = "orders", 0
EARLY = LeaderAndIsr(version=0, leader=1, leader_epoch=0, leader_broker_epoch=0, isr=(1, 2))


def test_a_topic_is_created_when_its_partitions_have_the_minimum_of_its_settings() -> None:
    tree = EmbeddedTree(None)
    with Observer(tree.session()) as observer:

        def write(*ops: Op) -> None:
            written = threading.Event()
            observer.commit(ops, lambda outcome: written.set())
            assert written.wait(10)

        write(*(Create(broker_path(node), Registration(node, 0).encode()) for node in (1, 2)))
        created = threading.Event()
        thread = threading.Thread(
            target=lambda: (
                observer.change(
                    lambda admin, done: admin.create_topic(
                        "orders", 1, 2, done, config={"min.insync.replicas": 2}
                    )
                ),
                created.set(),
            )
        )
        thread.start()
        wait_until(lambda: "orders" in observer.image.topics)
        # A controller that sees the topic before its settings.
        write(Create(state_path(KEY), EARLY.encode()))
        assert observer.wait(lambda image: KEY in image.states, 10)
        assert not created.wait(0.2)
        write(Set(state_path(KEY), EARLY.with_minimum(2).encode(), 0))
        assert created.wait(10)
        thread.join()
    tree.close()
