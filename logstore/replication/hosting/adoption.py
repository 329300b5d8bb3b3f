"""Adoption: the topics of a store that was alone until now become topics of a new cluster.

The first node of a new metadata tree writes its topics into the tree, in the commit that names the
cluster.  Without that, the tree would have none of them, and the node would set them aside.

Each partition gets a state without a leader, with the leader epoch that its log has begun: the
controller elects this node with a higher one.
"""

from __future__ import annotations

from logstore.errors import NotALogError
from logstore.log.topic_id import uuid_text
from logstore.replication.machines.assignment import Assignment
from logstore.replication.machines.image import (
    TopicImage,
    as_json,
    config_path,
    state_path,
    topic_path,
)
from logstore.replication.machines.leader_and_isr import NO_LEADER, LeaderAndIsr
from logstore.replication.metadata import Create, Op
from logstore.store.store import Store

__all__ = ["adopted"]


def adopted(store: Store, me: int) -> list[Op]:
    """Return the ops that create the topics of a store, each partition with one replica here.

    Raise NotALogError for a topic without an id, which a broker before Kafka 2.8 wrote.
    """
    ops: list[Op] = []
    changes = store.topic_changes
    for name, topic in store.items():
        if topic.id is None:
            raise NotALogError(f"topic {name!r} has no id: copy it with `logstore follow` first")
        numbers = range(changes.declared_partitions(topic))
        image = TopicImage(0, uuid_text(topic.id), {at: Assignment((me,)) for at in numbers})
        settings = {key: _text(value) for key, value in changes.stored_settings(topic).items()}
        ops.append(Create(topic_path(name), image.encode()))
        ops.append(Create(config_path("topics", name), as_json({"version": 1, "config": settings})))
        for number in topic.partition_numbers:
            state = LeaderAndIsr(
                version=0,
                leader=NO_LEADER,
                leader_epoch=topic[number].parts.active.leadership.epoch,
                leader_broker_epoch=-1,
                isr=(me,),
            )
            ops.append(Create(state_path((name, number)), state.encode()))
    return ops


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
