"""The scenarios of `tests/kafka/test_clients.py`, with the clients of other languages as well.

franz-go, kafkajs and three versions of the Java client take part beside the Python clients and
logstore's own: a record that one of them produces is read by every other, at both isolation levels,
and members of all of them share a group.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import logstore
from logstore import Store
from logstore.kafka.server import KafkaServer
from tests.campaign import sized

pytest.importorskip("confluent_kafka")
pytest.importorskip("kafka")
pytest.importorskip("aiokafka")

from tests.kafka import clients
from tests.kafka import test_clients as written
from tests.kafka.clients import Member, client, wait_until

from .kafka import KafkaUnavailableError
from .programs import PROGRAMS, Foreign, Program, RefusedError

pytestmark = [pytest.mark.interop, pytest.mark.campaign]

# The Java clients have a smaller test of their own, in test_wire_clients.py.
NAMES = sized(("franz-go", "kafkajs"), tuple(PROGRAMS), tuple(PROGRAMS))
ALL = (*clients.CLIENTS, *NAMES)


@pytest.fixture
def server(store: Store) -> Iterator[KafkaServer]:
    with KafkaServer(store) as started:
        yield started


def has_codec(name: str, codec: str) -> bool:
    """Return whether a client has a codec; the modules for LZ4 of kafkajs need a compiler."""
    return clients.has_codec(name, codec) and (name, codec) != ("kafkajs", "lz4")


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Program | str]]:
    """Every program that runs here; of the others the reason."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Program | str] = {}
        for name in NAMES:
            try:
                found[name] = stack.enter_context(Program(name))
            except KafkaUnavailableError as error:
                found[name] = str(error)
        yield found


@pytest.fixture(autouse=True)
def known(programs: dict[str, Program | str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the programs to the clients of the scenarios."""
    monkeypatch.setattr(written, "has_codec", has_codec)
    for name, program in programs.items():
        if isinstance(program, Program):
            monkeypatch.setitem(
                clients.CLIENTS, name, lambda server, program=program: Foreign(program, server)
            )


def run(scenario: Callable[..., None], name: str, programs: dict[str, Any], **all_of: Any) -> None:
    """Call a scenario with one client."""
    for each in (name, all_of.get("second")):
        if isinstance(programs.get(each), str):
            pytest.skip(f"no {each}: {programs[each]}")
    with client(name, all_of["server"]) as made:
        wanted = inspect.signature(scenario).parameters
        given = {"name": name, "made": made, **all_of}
        scenario(**{each: given[each] for each in wanted})


# ---- each by itself ----


class Scenario(NamedTuple):
    """A test of one client, with the arguments of one of its cases."""

    test: Callable[..., None]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.test.__name__[5:], *map(str, self.arguments.values())])


ALONE = [
    *(Scenario(written.test_acks, {"acks": each}) for each in (0, 1, -1)),
    Scenario(written.test_an_idempotent_producer, {}),
    Scenario(written.test_a_topic_is_made_by_its_first_record, {}),
    Scenario(written.test_large_records, {}),
    Scenario(written.test_where_a_consumer_starts, {}),
    Scenario(
        written.test_an_offset_out_of_range_is_reset,
        {"start": "earliest", "expected": [b"2", b"3"]},
    ),
    Scenario(written.test_an_offset_out_of_range_is_reset, {"start": "latest", "expected": []}),
    *(
        Scenario(written.test_members_come_and_go, {"assignor": each})
        for each in ("range", "roundrobin", "sticky", "cooperative-sticky")
    ),
    Scenario(written.test_eight_members, {}),
    Scenario(written.test_a_static_member_keeps_its_partitions, {}),
    *(
        Scenario(
            written.test_a_client_and_our_consumer_are_members_of_one_group,
            {"assignor": assignor, "first": first},
        )
        for assignor, first in itertools.product(
            ("range", "roundrobin", "cooperative-sticky"), ("client", "ours")
        )
    ),
    Scenario(written.test_commits_are_seen_on_both_sides, {}),
    Scenario(written.test_consume_transform_produce, {}),
]
# kafkajs has no static members, and only the eager protocol.
LACKING = {"kafkajs": ("static", "sticky")}


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param(name, scenario, id=f"{name}-{scenario}")
        for name, scenario in itertools.product(NAMES, ALONE)
        if not any(each in str(scenario) for each in LACKING.get(name, ()))
        and sized("commits_are_seen" in str(scenario), True, True)
    ],
)
def test_a_client_by_itself(
    server: KafkaServer, store: Store, programs: dict[str, Any], name: str, scenario: Scenario
) -> None:
    run(scenario.test, name, programs, server=server, store=store, **scenario.arguments)


@pytest.mark.parametrize("name", sized(("franz-go",), NAMES, NAMES))
def test_administration(
    server: KafkaServer, store: Store, programs: dict[str, Any], name: str
) -> None:
    def administer(made: Foreign) -> None:
        made.admin("create", "t", 2)
        with pytest.raises(RefusedError, match=r"(?i)exists"):
            made.admin("create", "t", 2)
        made.admin("grow", "t", 3)
        assert made.admin("topics") == [b"t", b"3"] and len(store["t"]) == 3
        made.admin("configure", "t", "retention.ms", "1000")
        assert store["t"].config.retention_ms == 1000
        store["t"][0].extend([b"x"] * 5)
        made.admin("trim", "t", 0, 3)
        assert store["t"][0].start_offset == 3
        made.admin("offsets", "g", "t", 0, 4)
        groups = logstore.Groups(store)
        assert groups.committed("g")[logstore.TopicPartition("t", 0)].offset == 4
        assert made.admin("groups") == [b"g"]
        made.admin("forget", "g")
        assert "g" not in groups
        made.admin("delete", "t")
        assert "t" not in store

    run(administer, name, programs, server=server)


# ---- each with every other ----


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        (name, codec)
        for name, codec in itertools.product(ALL, written.CODECS)
        if has_codec(name, codec) and sized((name, codec) == ("kafkajs", "snappy"), True, True)
    ],
)
def test_records(
    server: KafkaServer, store: Store, programs: dict[str, Any], name: str, codec: str
) -> None:
    scenario = written.test_records_of_one_client_are_the_records_of_every_other
    run(scenario, name, programs, server=server, store=store, codec=codec)


@pytest.mark.parametrize("name", sized(("franz-go",), ALL, ALL))
@pytest.mark.parametrize("ended", sized(("open",), ("", "open"), ("", "open")))
def test_transactions(
    server: KafkaServer, store: Store, programs: dict[str, Any], name: str, ended: str
) -> None:
    scenario = written.test_an_open_transaction_is_not_read if ended else written.test_transactions
    run(scenario, name, programs, server=server, store=store)


@pytest.mark.parametrize(
    ("name", "second"),
    [
        (name, second)
        for name, second in itertools.product(ALL, ALL)
        if {name, second} & set(NAMES) and sized(name == second == "franz-go", True, True)
    ],
)
def test_the_second_producer_of_an_id_fences_the_first(
    server: KafkaServer, store: Store, programs: dict[str, Any], name: str, second: str
) -> None:
    scenario = written.test_the_second_producer_of_an_id_fences_the_first
    run(scenario, name, programs, server=server, store=store, second=second)


def test_members_of_every_client(server: KafkaServer, store: Store) -> None:
    """One member of each client, in one group with the range assignor; then they leave in turn."""
    count = len(clients.CLIENTS)
    topic = store.create_topic("t", partitions=count)
    with contextlib.ExitStack() as stack:
        members: list[Member] = []
        for name in clients.CLIENTS:
            made = stack.enter_context(client(name, server))
            member = Member(lambda made=made: made.consumer("t", group="g"))
            members.append(stack.enter_context(member))
        wait_until(lambda: written.balanced(members, count), "all members share")
        for partition in topic:
            partition.extend([b"x", b"y"])
        everything = set(itertools.product(range(count), range(2)))
        wait_until(
            lambda: (
                {(each.partition, each.offset) for member in members for each in member.got}
                == everything
            ),
            "every record is read",
        )
        while len(members) > 1:  # whichever member leads, the others go on
            members.pop(0).leave()
            wait_until(lambda: written.balanced(members, count), f"{len(members)} members share")
    committed = logstore.Groups(store).committed("g")
    assert {place.partition: each.offset for place, each in committed.items()} == dict.fromkeys(
        range(count), 2
    )
