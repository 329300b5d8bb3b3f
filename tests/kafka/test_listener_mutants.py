"""The listener with one step taken out or changed: each mutant must be noticed by a quick check.

A mutant is one piece of text of a function, replaced; the function is compiled again in its module.
If the text is not there any more, the test fails: the mutant has to follow the code.  The killer
passes without the mutant.  A mutant that survives is a missing test.
"""

from __future__ import annotations
import __future__

import errno
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import logstore
from logstore import KafkaServer
from logstore.kafka import apis
from logstore.kafka.protocol import codec
from logstore.kafka.protocol.errors import ErrorCode
from logstore.kafka.syncs import Syncs
from logstore.kafka.waiting import Waiting
from logstore.kafka.workers import LoopCalls
from logstore.testing.io import inject_io
from logstore.testing.io_calls import SYNCS, Fault
from tests import kit
from tests.kafka import test_codec, test_connection, test_hostile, test_waiting
from tests.kafka.peer import Peer, batch, fetch_body, produce_body, request
from tests.kafka.test_acceptor import connect_at_once
from tests.kafka.test_server import error_of_produce, until

PRODUCE, FETCH, METADATA, API_VERSIONS = 0, 1, 3, 18
Killer = Callable[[Path], object]


class Mutant(NamedTuple):
    """`old` in the source of `function` becomes `new`; `killer` fails then."""

    killer: Killer
    function: str  # module of logstore.kafka, and the name in it
    old: str
    new: str


def alone(test: Callable[..., object], *given: Any) -> Killer:
    """Return the killer that is a test without fixtures."""

    def killer(_: Path) -> None:
        test(*given)

    killer.__name__ = test.__name__
    return killer


def waiting(test: Callable[..., object]) -> Killer:
    """Return the killer that is a test of Waiting."""

    def killer(path: Path) -> None:
        with logstore.open(path / "w", durability="os") as store:
            loop = test_waiting.Loop()
            topic = store.create_topic("t", partitions=2)
            test(Waiting(loop, loop), loop, [topic[0], topic[1]])  # type: ignore[arg-type]

    killer.__name__ = test.__name__
    return killer


def syncing(test: Callable[..., object], *more: str) -> Killer:
    """Return the killer that is a test of Syncs."""

    def killer(path: Path) -> None:
        with (
            logstore.open(path / "y", durability="os") as store,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr("logstore.kafka.syncs.ThreadPoolExecutor", test_waiting.Pool)
            patch.setattr(test_waiting.Pool, "made", [])
            topic = store.create_topic("t", partitions=2)
            pools = test_waiting.Pool.made
            test(test_waiting.Loop(), [topic[0], topic[1]], pools, *([patch] if more else []))

    killer.__name__ = test.__name__
    return killer


# ---- killers with a server ----


class patience:
    """How long a killer waits; a mutant may never do what it waits for."""

    seconds = 2.0


def headers(path: Path) -> None:
    with (
        logstore.open(path / "s", durability="os") as store,
        KafkaServer(store) as server,
        Peer(server.address, timeout=patience.seconds) as peer,
    ):
        asked = {"client_software_name": "a", "client_software_version": "1"}
        assert peer.ask(API_VERSIONS, 3, asked)["error_code"] == 0
        assert peer.ask(METADATA, 9, {"topics": []})["topics"] == []
        peer.correlation_id = 41
        peer.send(METADATA, 1, {"topics": []})
        assert peer.frame()[:4] == bytes((0, 0, 0, 42))


def memory_of_malformed_frames(path: Path) -> None:
    with logstore.open(path / "s", durability="os") as store, KafkaServer(store) as server:
        for size in (5_000, 300_000):  # decoded by the loop, and by a worker
            with Peer(server.address, timeout=patience.seconds) as peer:
                peer.socket.sendall(test_hostile.framed(METADATA, 1, b"\x7f" + bytes(size)))
                assert peer.is_closed()
        until(lambda: server.metrics()["memory_in_use_bytes"] == 0, patience.seconds)
        until(
            lambda: server.metrics().get('connections_closed_total{reason="malformed"}') == 2,
            patience.seconds,
        )


def limits(path: Path) -> None:
    with (
        logstore.open(path / "s", durability="os") as store,
        KafkaServer(store, config={"max.connections": 3}) as server,
    ):
        peers = connect_at_once(server, 12)
        try:
            assert peers[0].ask(API_VERSIONS, 0, {})["error_code"] == 0
            assert server.connections <= 3
        finally:
            for peer in peers:
                peer.socket.close()


def fsync_is_awaited(path: Path) -> None:
    with (
        logstore.open(path / "s", durability="fsync") as store,
        KafkaServer(store) as server,
        Peer(server.address, timeout=patience.seconds) as peer,
    ):
        store.create_topic("t")
        assert error_of_produce(peer.ask(PRODUCE, 9, produce_body("t", batch(b"a")))) == 0
        assert store["t"][0].durable_offset == 1
        with inject_io(Fault.fail(errno.EIO, SYNCS, "*t-0/*.log"), root=store.path):
            code = error_of_produce(peer.ask(PRODUCE, 9, produce_body("t", batch(b"b"))))
        assert code == ErrorCode.KAFKA_STORAGE_ERROR


def long_polls(path: Path) -> None:
    with (
        logstore.open(path / "s", durability="os") as store,
        KafkaServer(store, config={"queued.max.request.bytes": 1 << 20}) as server,
        Peer(server.address, timeout=patience.seconds) as peer,
    ):
        store.create_topic("t")
        body = fetch_body("t", 0, max_wait_ms=600_000)
        whole = request(FETCH, 11, body)[4:] + bytes(100_000)  # bytes after it are ignored
        peer.socket.sendall(len(whole).to_bytes(4, "big") + whole)
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 1, patience.seconds)
        assert server.metrics()["memory_in_use_bytes"] == 0
        store["t"][0].append(b"x")
        assert peer.receive(FETCH, 11)["responses"][0]["partitions"][0]["records"]
        peer.send(FETCH, 11, fetch_body("t", 1, max_wait_ms=600_000))
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 1, patience.seconds)
        peer.socket.close()
        until(lambda: server.metrics()['purgatory_size{kind="fetch"}'] == 0, patience.seconds)


def wake_ups(_: Path) -> None:
    class Loop:
        def __init__(self) -> None:
            self.soon: list[Callable[[], object]] = []

        def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
            self.soon.append(call)

        def call_exception_handler(self, context: dict[str, Any]) -> None:
            pass

    loop, made = Loop(), []
    calls = LoopCalls(loop)  # type: ignore[arg-type]

    def fails() -> None:
        raise ValueError

    for _turn in range(2):
        calls.put(fails)
        calls.put(lambda: made.append(1))
        assert len(loop.soon) == 1, "one wake-up for many calls"
        loop.soon.pop()()
    assert made == [1, 1]


def a_string_beyond_the_frame(_: Path) -> None:
    data = bytes.fromhex("00000001 0005") + b"topic" + bytes(50)
    for end in range(11):
        with pytest.raises(codec.MALFORMED):
            codec.decoder(METADATA, "request", 1)(memoryview(data), 0, end)


def the_whole_range_is_synced(
    loop: test_waiting.Loop, logs: list[Any], pools: list[Any], patch: pytest.MonkeyPatch
) -> None:
    synced: list[range] = []
    patch.setattr(
        type(logs[0].parts.appender), "make_durable", lambda _, offsets: synced.append(offsets)
    )
    syncs = Syncs(loop)  # type: ignore[arg-type]
    for number in (3, 5, 4):
        syncs.add(logs[0], range(number, number + 1), lambda _: None)
    pools[0].tasks.pop()()
    assert synced == [range(3, 6)]


def not_idle_while_a_request_is_under_way(_: Path) -> None:
    owner = test_connection.Owner()
    connection, transport = test_connection.connect(owner)
    test_connection.receive(connection, transport, test_connection.frame(METADATA))
    connection.check_time(700.0)
    assert not transport.closing


C, W, S = test_connection, test_waiting, "logstore.shared_syncs:SharedSyncs."
CONNECTION, MEMORY = "network.connection:Connection.", "network.memory:Memory."
MUTANTS: dict[str, Mutant] = {
    "mute: the next request begins at once": Mutant(
        alone(C.test_one_request_at_a_time_and_reading_stops),
        CONNECTION + "_begin_next", "self._busy = True", "self._busy = False",
    ),
    "mute: reading goes on": Mutant(
        alone(C.test_one_request_at_a_time_and_reading_stops),
        CONNECTION + "_pause", "self._transport.pause_reading()", "pass",
    ),
    "answers: as they are ready": Mutant(
        alone(C.test_produce_requests_are_pipelined_and_answered_in_order),
        CONNECTION + "answer", "slot.pieces = pieces",
        "slot.pieces = pieces; self._slots.remove(slot); self._slots.appendleft(slot)",
    ),
    "pipeline: any request": Mutant(
        alone(C.test_another_request_waits_for_the_answers_of_produce),
        CONNECTION + "_begin_next", "(key != PRODUCE or unsent >= PIPELINE_MAX)", "False",
    ),
    "pipeline: without a limit": Mutant(
        alone(C.test_produce_requests_are_pipelined_and_answered_in_order),
        CONNECTION + "_begin_next", "or unsent >= PIPELINE_MAX", "",
    ),
    "size: as large as Produce": Mutant(
        alone(C.test_only_produce_may_be_large),
        CONNECTION + "_begin_next", "if key == PRODUCE else self._other_max_bytes", "",
    ),
    "quick: before an answer that waits": Mutant(
        alone(C.test_no_answer_is_quick_while_one_before_it_waits),
        CONNECTION + "_begin_next", "and not unsent and", "and",
    ),
    "quick: to a peer that does not read": Mutant(
        alone(C.test_no_answer_is_quick_while_the_peer_does_not_read),
        CONNECTION + "_begin_next", "and self._may_send", "",
    ),
    "quick: lost by a close": Mutant(
        alone(C.test_a_quick_answer_is_sent_before_a_wrong_frame_closes_the_connection),
        CONNECTION + "close", "if self._ready:", "if False:",
    ),
    "size: without a minimum": Mutant(
        alone(C.test_a_frame_of_a_size_that_cannot_be_closes_the_connection, 0),
        CONNECTION + "_begin_next", "HEADER_BYTES_MIN <= size <= limit", "size <= limit",
    ),
    "size: without a maximum": Mutant(
        alone(C.test_a_frame_of_a_size_that_cannot_be_closes_the_connection, 2**31 - 1),
        CONNECTION + "_begin_next", "HEADER_BYTES_MIN <= size <= limit", "HEADER_BYTES_MIN <= size",
    ),
    "buffer: as large as is claimed": Mutant(
        alone(C.test_a_size_costs_nothing_before_its_bytes_arrive),
        CONNECTION + "_make_space", "min(whole, max(GROWTH_BYTES, 2 * have))", "whole",
    ),
    "buffer: kept at rest": Mutant(
        alone(C.test_a_connection_at_rest_holds_no_shared_memory),
        CONNECTION + "_make_space", "if self._charged:", "if False:",
    ),
    "buffer: grows while answers wait": Mutant(
        alone(C.test_what_is_read_ahead_does_not_grow_while_answers_wait),
        CONNECTION + "_resume", "if self._filled == len(self._buffer):", "if False:",
    ),
    "buffer: returned while a handler reads it": Mutant(
        alone(C.test_a_lost_connection_gives_its_memory_back_when_its_request_has_ended),
        CONNECTION + "connection_lost", "if not self._busy:", "if True:",
    ),
    "buffer: not returned by a lost connection": Mutant(
        alone(C.test_a_closed_connection_gives_the_memory_of_a_refused_request_back),
        CONNECTION + "connection_lost", "if not self._busy:", "if False:",
    ),
    "buffer: held by a long poll": Mutant(
        long_polls, "broker:Broker._finish", "call.connection.decoded()", "pass",
    ),
    "lost: the wait stays": Mutant(
        long_polls, CONNECTION + "connection_lost", "slot.cancel()", "pass",
    ),
    "lost: stays in the queue for memory": Mutant(
        alone(C.test_a_waiting_connection_that_is_lost_lets_the_next_one_go_on),
        CONNECTION + "connection_lost", "self._owner.memory.withdraw(self._enlarge)", "pass",
    ),
    "memory: charged twice": Mutant(
        alone(C.test_a_connection_at_rest_holds_no_shared_memory),
        MEMORY + "_charge", "self.in_use_bytes += size", "self.in_use_bytes += 2 * size",
    ),
    "memory: without a budget": Mutant(
        alone(C.test_connections_wait_for_memory_in_turn),
        MEMORY + "_fits", "<= self.limit_bytes", "<= 10**12",
    ),
    "memory: the queue is not served": Mutant(
        alone(C.test_connections_wait_for_memory_in_turn),
        MEMORY + "give_back", "self._serve()", "pass",
    ),
    "memory: frames that grow wait for each other": Mutant(
        alone(C.test_frames_that_grow_together_do_not_wait_for_each_other),
        MEMORY + "_serve", "if self.in_use_bytes > self._held_bytes:", "if True:",
    ),
    "memory: all frames grow above the budget": Mutant(
        alone(C.test_frames_that_grow_together_do_not_wait_for_each_other),
        MEMORY + "_serve", "max(self._waiting, key=lambda each: each.held_bytes)",
        "min(self._waiting, key=lambda each: each.held_bytes)",
    ),
    "memory: a large frame waits for itself": Mutant(
        alone(C.test_a_frame_above_the_whole_budget_is_read_alone),
        MEMORY + "take", "self._serve()", "pass",
    ),
    "memory: served by a recursion": Mutant(
        alone(C.test_a_thousand_connections_that_wait_for_memory_go_on_one_after_the_other),
        MEMORY + "_serve", "if self._serving:", "if False:",
    ),
    "time: the wait for memory is the peer's": Mutant(
        alone(C.test_the_time_that_a_connection_waits_for_memory_is_not_the_peers),
        CONNECTION + "_enlarge", "self._frame_began += self._now() - self._wanting_since", "pass",
    ),
    "time: half a frame may take for ever": Mutant(
        alone(C.test_idle_and_slow_peers_are_closed, C.BEGUN, 31.0, True),
        CONNECTION + "check_time", 'self.close("slow", "a request was not whole in time")', "pass",
    ),
    "time: idle although a request is under way": Mutant(
        not_idle_while_a_request_is_under_way,
        CONNECTION + "check_time", "self.quiet and (now", "(now",
    ),
    "send: although the peer does not read": Mutant(
        alone(C.test_a_peer_that_does_not_read_holds_one_chunk),
        CONNECTION + "_send", "while self._may_send:", "while not self._loading:",
    ),
    "send: not continued when a chunk is read": Mutant(
        alone(C.test_records_that_are_not_cached_are_read_by_another_thread),
        CONNECTION + "_loaded", "self._go_on()", "pass",
    ),
    "drain: further requests begin": Mutant(
        alone(C.test_a_connection_that_finishes_begins_no_further_request),
        CONNECTION + "_begin_next", "if self._finishing:", "if False:",
    ),
    "end of the peer: what it produced is dropped": Mutant(
        alone(C.test_what_a_peer_has_produced_is_appended_after_it_has_closed),
        CONNECTION + "eof_received", "return self._producing and not self.quiet", "return False",
    ),
    "wait: no second look": Mutant(
        waiting(W.test_records_that_came_before_the_wait_are_seen),
        "waiting:Waiting.wait", "if self._ended or self._is_ready(wait):", "if self._ended:",
    ),
    "wait: a wake-up for each append": Mutant(
        waiting(W.test_an_append_ends_the_wait_that_has_enough),
        "waiting:Waiting._listen", "first = not self._changed", "first = True",
    ),
    "wait: one that fails takes the others with it": Mutant(
        waiting(W.test_a_fetch_that_fails_ends_alone),
        "waiting:Waiting._is_ready", "return True", "raise",
    ),
    "wait: not heard": Mutant(
        waiting(W.test_an_append_ends_the_wait_that_has_enough),
        "waiting:Waiting._listen", "partition.parts.view.listen(heard)", "pass",
    ),
    "wait: answered twice": Mutant(
        waiting(W.test_a_wait_ends_once),
        "waiting:Waiting.end", "if wait is not None and not wait.over:", "if True:",
    ),
    "wait: a timer for each fetch": Mutant(
        waiting(W.test_many_short_waits_leave_one_timer),
        "waiting:Waiting._forget_later", "if not self._forgetting:", "if True:",
    ),
    "wait: begins during the drain": Mutant(
        waiting(W.test_a_drain_ends_all_waits_and_those_that_follow),
        "waiting:Waiting.end_all", "self._ended = True", "pass",
    ),
    "sync: answered before": Mutant(
        syncing(W.test_appends_of_one_partition_share_an_fsync),
        S + "_run", "sync(range(start, stop))", "pass",
    ),
    "sync: only the first append": Mutant(
        syncing(the_whole_range_is_synced, "patch"),
        S + "_run", "stop = max(", "stop = min(",
    ),
    "sync: a failed one counts": Mutant(
        syncing(W.test_a_failed_fsync_fails_all_its_appends, "patch"),
        S + "_run", "error = raised", "pass",
    ),
    "sync: answered outside of the loop": Mutant(
        syncing(W.test_appends_of_one_partition_share_an_fsync),
        S + "_run", "self._deliver(tell)", "tell()",
    ),
    "sync: two at a time for a partition": Mutant(
        syncing(W.test_an_append_during_an_fsync_waits_for_the_next, "patch"),
        S + "add", "if queue.running:", "if False:",
    ),
    "produce: answered before the sync": Mutant(
        fsync_is_awaited, "handlers.produce:produce",
        "produced.answer_when_durable() if produced.appended else None", "None",
    ),
    "header: tags for ApiVersions": Mutant(
        headers, "broker:_encoded", "key != API_VERSIONS and is_flexible(", "is_flexible(",
    ),
    "header: never tags": Mutant(
        headers, "broker:_encoded", "key != API_VERSIONS and is_flexible(key, version)", "False",
    ),
    "header: another correlation id": Mutant(
        headers, "broker:_encoded", "response_head(size, correlation_id,", "response_head(size, 1,",
    ),
    "malformed: the buffer is kept": Mutant(
        memory_of_malformed_frames, "broker:Broker.begin",
        'connection.close("malformed", str(error))\n        connection.release()',
        'connection.close("malformed", str(error))',
    ),
    "malformed: answered if a worker finds it": Mutant(
        memory_of_malformed_frames, "broker:Broker._finish",
        "isinstance(result, MalformedFrameError)", "False",
    ),
    "codec: the end of the buffer": Mutant(
        a_string_beyond_the_frame,
        "protocol.codec:_Decoder.value", "if {count} > {end} - at", "if {count} > len(frame) - at",
    ),
    "codec: as many elements as are claimed": Mutant(
        alone(test_codec.test_a_frame_has_a_limited_number_of_elements, None),
        "protocol.codec:_Decoder.array", "if budget < 0:", "if budget < -(10**9):",
    ),
    "accept: what is not connected does not count": Mutant(
        limits, "network.acceptor:Acceptor.connecting", "not connection.made and", "False and",
    ),
    "workers: a wake-up that is never taken back": Mutant(
        wake_ups, "workers:LoopCalls._run", "self._woken = False", "pass",
    ),
    "workers: a call that fails takes the others with it": Mutant(
        wake_ups, "workers:LoopCalls._run", "self._loop.call_exception_handler(", "raise error; (",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    """Decoders are generated, and handlers are looked up, before and after each mutant."""
    for cached in (codec.decoder, apis.handler):
        cached.cache_clear()
    yield
    for cached in (codec.decoder, apis.handler):
        cached.cache_clear()


FOUND_OUT = (
    *(AssertionError, LookupError, OSError, EOFError, RecursionError, ValueError),
    *(codec.MalformedFrameError, pytest.fail.Exception),
)


def plant(mutant: Mutant, patch: pytest.MonkeyPatch) -> None:
    place, _, name = mutant.function.partition(":")
    whole = place if place.startswith("logstore.") else f"logstore.kafka.{place}"
    module = importlib.import_module(whole)
    owner: Any = module
    *above, last = name.split(".")
    for each in above:
        owner = getattr(owner, each)
    source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
    assert source.count(mutant.old) == 1, f"{mutant.function} has not once: {mutant.old}"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(mutant.old, mutant.new), "<mutant>", "exec", flags)
    made: dict[str, Any] = {}
    exec(code, module.__dict__, made)
    patch.setattr(owner, last, made[last])


@pytest.mark.parametrize(
    "killer",
    dict.fromkeys(each.killer for each in MUTANTS.values()),
    ids=lambda each: each.__name__,
)
def test_without_a_mutant_each_killer_is_content(
    killer: Killer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "seconds", kit.PATIENCE)  # nothing is waited for in vain
    killer(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_listener_with_one_step_changed_is_found_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepest = sys.getrecursionlimit()  # a test before this one may have left a higher limit
    sys.setrecursionlimit(1000)
    try:
        with monkeypatch.context() as patch:
            plant(MUTANTS[name], patch)
            with pytest.raises(FOUND_OUT):
                MUTANTS[name].killer(tmp_path)
    finally:
        sys.setrecursionlimit(deepest)


def test_there_are_at_least_forty_mutants() -> None:
    assert len(MUTANTS) >= 40
