"""The history checker finds each planted fault, and nothing in a correct history."""

from __future__ import annotations

import threading

import pytest

from logstore import IndeterminateAppendError, RecordTooLargeError
from logstore.testing.history import ALL_KINDS, DEFAULT_KINDS, assert_clean, check
from logstore.testing.history_findings import Finding, HistoryViolation
from logstore.testing.operations import (
    Commit,
    Committed,
    Event,
    History,
    MalformedHistoryError,
    Poll,
    Read,
    Recorder,
    Send,
)
from tests.conftest import MakeLog
from tests.testing.history_worlds import COPY, World

PLANTS = 200
CLEAN = 10_000

# What a plant brings along of necessity.
IMPLIED = {
    # A reader that passes a hole has skipped it, and cannot copy it.
    "lost-write": {"poll-skip", "int-poll-skip", "exactly-once-copy"},
    # Committed readers do not get a committed value.
    "torn-transaction": {"poll-skip", "int-poll-skip", "exactly-once-copy"},
    # The value that was made up was never copied.
    "inconsistent-offsets": {"exactly-once-copy"},
    # Others read what the two wrote.
    "G0": {"G1c"},
}
ISOLATED = {"int-send-skip", "G0", "G1c"}


def kinds_for(plant: str) -> tuple[str, ...]:
    return ALL_KINDS if plant in ISOLATED else DEFAULT_KINDS


def findings_of(world: World, kinds: tuple[str, ...]) -> list[Finding]:
    return check(world.events, kinds=kinds, caught_up=True, copies=[COPY])


@pytest.mark.parametrize("plant", ALL_KINDS)
def test_every_planted_anomaly_is_found_and_named(plant: str) -> None:
    found = seed = 0
    while found < PLANTS:
        seed += 1
        assert seed < 60 * PLANTS, f"only {found} of the worlds gave an occasion"
        world = World(seed, plant, isolated=plant in ISOLATED)
        if not world.planted:
            continue
        findings = findings_of(world, kinds_for(plant))
        kinds = {finding.kind for finding in findings}
        assert plant in kinds, f"seed {seed}: {plant} was planted, {sorted(kinds)} found"
        assert kinds <= {plant} | IMPLIED.get(plant, set()), f"seed {seed}: {kinds}"
        assert all(finding.operations and str(finding) for finding in findings)
        found += 1


@pytest.mark.parametrize("part", range(4))
def test_no_sound_history_raises_an_alarm(part: int) -> None:
    operations = 0
    for seed in range(part * CLEAN // 4, (part + 1) * CLEAN // 4):
        isolated = seed % 4 == 0
        world = World(seed, isolated=isolated)
        kinds = ALL_KINDS if isolated else DEFAULT_KINDS
        findings = findings_of(world, kinds)
        assert not findings, f"seed {seed}: " + "\n".join(map(str, findings))
        operations += len(world.events)
    assert operations > CLEAN


# ---- by hand: the text of each finding, and histories without one ----


def send(process: str, value: str, offset: int | None, outcome: str = "ok") -> list[Event]:
    return [
        Event("invoke", process, (Send("p", value),)),
        Event(outcome, process, (Send("p", value, offset),)),  # type: ignore[arg-type]
    ]


def poll(consumer: str, *seen: tuple[int, str], isolation: str = "read_uncommitted") -> list[Event]:
    reads = tuple(Read("p", offset, value) for offset, value in seen)
    return [
        Event("invoke", consumer),
        Event("ok", consumer, (Poll(consumer, reads, isolation),)),
    ]


def commit(process: str, offset: int, *, reset: bool = False, outcome: str = "ok") -> list[Event]:
    act = Commit("g", (("p", offset),), process, reset=reset)
    return [Event("invoke", process, (act,)), Event(outcome, process)]  # type: ignore[arg-type]


def read_back(process: str, offset: int) -> list[Event]:
    return [
        Event("invoke", process),
        Event("ok", process, (Committed("g", (("p", offset),)),)),
    ]


def kinds_of(*events: list[Event], caught_up: bool = False) -> list[str]:
    joined = [event for part in events for event in part]
    return [finding.kind for finding in check(joined, caught_up=caught_up)]


def test_a_finding_names_its_operations_and_says_what_they_show() -> None:
    events = [
        *send("p1", "a", 0),
        *send("p1", "b", 1),
        *send("p1", "c", 2),
        *poll("c1", (0, "a"), (2, "c")),
    ]
    lost, skipped = check(events)
    assert (lost.kind, lost.partition, lost.offsets, lost.values) == (
        "lost-write",
        "p",
        (1,),
        ("b",),
    )
    assert [operation.number for operation in lost.operations] == [1, 3]
    assert lost.message == "'b' was acknowledged at offset 1 of 'p', and is not there"
    assert skipped.kind == "int-poll-skip"
    with pytest.raises(HistoryViolation, match="2 findings") as caught:
        assert_clean(events)
    assert [finding.kind for finding in caught.value.findings] == ["lost-write", "int-poll-skip"]
    assert "#1 of 'p1' ok: send('p', 'b') -> 1" in str(caught.value)


def test_what_nobody_tried_to_read_is_unseen_only_when_all_have_caught_up() -> None:
    events = [send("p1", "a", 0), poll("c1", (0, "a")), send("p1", "b", 1)]
    assert kinds_of(*events) == []
    assert kinds_of(*events, caught_up=True) == ["unseen"]


def test_a_consumer_that_begins_late_has_lost_nothing() -> None:
    assert kinds_of(send("p1", "a", 0), send("p1", "b", 1), poll("c1", (1, "b"))) == []


def test_an_indeterminate_offset_is_not_believed() -> None:
    # The first may have been cut off again: then its offset is free.
    assert kinds_of(send("p1", "a", 0, "info"), send("p2", "b", 0), poll("c1", (0, "b"))) == []


def test_a_value_that_was_sent_twice_may_be_there_twice() -> None:
    assert kinds_of(send("p1", "a", 0), send("p2", "a", 1), poll("c1", (0, "a"), (1, "a"))) == []
    assert kinds_of(send("p1", "a", 0), poll("c1", (0, "a"), (1, "a"))) == ["duplicate"]


def test_a_refused_value_must_not_be_read_by_anyone() -> None:
    assert kinds_of(send("p1", "a", None, "fail"), poll("c1", (0, "a"))) == ["G1a"]


def test_an_aborted_value_may_be_read_by_who_asks_for_everything() -> None:
    aborted = [
        Event("invoke", "t", (), True),
        Event("fail", "t", (Send("p", "a", 0),), True),
    ]
    assert kinds_of(aborted, poll("c1", (0, "a"))) == []
    assert kinds_of(aborted, poll("c1", (0, "a"), isolation="read_committed")) == ["G1a"]


def test_offsets_of_a_group_go_back_only_when_told_to() -> None:
    assert kinds_of(commit("c1", 5), commit("c1", 4)) == ["commit-regression"]
    assert kinds_of(commit("c1", 5), read_back("c1", 4)) == ["commit-regression"]
    assert kinds_of(commit("c1", 5), commit("c1", 4, reset=True), commit("c1", 6)) == []
    assert kinds_of(commit("c1", 5), commit("c1", 2, reset=True), read_back("c1", 2)) == []
    back = [commit("c1", 5), commit("c1", 2, reset=True), commit("c1", 4), commit("c1", 3)]
    assert kinds_of(*back) == ["commit-regression"]
    # It is unknown whether and when the reset happened.
    assert kinds_of(commit("c1", 5), commit("c2", 2, reset=True, outcome="info"),
                    commit("c1", 3), read_back("c1", 2)) == []  # fmt: skip
    assert kinds_of(commit("c1", 5, outcome="info"), commit("c1", 4), read_back("c2", 5)) == []


def test_commits_at_the_same_time_may_end_either_way() -> None:
    low, high = commit("c1", 4), commit("c2", 5)
    beside = [low[0], high[0], low[1], high[1]]
    assert kinds_of(beside, read_back("c1", 4)) == []
    assert kinds_of(beside, read_back("c1", 5)) == []
    assert kinds_of(beside, read_back("c1", 3)) == ["commit-regression"]


@pytest.mark.parametrize(
    ("events", "place", "reason"),
    [
        ([Event("ok", "a")], 0, "nothing under way"),
        ([Event("invoke", "a"), Event("invoke", "b"), Event("invoke", "a")], 2, "has not ended"),
        ([Event("invoke", "a"), Event("ok", "a"), Event("prepare", "a")], 2, "nothing under way"),
    ],
)
def test_events_that_tell_no_history_are_refused(
    events: list[Event], place: int, reason: str
) -> None:
    with pytest.raises(MalformedHistoryError, match=reason) as caught:
        History(events)
    assert caught.value.place == place


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no such kind: lost-wirte"):
        check([], kinds=["lost-wirte"])


def test_a_recorder_tells_the_three_outcomes_apart() -> None:
    recorder = Recorder()
    with recorder.send("p1", "p", b"a") as pending:
        pending.acknowledged(0)
    with (
        pytest.raises(IndeterminateAppendError),
        recorder.send("p1", "p", b"b"),
    ):
        raise IndeterminateAppendError("fsync failed", offsets=range(1, 2))
    with pytest.raises(RecordTooLargeError), recorder.send("p1", "p", b"c"):
        raise RecordTooLargeError(10, 5)
    with pytest.raises(OSError), recorder.send("p1", "p", b"d"):
        raise OSError(5, "Input/output error")
    with pytest.raises(KeyboardInterrupt), recorder.send("p1", "p", b"e"):
        raise KeyboardInterrupt
    recorder.send("p1", "p", b"f")  # under way when the history ends
    outcomes = [operation.outcome for operation in recorder.history()]
    assert outcomes == ["ok", "info", "fail", "info", "info", "info"]
    assert recorder.history().operations[0].acts == (Send("p", b"a", 0),)
    with pytest.raises(ValueError, match="no send waits for offset 7"):
        pending.acknowledged(7)


def test_threads_on_a_real_log_leave_a_sound_history(make_log: MakeLog) -> None:
    log = make_log(segment_bytes=4000)
    recorder = Recorder()
    where = ("orders", 0)

    def produce(name: str) -> None:
        for number in range(100):
            value = b"%s:%d" % (name.encode(), number)
            with recorder.send(name, where, value) as pending:
                pending.acknowledged(log.append(value))

    def consume(name: str) -> None:
        position = 0
        while position < 300:
            records = list(log.scan(position, max_records=17))
            if records:
                recorder.polled(name, records)
                position = records[-1].offset + 1

    threads = [threading.Thread(target=produce, args=(f"p{i}",)) for i in range(3)]
    threads += [threading.Thread(target=consume, args=(f"c{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    recorder.snapshot(where, log)
    history = recorder.history()
    assert_clean(history, caught_up=True)
    assert len(history) > 300
    with recorder.send("p9", where, b"gone") as pending:
        pending.acknowledged(300)
    recorder.snapshot(where, log)
    assert [finding.kind for finding in check(recorder.history())] == ["lost-write"]
