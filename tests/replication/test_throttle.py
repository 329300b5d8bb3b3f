"""The throttle of moves: the bucket, its settings, and both sides of a fetch."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.config import INT64_MAX, ConfigError
from logstore.replication.config import NodeConfig
from logstore.replication.hosting.fetching import Fetcher, FetchService
from logstore.replication.hosting.hosted import Served
from logstore.replication.hosting.throttling import Throttling
from logstore.replication.machines.controller import Controller
from logstore.replication.machines.follower import Fetched, Offer
from logstore.replication.machines.image import REASSIGN, ClusterImage, config_path
from logstore.replication.machines.throttle import (
    FOLLOWER,
    LEADER,
    LISTS,
    NO_BOUND,
    RATES,
    Throttle,
    end_throttle,
    parse_replicas,
    rate_of,
)
from logstore.replication.metadata import Delete, Set
from logstore.replication.peers import FetchRequest, FetchRow

KEY = "t", 0

# ---- the bucket ----

steps = st.lists(
    st.tuples(
        st.integers(0, 3000),  # milliseconds that pass
        st.integers(0, 5000),  # bytes that a follower wants
        st.integers(0, 20_000),  # bytes of members in sync
    ),
    max_size=50,
)


@given(rate=st.integers(1, 10_000), steps=steps)
def test_no_more_is_sent_than_the_rate_and_one_seconds_burst(
    rate: int, steps: list[tuple[int, int, int]]
) -> None:
    throttle, now, sent = Throttle(rate), 1000, 0
    throttle.room(now)
    for passed, wanted, counted in steps:
        now += passed
        throttle.count(counted)
        granted = min(wanted, throttle.room(now))
        throttle.spend(granted, now)
        sent += granted
        assert sent <= rate * (now - 1000) / 1000 + rate


@given(
    rate=st.integers(1, 10_000),
    overshoot=st.integers(0, 5000),
    counted=st.integers(0, 20_000),
    seconds=st.integers(1, 60),
)
def test_a_move_gets_half_of_its_rate_whatever_is_written(
    rate: int, overshoot: int, counted: int, seconds: int
) -> None:
    """`overshoot`: the last batch of an answer does not fit; it is paid back."""
    throttle, now, sent = Throttle(rate), 0, 0
    while now < seconds * 1000:
        throttle.count(counted)
        room = throttle.room(now)
        if room:
            throttle.spend(room + overshoot, now)
            sent += room + overshoot
        wait = throttle.wait_ms(now)
        assert 0 < wait <= 1000
        now += wait
    assert sent >= rate * seconds / 2 - rate / 5 - 1
    assert sent <= rate * now / 1000 + rate + overshoot


def test_tokens_that_were_not_used_are_given_back() -> None:
    throttle = Throttle(1000)
    throttle.spend(1000, 0)
    throttle.spend(-400, 0)
    assert throttle.room(0) == 400


def test_a_rate_that_changes_counts_at_once_and_debts_stay() -> None:
    throttle = Throttle()
    assert (throttle.room(0), throttle.wait_ms(0)) == (NO_BOUND, 0)
    throttle.change(1000)
    assert throttle.room(0) == 1000
    throttle.spend(5000, 0)
    throttle.change(2000)
    assert (throttle.room(1999), throttle.wait_ms(0)) == (0, 101)
    assert throttle.room(2100) == 200
    throttle.change(None)
    assert throttle.room(2100) == NO_BOUND


# ---- the settings ----


def image_of(**configs: dict[str, str]) -> ClusterImage:
    """An image with settings: ``topics_t={...}``, ``brokers_1={...}``."""
    image = ClusterImage()
    for place, settings in configs.items():
        kind, _, name = place.partition("_")
        image.configs[kind, name] = settings, 0
    return image


@pytest.mark.parametrize("text", ["0", "0:1,x", "1:", ":1", "0:1;0:2", "-1:2", "* ,0:1"])
def test_a_list_that_is_none_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be \* or a list of PARTITION:NODE such as"):
        parse_replicas(LISTS[LEADER], text)


def test_the_rate_of_a_node_is_its_own_else_that_of_all_else_its_configs() -> None:
    name, image = RATES[LEADER], ClusterImage()
    assert rate_of(image, 1, LEADER, INT64_MAX) is None
    assert rate_of(image, 1, LEADER, 5) == 5
    image.configs["brokers", "<default>"] = {name: "7"}, 0
    assert rate_of(image, 1, LEADER, 5) == 7
    image.configs["brokers", "1"] = {name: "9"}, 0
    assert (rate_of(image, 1, LEADER, 5), rate_of(image, 2, LEADER, 5)) == (9, 7)
    image.configs["brokers", "1"] = {name: "junk"}, 0
    assert rate_of(image, 1, LEADER, 5) == 7, "contents of the tree never stop a node"
    assert rate_of(image, 1, FOLLOWER, 5) == 5


def test_only_listed_replicas_of_this_node_are_bound() -> None:
    throttle = Throttling(LEADER, 1, INT64_MAX, lambda: 0)
    lists = {LISTS[LEADER]: "0:1,1:2"}
    throttle.use(image_of(topics_t=lists, topics_all={LISTS[LEADER]: "*"}))
    assert not throttle.binds(KEY), "there is no rate"
    rate = {RATES[LEADER]: "100"}
    bad = {LISTS[LEADER]: "junk"}
    all_of = {LISTS[LEADER]: "*"}
    throttle.use(image_of(topics_t=lists, topics_all=all_of, topics_bad=bad, brokers_1=rate))
    bound = {key for key in (("t", 0), ("t", 1), ("all", 9), ("bad", 0), ("no", 0))
             if throttle.binds(key)}  # fmt: skip
    assert bound == {("t", 0), ("all", 9)}
    throttle.use(image_of(topics_t=lists))
    assert not throttle.binds(KEY)


@pytest.mark.parametrize("note", [None, 5, {"throttled": 5}, {"throttled": {"nodes": 1}}])
def test_a_note_that_cannot_be_read_takes_nothing_away(note: object) -> None:
    image = image_of(topics_t={LISTS[LEADER]: "*"})
    image.reassign = {"partitions": [], "logstore": note}, 0
    assert end_throttle(image) == []


def test_the_controller_takes_the_throttle_away_in_the_write_that_ends_the_request() -> None:
    image = image_of(
        topics_t={LISTS[LEADER]: "0:1", LISTS[FOLLOWER]: "0:2", "retention.ms": "5"},
        brokers_1={RATES[LEADER]: "5", RATES[FOLLOWER]: "5"},
        brokers_2={"other": "x"},
    )
    note = {"throttled": {"nodes": [1, 2, 3], "topics": ["t", "gone"]}}
    image.reassign = {"partitions": [], "logstore": note}, 4
    controller = Controller(1, "i")
    won = controller.campaign(image, 0)
    assert won is not None
    image.controller = {"brokerid": 1, "logstore": {"incarnation": "i"}}
    controller._win(1, 0, image)
    (commit,) = controller.step(image)
    _, gone, topic, node = commit.ops
    assert gone == Delete(REASSIGN, 4)
    assert isinstance(topic, Set) and isinstance(node, Set)
    assert (topic.path, node.path) == (config_path("topics", "t"), config_path("brokers", "1"))
    assert json.loads(topic.data)["config"] == {"retention.ms": "5"}
    assert json.loads(node.data)["config"] == {}


# ---- both sides of a fetch, with a clock of the test ----


class Clock:
    """The time, and the calls that wait for it."""

    def __init__(self) -> None:
        self.now = 1000
        self.calls: list[tuple[int, Callable[[], object]]] = []

    def after(self, ms: int, call: Callable[[], object]) -> Callable[[], object]:
        row = self.now + ms, call
        self.calls.append(row)
        return lambda: row in self.calls and self.calls.remove(row)

    def pass_ms(self, ms: int) -> None:
        end = self.now + ms
        while due := sorted((each for each in self.calls if each[0] <= end), key=lambda x: x[0]):
            self.calls.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


def bound(side: str, clock: Clock, rate: int) -> Throttling:
    throttle = Throttling(side, 1, rate, lambda: clock.now)
    throttle.use(image_of(topics_t={LISTS[side]: "*"}))
    return throttle


class Led:
    """A partition that this node leads, with endless records."""

    def __init__(self, end: int, *, late: bool) -> None:
        self.end = end
        self.late = late

    def serve(self, node: int, epoch: int, row: FetchRow, *, again: bool) -> Served:
        leader: Any = object()
        return Served(Fetched(0, 0, 0), leader, self.end, self.late)

    def stop_waiting(self, wake: Callable[[], object]) -> None:
        assert self.late, "it waits for tokens only"

    def read(self, served: Served, offset: int, most: int) -> Fetched:
        return Fetched(0, 0, 0, None, b"x" * min(most, served.end - offset))


def ask(service: FetchService, offset: int, wait: int = 500) -> list[bytes]:
    """Fetch once; the list has the records when it is answered."""
    got: list[bytes] = []
    row = FetchRow(KEY, "id", Offer(1, 1, 0, offset, -1, 0), 1 << 20)
    request = FetchRequest(2, 1, wait, 1 << 20, (row,))
    service.fetch(request, lambda answers: got.append(answers[KEY].raw))
    return got


def test_a_leader_answers_when_there_are_tokens_and_not_before() -> None:
    clock = Clock()
    replicas: Any = {KEY: Led(1 << 20, late=True)}
    service = FetchService(replicas, clock.after, bound(LEADER, clock, 1000))
    (raw,) = ask(service, 0)
    assert len(raw) == 1000, "the burst of a second"
    waiting = ask(service, 1000)
    clock.pass_ms(99)
    assert waiting == [], "answered too early: the follower would ask again and again"
    clock.pass_ms(1)
    assert list(map(len, waiting)) == [100]
    assert not clock.calls
    assert ask(service, 1100, wait=0) == [b""], "one that does not wait is answered empty"


def test_a_leader_with_a_rate_sends_it_and_no_more() -> None:
    clock = Clock()
    replicas: Any = {KEY: Led(1 << 20, late=True)}
    service = FetchService(replicas, clock.after, bound(LEADER, clock, 1000))
    sent = fetches = 0
    got = ask(service, 0)
    while clock.now < 11_000:
        while got:
            sent += len(got[0])
            fetches += 1
            got = ask(service, sent)
        clock.pass_ms(10)
    assert 10_000 <= sent <= 11_000, "10 s and the burst"
    assert fetches <= 110, "no busy loop"


def test_members_in_sync_are_counted_and_never_delayed() -> None:
    clock = Clock()
    led = Led(1 << 20, late=False)
    replicas: Any = {KEY: led}
    service = FetchService(replicas, clock.after, bound(LEADER, clock, 1000))
    assert list(map(len, ask(service, 0))) == [1 << 20]
    assert list(map(len, ask(service, 0))) == [1 << 20]
    led.late = True
    assert list(map(len, ask(service, 0))) == [1000]
    clock.pass_ms(400)
    assert list(map(len, ask(service, 1000))) == [200], "half of what was earned is for the others"


def test_a_follower_leaves_a_partition_out_until_it_has_tokens() -> None:
    clock = Clock()
    throttle = bound(FOLLOWER, clock, 1000)
    asked: list[tuple[list[str], int]] = []
    done: list[Callable[..., None]] = []

    def fetch(leader: int, request: FetchRequest, answered: Callable[..., None]) -> None:
        asked.append(([row.key[0] for row in request.rows], request.max_wait_ms))
        done.append(answered)

    def replica(topic: str, *, in_sync: bool) -> Any:
        machine = SimpleNamespace(
            broker_epoch=1,
            view=SimpleNamespace(isr=(1, 2) if in_sync else (2,)),
            follower=SimpleNamespace(is_level=False),
        )
        return SimpleNamespace(
            key=(topic, 0), topic_id="id", machine=machine, fetched=lambda *_: None,
            poll=lambda: Offer(1, 2, 0, 0, -1, 0),
        )  # fmt: skip

    moved, member, other = (
        replica("t", in_sync=False), replica("t2", in_sync=True), replica("t", in_sync=True)
    )  # fmt: skip
    peers: Any = SimpleNamespace(direct=False, fetch=fetch)
    fetcher = Fetcher(1, 2, peers, NodeConfig(), clock.after, throttle)
    fetcher.ready(moved)
    assert asked.pop() == (["t"], 500)
    done.pop()({KEY: Fetched(0, 0, 0, None, b"x" * 1100)})  # the batch was larger than the room
    clock.pass_ms(10)
    fetcher.ready(moved, member)
    assert asked.pop() == (["t2"], 190), "the bound one is left out; the wait ends for it"
    clock.pass_ms(600)
    assert not asked, "one request at a time"
    done.pop()({})
    assert asked.pop() == (["t"], 500)
    done.pop()({})
    throttle.spend(10_000)
    fetcher.ready(other)
    assert asked.pop() == (["t"], 500), "in sync: not delayed"
    done.pop()({})
    fetcher.ready(moved)
    clock.pass_ms(5000)
    assert not asked
    assert len(clock.calls) == 1, "one timer, which looks again"
    throttle.use(ClusterImage())
    clock.pass_ms(1000)
    assert asked.pop() == (["t"], 500), "a throttle that was removed"
    assert not clock.calls
