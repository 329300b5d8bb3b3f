"""`logstore cluster reassign`, `plan` and `decommission`: replicas move to other nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from logstore.cli import exits
from logstore.cli.observing import keys_of, numbers, observing, wait_for
from logstore.cli.output import Column, number, plain
from logstore.cli.session import Integer, Session, pass_session, verb_of_cluster
from logstore.cli.text import parse_size
from logstore.cli.verbs.cluster import timeout_option

if TYPE_CHECKING:
    from logstore.replication.hosting.observer import Observer
    from logstore.replication.machines.image import ClusterImage, Key

__all__ = ["decommission_verb", "plan_verb", "reassign_verb"]

_SPEC = re.compile(r"(?P<topic>[^:=]+):(?P<number>\d+)=(?P<nodes>\d+(,\d+)*)\Z")

Targets = dict["Key", tuple[int, ...]]

wait_option = click.option("--wait/--no-wait", default=True, show_default=True,
                           help="Wait until the replicas are moved.")  # fmt: skip


def _members(name: str) -> Column:
    return Column(name, name, lambda nodes: numbers(nodes or ()))


MOVES = (plain("topic"), number("partition"), _members("before"), _members("after"), plain("state"))


@verb_of_cluster("reassign")
@click.argument("moves", nargs=-1, required=True, metavar="(FILE | TOPIC:PARTITION=1,2,3...)")
@click.option(
    "--throttle",
    metavar="RATE",
    default=None,
    help="Copy at most so many bytes per second on each node: 10MiB.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would move.")
@click.option("--verify", is_flag=True, help="Show what is moved and what is still moving.")
@click.option("--cancel", is_flag=True, help="Move the replicas back to where they were.")
@wait_option
@timeout_option
@pass_session
def reassign_verb(
    session: Session,
    moves: tuple[str, ...],
    throttle: str | None,
    dry_run: bool,
    verify: bool,
    cancel: bool,
    wait: bool,
    timeout: float,
) -> int:
    """Move replicas to other nodes.

    FILE is JSON as kafka-reassign-partitions.sh has it, and as `cluster plan` prints it.  The new
    replicas are copied first; the old ones leave when all new ones are in sync.  Records are
    written and read meanwhile.  The first node is the preferred leader.

    --throttle bounds the copying until every move is complete or cancelled; it does not delay
    replicas in sync.  The same move with another --throttle changes it.

    --verify ends with exit code 3 while replicas are still moving.
    """
    if dry_run + verify + cancel > 1:
        raise click.UsageError("only one of --dry-run, --verify and --cancel")
    rate = None if throttle is None else _rate(throttle)
    if rate is not None and verify + cancel:
        raise click.UsageError("--throttle is for a move that begins or goes on; it ends by itself")
    targets = parse_moves(moves)
    with observing(session) as observer:
        for name, at in targets:
            keys_of(observer.image, f"{name}:{at}")
        if verify:
            return _verify(session, observer, targets)
        if cancel:
            return _cancel(session, observer, targets, wait, timeout)
        if dry_run:
            rows = _rows(observer.image, targets)
            session.output.rows(rows, MOVES)
            changes = any(row["before"] != row["after"] for row in rows)
            return session.output.dry_run("nothing was changed") if changes else exits.OK
        return _move(session, observer, targets, wait, timeout, rate)


def _rate(text: str) -> int:
    """Return the bytes per second of --throttle."""
    try:
        rate = int(text) if text.isdecimal() else parse_size(text)
    except ValueError:
        rate = 0
    if rate < 1:
        raise click.UsageError(f"--throttle is at least 1 byte per second, such as 10MiB, "
                               f"not {text!r}; leave it out for no bound")  # fmt: skip
    return rate


def parse_moves(moves: Sequence[str]) -> Targets:
    """Return the replicas of ``TOPIC:PARTITION=1,2,3`` or of a file, by partition."""
    targets: Targets = {}
    for text in moves:
        match = _SPEC.match(text)
        found = _read(text) if match is None else [
            (match["topic"], int(match["number"]), list(map(int, match["nodes"].split(","))))
        ]  # fmt: skip
        for topic, at, nodes in found:
            if (topic, at) in targets:
                raise click.UsageError(f"{topic}:{at} is named twice")
            targets[topic, at] = tuple(nodes)
    return targets


def _read(path: str) -> list[tuple[str, int, list[int]]]:
    """Return the rows of Kafka's JSON."""
    # More likely a move with a mistake in it than the name of a file.
    if "=" in path and not Path(path).exists():
        raise click.UsageError(f"a move is TOPIC:PARTITION=NODE,NODE or a file, not {path!r}")
    with click.open_file(path) as file:
        text = file.read()
    try:
        rows = json.loads(text)["partitions"]
        return [(str(row["topic"]), int(row["partition"]), list(map(int, row["replicas"])))
                for row in rows]  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise click.UsageError(
            f'{path}: not {{"version":1,"partitions":[{{"topic":"t","partition":0,'
            f'"replicas":[1,2]}}]}}: {type(error).__name__}: {error}'
        ) from None


def _rows(image: ClusterImage, targets: Mapping[Key, Sequence[int]]) -> list[dict[str, Any]]:
    rows = []
    for key, target in targets.items():
        assignment = image.assignment(key)
        # Of a move that is under way: where the replicas were before it.
        before = () if assignment is None else assignment.origin
        rows.append(
            {
                "topic": key[0],
                "partition": key[1],
                "before": list(before),
                "after": list(target),
                "state": _state(image, key, target),
            }
        )
    return rows


def _state(image: ClusterImage, key: Key, target: Sequence[int]) -> str:
    from logstore.replication.machines.decisions import is_move_done

    assignment = image.assignment(key)
    if assignment is None:
        return "no such partition"
    if not is_move_done(image, key):
        state = image.states.get(key)
        # Without one in sync the move cannot be completed: shown, so that a stuck move is seen.
        missing = set(assignment.adding) - set(() if state is None else state.isr)
        return f"moving, {numbers(sorted(missing))} not in sync yet" if missing else "moving"
    return "done" if assignment.replicas == tuple(target) else "not moved"


def _verify(session: Session, observer: Observer, targets: Targets) -> int:
    with observer.lock:
        rows = _rows(observer.image, targets)
    session.output.rows(rows, MOVES)
    return exits.OK if all(row["state"] == "done" for row in rows) else exits.BUSY


def _move(
    session: Session,
    observer: Observer,
    targets: Targets,
    wait: bool,
    timeout: float,
    throttle_bytes: int | None = None,
) -> int:
    with observer.lock:
        rows = _rows(observer.image, targets)
    # A request for what is done already would be deleted by the controller, and is not written.
    wanted = {key: target for key, target in targets.items() if not _is_done(observer, key, target)}
    if wanted:
        observer.change(
            lambda admin, done: admin.reassign(
                wanted, done, throttle_bytes=throttle_bytes, timeout=timeout
            ),
            timeout,
        )
    ended = not wait or _wait(observer, list(wanted), timeout)
    with observer.lock:
        for row in rows:
            key = row["topic"], row["partition"]
            row["state"] = _state(observer.image, key, targets[key])
    session.output.rows(rows, MOVES)
    if not ended:
        session.output.note(f"still moving after {timeout:g} s: `cluster reassign --verify` with "
                            f"the same arguments shows the rest")  # fmt: skip
        return exits.TIMEOUT
    return exits.OK


def _is_done(observer: Observer, key: Key, target: tuple[int, ...]) -> bool:
    with observer.lock:
        return _state(observer.image, key, target) == "done"


def _wait(observer: Observer, keys: Iterable[Key], timeout: float) -> bool:
    from logstore.replication.machines.decisions import is_move_done

    wanted = list(keys)
    return wait_for(
        observer, "moving", "partitions",
        lambda image: [key for key in wanted if not is_move_done(image, key)], timeout,
    )  # fmt: skip


def _cancel(
    session: Session, observer: Observer, targets: Targets, wait: bool, timeout: float
) -> int:
    with observer.lock:
        moving = {key: observer.image.assignment(key) for key in targets}
    under_way = [key for key, each in moving.items() if each is not None and each.moving]
    if under_way:
        wanted: dict[Key, Sequence[int] | None] = dict.fromkeys(under_way)
        observer.change(lambda admin, done: admin.reassign(wanted, done, timeout=timeout), timeout)
    ended = not wait or _wait(observer, under_way, timeout)
    rows = [
        {"topic": key[0], "partition": key[1], "cancelled": key in under_way} for key in targets
    ]
    session.output.rows(rows, (plain("topic"), number("partition"), plain("cancelled")))
    return exits.OK if ended else exits.TIMEOUT


# ---- plans ----


def _node_list(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--nodes takes numbers, such as 1,2,4, not {text!r}") from None
    if len(set(found)) != len(found):
        raise click.UsageError(f"--nodes names a node twice: {text}")
    return found


def _racks(image: ClusterImage, nodes: Iterable[int]) -> dict[int, str | None]:
    missing = sorted(set(nodes) - set(image.nodes))
    if missing:
        raise exits.CommandError(
            exits.NOT_FOUND,
            f"nodes {missing} are not registered; those that are: {sorted(image.nodes)}",
        )
    return {node: image.nodes[node].rack for node in nodes}


def _current(image: ClusterImage, keys: Iterable[Key]) -> Targets:
    found = {key: image.assignment(key) for key in keys}
    # A partition that is moving is planned from where it will be.
    return {key: each.target for key, each in found.items() if each is not None}


@verb_of_cluster("plan")
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@click.option(
    "--nodes", required=True, metavar="1,2,4", help="The nodes that are to have replicas."
)
@click.option(
    "-r",
    "--replication-factor",
    "factor",
    type=Integer(1),
    help="How many replicas each partition is to have.  Default: as many as it has.",
)
@pass_session  # fmt: skip
def plan_verb(session: Session, topics: tuple[str, ...], nodes: str, factor: int | None) -> None:
    """Print an assignment of all partitions, or of some topics, to the given nodes.

    Replicas and leaders are spread evenly, on different racks, and as few replicas as possible are
    moved.  The output is Kafka's JSON, with the partitions that change only: save it, look at it,
    and give it to `cluster reassign`.
    """
    from logstore.replication.machines.balance import balanced, moved_replicas

    with observing(session) as observer, observer.lock:
        image = observer.image
        keys = image.keys()
        if topics:
            keys = [key for name in topics for key in keys_of(image, name)]
        current = _current(image, keys)
        after = balanced(current, _racks(image, _node_list(nodes)), factor)
    changed = {key: replicas for key, replicas in after.items() if replicas != current[key]}
    session.output.line(as_kafka(changed))
    session.output.note(f"{len(changed):,} of {len(current):,} partitions change; "
                        f"{moved_replicas(current, changed):,} replicas are copied")  # fmt: skip


def as_kafka(targets: Mapping[Key, Sequence[int]]) -> str:
    """Return the JSON of kafka-reassign-partitions.sh."""
    rows = [
        {"topic": topic, "partition": at, "replicas": list(replicas)}
        for (topic, at), replicas in sorted(targets.items())
    ]
    return json.dumps({"version": 1, "partitions": rows}, separators=(",", ":"))


@verb_of_cluster("decommission")
@click.argument("node", type=Integer(0))
@click.option("--yes", is_flag=True, help="Move them; without this, only show what would move.")
@wait_option
@timeout_option
@pass_session
def decommission_verb(session: Session, node: int, yes: bool, wait: bool, timeout: float) -> int:
    """Move all replicas off a node, to the nodes with the fewest replicas.

    The node may be dead.  Afterwards it has no partition, and can be stopped for good.
    """
    from logstore.replication.machines.balance import without_node

    with observing(session) as observer:
        with observer.lock:
            image = observer.image
            current = _current(image, image.keys())
            others = _racks(image, [each for each in image.nodes if each != node])
            known = {each for replicas in current.values() for each in replicas}
            if node not in known | set(image.nodes):
                raise exits.CommandError(exits.NOT_FOUND, f"there is no node {node}")
            targets = without_node(current, node, others)
            rows = _rows(image, targets)
        if not targets:
            session.output.note(f"node {node} has no replicas")
            return exits.OK
        if not yes:
            session.output.rows(rows, MOVES)
            return session.output.dry_run("nothing was moved: repeat it with --yes")
        return _move(session, observer, targets, wait, timeout)
