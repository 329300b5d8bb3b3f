"""`logstore cluster`: nodes, partitions and leaders of a cluster, through its ZooKeeper."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.command import Verbs
from logstore.cli.observing import keys_of, numbers, observing, offsets_of, wait_for
from logstore.cli.output import Column, number, plain
from logstore.cli.session import (
    Integer,
    Session,
    output_option,
    pass_session,
    store_option,
    verb,
    verb_of_cluster,
    zookeeper_option,
)
from logstore.cli.text import size_text
from logstore.cli.verbs.topic import config_option, settings_of
from logstore.times import time_text

if TYPE_CHECKING:
    from logstore.replication.hosting.observer import Observer
    from logstore.replication.machines.image import ClusterImage, Key
    from logstore.replication.status import ClusterStatus, NodeStatus, PartitionStatus

__all__ = ["cluster_verb", "timeout_option"]

CLUSTER_VERBS = {
    "status": ("cluster", "Show the nodes, and partitions that need attention."),
    "nodes": ("cluster", "List the nodes."),
    "partitions": ("cluster", "Show replicas, leaders and ends of the partitions of a topic."),
    "create": ("cluster", "Create a topic."),
    "delete": ("cluster", "Delete a topic and its records on all nodes."),
    "elect": ("cluster", "Elect leaders: the preferred ones, or one that may miss records."),
    "reassign": ("moving", "Move replicas to other nodes."),
    "plan": ("moving", "Print a balanced assignment in Kafka's format."),
    "decommission": ("moving", "Move all replicas off a node."),
    "controller": ("cluster", "Show the controller, or have the nodes elect another."),
    "strays": ("cluster", "List what a node has set aside in its store."),
    "leave": ("cluster", "Make the store of a stopped node a store of its own."),
}


@click.group(
    "cluster",
    cls=Verbs,
    verbs=CLUSTER_VERBS,
    params=[store_option(), output_option(), zookeeper_option()],
    no_args_is_help=True,
)
def cluster_verb() -> None:
    """Nodes, replicas and leaders of a cluster that `logstore serve --node` forms."""


timeout_option = click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, show_default=True,
    help="Seconds to wait.",
)  # fmt: skip

NODES = (
    plain("node"),
    plain("address"),
    plain("alive"),
    number("broker_epoch", "epoch"),
    plain("rack"),
    number("leads"),
    number("replicas"),
    plain("notes"),
)


def _members(name: str) -> Column:
    return Column(name, name, lambda nodes: numbers(nodes or ()))


PARTITIONS = (
    plain("partition"),
    plain("leader"),
    _members("replicas"),
    _members("isr"),
    _members("elr"),
    number("minimum", "min isr"),
    plain("state"),
)


def status_of_observer(observer: Observer) -> ClusterStatus:
    """Return the status that the tree shows."""
    from logstore.replication.status import status_of

    with observer.lock:
        return status_of(observer.image, {}, {})


# ---- looking ----


@verb_of_cluster("status")
@click.option(
    "--under-replicated", is_flag=True, help="Only partitions with a replica not in sync."
)
@click.option("--offline", is_flag=True, help="Only partitions without a leader that is alive.")
@pass_session
def status_verb(session: Session, under_replicated: bool, offline: bool) -> int:
    """Show the nodes, and the partitions that need attention.

    With an option, print only those partitions.  The exit code is 3 if a partition is offline.
    """
    with observing(session) as observer:
        status = status_of_observer(observer)
        moving = [key for key in observer.image.keys() if _is_moving(observer.image, key)]  # noqa: SIM118
        nodes = [_node_row(observer.image, each) for each in status.nodes]
    partitions = [_partition_row(each) for each in status.partitions]
    bad = [row for row in partitions if _is_wanted(row, under_replicated, offline)]
    output = session.output
    if under_replicated or offline:
        _print_partitions(session, bad)
    else:
        counts = {
            "cluster_id": status.cluster_id,
            "controller": status.controller,
            "topics": len({each.topic for each in status.partitions}),
            "partitions": len(partitions),
            "under_replicated": len(status.under_replicated),
            "under_minimum": sum(len(each.isr) < each.minimum for each in status.partitions),
            "offline": len(status.offline),
            "moving": len(moving),
        }
        if output.kind == "table":
            _print_status(session, counts, nodes, bad)
        else:
            output.one({**counts, "nodes": nodes, "partition_list": bad})
    return exits.BUSY if status.offline else exits.OK


def _print_status(
    session: Session, counts: dict[str, Any], nodes: list[Any], bad: list[Any]
) -> None:
    output = session.output
    controller = "none" if counts["controller"] < 0 else f"node {counts['controller']}"
    output.line(f"cluster {counts['cluster_id']}, controller: {controller}")
    output.line(
        f"{counts['topics']:,} topics, {counts['partitions']:,} partitions: "
        f"{counts['under_replicated']:,} under-replicated, "
        f"{counts['under_minimum']:,} below min.insync.replicas, "
        f"{counts['offline']:,} offline, {counts['moving']:,} moving"
    )
    output.line("")
    output.rows(nodes, NODES)
    if bad:
        output.line("")
        _print_partitions(session, bad)


def _print_partitions(session: Session, rows: list[dict[str, Any]]) -> None:
    if session.output.kind == "table":
        rows = [_flat(row) for row in rows]
    session.output.rows(rows, PARTITIONS, empty="there are none")


def _is_wanted(row: dict[str, Any], under_replicated: bool, offline: bool) -> bool:
    # With both options, or with none: all that need attention.
    is_offline: bool = row["state"] != "OnlinePartition"
    is_under: bool = len(row["isr"]) < len(row["replicas"])
    if under_replicated != offline:
        return is_offline if offline else is_under
    return is_under or is_offline


def _is_moving(image: ClusterImage, key: Key) -> bool:
    from logstore.replication.machines.decisions import is_move_done

    return not is_move_done(image, key)


def _node_row(image: ClusterImage, node: NodeStatus) -> dict[str, Any]:
    found = image.nodes.get(node.node)
    return {
        "node": node.node,
        "address": None if found is None else f"{found.host}:{found.port}",
        "alive": node.alive,
        "broker_epoch": node.broker_epoch if node.alive else None,
        "rack": node.rack,
        "leads": node.leads,
        "replicas": node.replicas,
        "notes": _notes(node),
    }


def _notes(node: NodeStatus) -> str:
    words = {
        "not registered": not node.alive,
        "may have lost records": node.lossy,
        "leads nothing: its disk is full, or it is ending": node.unwilling,
        f"{node.offline} partitions offline": bool(node.offline),
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _partition_row(partition: PartitionStatus) -> dict[str, Any]:
    return {
        "topic": partition.topic,
        "partition": partition.partition,
        "state": partition.state,
        "leader": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "replicas": list(partition.replicas),
        "isr": list(partition.isr),
        "elr": list(partition.elr),
        "minimum": partition.minimum,
    }


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for a table."""
    leader = "none" if row["leader"] < 0 else f"{row['leader']}@{row['leader_epoch']}"
    return {**row, "partition": f"{row['topic']}-{row['partition']}", "leader": leader}


@verb_of_cluster("nodes")
@pass_session
def nodes_verb(session: Session) -> None:
    """List the nodes: those that are registered, and those with replicas."""
    with observing(session) as observer:
        status = status_of_observer(observer)
        rows = [_node_row(observer.image, each) for each in status.nodes]
    for row in rows:
        if row["node"] == status.controller:
            row["notes"] = ", ".join(filter(None, ("controller", row["notes"])))
    session.output.rows(rows, NODES)


@verb_of_cluster("partitions")
@click.argument("topic", metavar="TOPIC[:PARTITION]")
@pass_session
def partitions_verb(session: Session, topic: str) -> None:
    """Show replicas, leaders and ends of the partitions of a topic.

    LEADER is node@epoch.  ELR are nodes that are not in sync and have every committed record.  ENDS
    has the end of each log, and how many records it lags behind its leader; it is asked of the
    nodes, and a node that does not answer is left out.
    """
    with observing(session) as observer:
        with observer.lock:
            image = observer.image
            keys = keys_of(image, topic)
        ends, watermarks = offsets_of(image, keys)
        found = {(each.topic, each.partition): each
                 for each in status_of_observer(observer).partitions}  # fmt: skip
        rows = []
        for key in keys:
            assignment = image.assignment(key)
            row = _partition_row(found[key])
            leader_end = ends[key].get(row["leader"])
            row |= {
                "adding": [] if assignment is None else list(assignment.adding),
                "removing": [] if assignment is None else list(assignment.removing),
                "high_watermark": watermarks.get(key),
                "ends": {str(node): each.end for node, each in sorted(ends[key].items())},
                "lag": {
                    str(node): max(0, leader_end.end - each.end)
                    for node, each in sorted(ends[key].items())
                    if leader_end is not None
                },
            }
            rows.append(row)
    if session.output.kind == "table":
        rows = [{**_flat(row), "ends": _ends_text(row)} for row in rows]
    columns = (*PARTITIONS[:6], _members("adding"), number("high_watermark"), plain("ends"))
    session.output.rows(rows, columns)


def _ends_text(row: dict[str, Any]) -> str:
    shown = []
    for node, end in row["ends"].items():
        lag = row["lag"].get(node)
        shown.append(f"{node}:{end}" + (f" (-{lag})" if lag else ""))
    return " ".join(shown) or "-"


# ---- topics ----


@verb_of_cluster("create")
@click.argument("topic")
@click.option("-p", "--partitions", type=Integer(1), default=1, show_default=True)
@click.option("-r", "--replication-factor", type=Integer(1), help="Default: 3, or all nodes.")
@config_option("A setting, by Kafka's name: min.insync.replicas=2, retention.ms=7d.")
@timeout_option
@pass_session
def create_verb(
    session: Session,
    topic: str,
    partitions: int,
    replication_factor: int | None,
    config: tuple[str, ...],
    timeout: float,
) -> None:
    """Create a topic; wait until every partition has a leader.

    Replicas are placed as Kafka places them: on different racks if all nodes have one.
    """
    settings = settings_of(config)
    with observing(session) as observer:
        # The default of the nodes is not in the tree: three copies, or as many as there are nodes.
        factor = replication_factor or max(1, min(3, len(observer.image.nodes)))
        observer.change(
            lambda admin, done: admin.create_topic(
                topic, partitions, factor, done, config=settings, timeout=timeout
            ),
            timeout,
        )
        rows = [_partition_row(each) for each in status_of_observer(observer).partitions
                if each.topic == topic]  # fmt: skip
        minimum = rows[0]["minimum"]
    row = {"topic": topic, "partitions": partitions, "replication_factor": factor,
           "min_insync_replicas": minimum}  # fmt: skip
    words = [f"{topic}: created, {partitions} partitions with {factor} replicas"]
    if factor > 1 and minimum in (1, factor):
        words.append(_minimum_advice(minimum, factor))
    session.output.one(row, words=words)


def _minimum_advice(minimum: int, factor: int) -> str:
    if minimum == 1:
        return "min.insync.replicas is 1: one copy acknowledges; with 2 every record has two"
    return f"min.insync.replicas is {factor}: writers stop whenever one of {factor} nodes restarts"


@verb_of_cluster("delete")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@timeout_option
@pass_session
def delete_verb(session: Session, topics: tuple[str, ...], yes: bool, timeout: float) -> int:
    """Delete topics and their records on all nodes.

    Without --yes only shows what would be deleted; the exit code is 7.
    """
    with observing(session) as observer:
        counts = {name: len(keys_of(observer.image, name)) for name in topics}
        for name in topics if yes else ():
            _delete(observer, name, timeout)
    rows = [{"topic": name, "partitions": counts[name], "deleted": yes} for name in topics]
    session.output.rows(rows, (plain("topic"), number("partitions"), plain("deleted")))
    return exits.OK if yes else session.output.dry_run("nothing was deleted: repeat it with --yes")


def _delete(observer: Observer, name: str, timeout: float) -> None:
    observer.change(lambda admin, done: admin.delete_topic(name, done, timeout=timeout), timeout)


# ---- leaders ----

ELECTED = (plain("partition"), plain("before"), plain("after"), plain("outcome"))


@verb_of_cluster("elect")
@click.argument("places", nargs=-1, required=True, metavar="TOPIC[:PARTITION]...")
@click.option("--preferred", is_flag=True, help="Elect the first replica; this is the default.")
@click.option("--unclean", type=Integer(0), metavar="NODE",
              help="Elect NODE although it may miss committed records.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Accept the loss of records, with --unclean.")
@timeout_option
@pass_session
def elect_verb(
    session: Session,
    places: tuple[str, ...],
    preferred: bool,
    unclean: int | None,
    yes: bool,
    timeout: float,
) -> int:
    """Elect leaders.

    The preferred leader is the first replica; it is elected if it is in sync.  --unclean is for a
    partition whose replicas in sync are lost for good: first look at the ends of the logs that it
    prints, and choose the node with the greatest epoch and end.  Without --yes nothing is changed.
    """
    if preferred and unclean is not None:
        raise click.UsageError("--preferred or --unclean NODE, not both")
    with observing(session) as observer:
        keys = list(
            dict.fromkeys(key for place in places for key in keys_of(observer.image, place))
        )
        if unclean is not None:
            return _elect_unclean(session, observer, keys, unclean, yes, timeout)
        before = {key: _leader_text(observer.image, key) for key in keys}
        wanted = [
            key for key in keys if _preferred(observer.image, key) != _leader(observer.image, key)
        ]
        if wanted:
            observer.change(lambda admin, done: admin.elect(wanted, done, timeout=timeout), timeout)
        rows = []
        for key in keys:
            first = _preferred(observer.image, key)
            led = _leader(observer.image, key) == first
            rows.append(_elected_row(observer.image, key, before[key],
                                     "done" if led and key in wanted else "leads already" if led
                                     else f"node {first} is not alive and in sync"))  # fmt: skip
    session.output.rows(rows, ELECTED)
    failed = any(row["outcome"].startswith("node ") for row in rows)
    return exits.BUSY if failed else exits.OK


def _elect_unclean(
    session: Session, observer: Observer, keys: list[Key], node: int, yes: bool, timeout: float
) -> int:
    from logstore.replication.machines.decisions import partition_state

    image = observer.image
    for topic, at in keys:
        assignment = image.assignment((topic, at))
        if partition_state(image, (topic, at)) == "OnlinePartition":
            leader = _leader(image, (topic, at))
            words = f"{topic}-{at} has a leader, node {leader}: nothing has to be lost"
            raise exits.CommandError(exits.BUSY, words)
        if assignment is None or node not in assignment.replicas or node not in image.nodes:
            words = f"node {node} is not alive, or has no replica of {topic}-{at}"
            raise exits.CommandError(exits.NOT_FOUND, words)
    # The logs of live nodes only: those of dead ones may have more.
    ends, _ = offsets_of(image, keys)
    before = {key: _leader_text(image, key) for key in keys}
    rows = [
        {
            "topic": key[0],
            "partition": key[1],
            "node": each,
            "last_epoch": offsets.epoch,
            "end": offsets.end,
            "cut": None if node not in ends[key] else max(0, offsets.end - ends[key][node].end),
            "elected": each == node,
        }
        for key in keys
        for each, offsets in sorted(ends[key].items())
    ]
    if not yes:
        columns = (plain("topic"), number("partition"), number("node"), number("last_epoch"),
                   number("end"), number("cut"), plain("elected"))  # fmt: skip
        session.output.rows(rows, columns, empty="no replica answers")
        return session.output.dry_run(
            "nothing was changed: --yes elects the node; committed records that it misses are lost"
        )
    observer.change(
        lambda admin, done: admin.elect(keys, done, unclean=node, timeout=timeout), timeout
    )
    done = [
        _elected_row(image, key, before[key],
                     "done" if _leader(image, key) == node else "not elected")
        for key in keys
    ]  # fmt: skip
    session.output.rows(done, ELECTED)
    return exits.OK if all(row["outcome"] == "done" for row in done) else exits.BUSY


def _preferred(image: ClusterImage, key: Key) -> int:
    assignment = image.assignment(key)
    return -1 if assignment is None else assignment.replicas[0]


def _leader(image: ClusterImage, key: Key) -> int:
    state = image.states.get(key)
    return -1 if state is None else state.leader


def _leader_text(image: ClusterImage, key: Key) -> str:
    state = image.states.get(key)
    return "none" if state is None or state.leader < 0 else f"{state.leader}@{state.leader_epoch}"


def _elected_row(image: ClusterImage, key: Key, before: str, outcome: str) -> dict[str, Any]:
    return {
        "partition": f"{key[0]}-{key[1]}",
        "before": before,
        "after": _leader_text(image, key),
        "outcome": outcome,
    }


@verb_of_cluster("controller")
@click.option("--move", is_flag=True, help="Have the nodes elect a controller again.")
@click.option("--yes", is_flag=True, help="Do it; without this, only show the controller.")
@timeout_option
@pass_session
def controller_verb(session: Session, move: bool, yes: bool, timeout: float) -> int:
    """Show the controller: the node that elects leaders and moves replicas.

    --move --yes takes it its office; the nodes elect another, or the same one.  Records are
    written and read meanwhile.
    """
    from logstore.replication.machines.image import CONTROLLER
    from logstore.replication.metadata import ANY, Delete

    with observing(session) as observer:
        image = observer.image
        if move and yes:
            epoch = image.controller_epoch

            def again(image: ClusterImage) -> Iterable[int]:
                found = image.controller is not None and image.controller_epoch > epoch
                return () if found else (1,)

            # If the answer is lost or it is refused, the epoch shows whether there was an election.
            observer.commit((Delete(CONTROLLER, ANY),), lambda outcome: None)
            if not wait_for(observer, "electing", "controllers", lambda i: list(again(i)), timeout):
                raise TimeoutError(f"no controller was elected within {timeout:g} s")
        found = image.controller
        row = {
            "controller": None if found is None else int(found.get("brokerid", -1)),
            "epoch": image.controller_epoch,
            "since": None if found is None else int(found.get("timestamp", 0)),
        }
    words = "no node is the controller" if found is None else (
        f"node {row['controller']} since {time_text(row['since'] or 0)}, epoch {row['epoch']}"
    )  # fmt: skip
    session.output.one(row, words=[words])
    if move and not yes:
        return session.output.dry_run()
    return exits.OK if found is not None else exits.BUSY


# ---- the store of a node ----


@verb("strays")
@click.option("--delete", is_flag=True, help="Delete them.")
@click.option("--yes", is_flag=True, help="Delete; without this, only show what would be deleted.")
@pass_session
def strays_verb(session: Session, delete: bool, yes: bool) -> int:
    """List the partitions that a node has set aside in its store (-s DIR).

    A node sets a partition aside if it is not assigned to it any more, or if its copy was damaged.
    The files are kept until --delete --yes, which needs the store: stop the node first.
    """
    # Readonly works while the node runs; deleting needs its lock.
    store = session.writing(alone=False) if delete and yes else session.reading()
    with store:
        rows = []
        for stray in store.topic_changes.strays():
            files = (store.path / stray.name).iterdir()
            rows.append(
                {
                    "topic": stray.topic,
                    "partition": stray.number,
                    "size_bytes": sum(file.stat().st_size for file in files),
                    "directory": stray.name,
                    "deleted": delete and yes,
                }
            )
            if delete and yes:
                store.topic_changes.remove_stray(stray)
    columns = (plain("topic"), number("partition"), Column("size_bytes", "size", size_text, True),
               plain("directory"), plain("deleted"))  # fmt: skip
    session.output.rows(rows, columns, empty="nothing was set aside")
    if delete and not yes and rows:
        return session.output.dry_run("nothing was deleted: repeat it with --yes")
    return exits.OK


@verb("leave")
@click.option("--yes", is_flag=True, help="Do it; without this, only show what the store is.")
@pass_session
def leave_verb(session: Session, yes: bool) -> int:
    """Make the store of a stopped node (-s DIR) a store of its own.

    Its records stay, also those that the cluster has not committed.  The cluster is not told: move
    the replicas off the node first (`logstore cluster decommission`).
    """
    from logstore.root.member import ClusterMember
    from logstore.store.store import set_member

    with session.writing(alone=False) if yes else session.reading() as store:
        member = ClusterMember.read(store.path)
        if member is None:
            raise exits.CommandError(exits.NOT_FOUND, f"{store.path} is no node of a cluster")
        if yes:
            set_member(store, None)
    row = {"cluster": member.cluster_id, "node": member.node_id, "left": yes}
    session.output.rows([row], (plain("cluster"), number("node"), plain("left")))
    return exits.OK if yes else session.output.dry_run("nothing was changed: repeat it with --yes")
