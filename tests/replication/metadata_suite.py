"""One suite for every implementation of `Metadata`: embedded, ZooKeeper, simulated.

A subclass of MetadataSuite whose name starts with Test gives the fixture `world`.  The suite uses
no thread and no clock of its own, so that a simulated world can run it: everything that happens
later is waited for by `world.until`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import pytest

from logstore.errors import ClosedError
from logstore.replication.metadata import (
    ANY,
    Check,
    Committed,
    Create,
    Delete,
    Metadata,
    Op,
    Outcome,
    Refused,
    SessionState,
    Set,
    Unknown,
)

ROOTS = ("/a", "/b")


class World(Protocol):
    """One tree, and the means to disturb it."""

    def session(self) -> Metadata:
        """Return a new session, not started."""

    def expire(self, session: Any) -> None:
        """End a session from outside, as if its process were gone."""

    def until(self, holds: Callable[[], object]) -> None:
        """Let things happen until `holds()` is true; fail if that takes too long."""


class Seat:
    """A started session, and all that it was told."""

    def __init__(self, world: World, roots: tuple[str, ...] = ROOTS, *, start: bool = True) -> None:
        self.world = world
        self.session = world.session()
        self.changed: list[str] = []
        self.moved: list[SessionState] = []
        self.roots = roots
        if start:
            self.start()

    def start(self) -> None:
        self.session.start(self.roots, self.changed.append, self.moved.append, timeout=30)

    def commit(self, *ops: Op) -> Outcome:
        found: list[Outcome] = []
        self.session.commit(ops, found.append)
        self.world.until(lambda: found)
        assert len(found) == 1
        return found[0]

    def done(self, *ops: Op) -> tuple[int, ...]:
        outcome = self.commit(*ops)
        assert isinstance(outcome, Committed), outcome
        return outcome.versions

    def sync(self) -> None:
        synced: list[bool] = []
        self.session.sync(lambda: synced.append(True))
        self.world.until(lambda: synced)

    def read(self, path: str) -> tuple[bytes, int] | None:
        return self.session.read(path)

    def sees(self, path: str, data: bytes | None) -> None:
        """Wait until the mirror has these contents."""

        def has() -> bool:
            found = self.session.read(path)
            return (found and found[0]) == data

        self.world.until(has)


class MetadataSuite:
    """What callers of `Metadata` rely on."""

    @pytest.fixture
    def world(self) -> World:
        raise NotImplementedError

    @pytest.fixture
    def seat(self, world: World) -> Seat:
        return Seat(world)

    @pytest.fixture
    def other(self, world: World) -> Seat:
        return Seat(world)

    # ---- commits: atomic, conditional, linearizable ----

    def test_create_makes_version_0_and_the_missing_parents(self, seat: Seat) -> None:
        assert seat.done(Create("/a/b/c", b"x")) == (0,)
        assert seat.read("/a/b/c") == (b"x", 0)
        assert seat.read("/a/b") == (b"", 0)
        assert seat.read("/a") == (b"", 0)
        assert seat.session.children("/a") == ["b"]
        assert seat.session.children("/a/b") == ["c"]
        assert seat.session.children("/a/b/c") == []
        assert seat.session.children("/a/none") == []

    def test_children_are_in_order(self, seat: Seat) -> None:
        for name in ("b", "10", "a", "9"):
            seat.done(Create(f"/a/{name}", b""))
        assert seat.session.children("/a") == ["10", "9", "a", "b"]

    def test_a_set_raises_the_version_by_1(self, seat: Seat) -> None:
        seat.done(Create("/a", b"0"))
        for version in range(3):
            assert seat.done(Set("/a", b"%d" % version, version)) == (version + 1,)
        assert seat.done(Set("/a", b"any", ANY)) == (4,)
        assert seat.read("/a") == (b"any", 4)

    def test_delete_and_create_start_again_at_0(self, seat: Seat) -> None:
        seat.done(Create("/a", b"0"), Set("/a", b"1", 0))
        assert seat.done(Delete("/a", 1)) == (-1,)
        assert seat.read("/a") is None
        assert seat.done(Create("/a", b"2")) == (0,)
        assert seat.read("/a") == (b"2", 0)

    def test_the_ops_of_a_commit_are_done_in_order(self, seat: Seat) -> None:
        versions = seat.done(
            *(Create("/a/x", b"1"), Set("/a/x", b"2", 0), Check("/a/x", 1)),
            *(Delete("/a/x", 1), Create("/a/x", b"3"), Create("/a/y/z", b"4"), Check("/a/y", 0)),
        )
        assert versions == (0, 1, 1, -1, 0, 0, 0)
        assert seat.read("/a/x") == (b"3", 0)
        assert seat.read("/a/y/z") == (b"4", 0)

    def test_a_check_of_any_version_asks_only_that_the_path_exists(self, seat: Seat) -> None:
        assert seat.commit(Check("/a", ANY)) == Refused(0, "missing")
        seat.done(Create("/a", b""), Set("/a", b"", 0))
        assert seat.done(Check("/a", ANY), Check("/a", 1)) == (ANY, 1)

    @pytest.mark.parametrize(
        ("op", "why"),
        [
            (Create("/a/x", b"new"), "exists"),
            (Create("/a", b"new"), "exists"),
            (Create("/a/e/below", b"new"), "no parent"),
            (Create("/a/e/far/below", b"new"), "no parent"),
            (Set("/a/x", b"new", 0), "version"),
            (Set("/a/x", b"new", 2), "version"),
            (Set("/a/none", b"new", 0), "missing"),
            (Set("/a/none", b"new", ANY), "missing"),
            (Delete("/a/x", 0), "version"),
            (Delete("/a/none", 0), "missing"),
            (Delete("/a/none"), "missing"),
            (Delete("/a"), "not empty"),
            (Check("/a/x", 0), "version"),
            (Check("/a/none", 0), "missing"),
            (Check("/a/none/far/away", ANY), "missing"),
        ],
    )
    @pytest.mark.parametrize("before", [0, 2])
    def test_an_op_whose_condition_fails_refuses_the_whole_commit(
        self, seat: Seat, other: Seat, op: Op, why: str, before: int
    ) -> None:
        seat.done(Create("/a/x", b"old"), Set("/a/x", b"older", 0), Create("/a/e", b"", True))
        good: list[Op] = [Set("/a/x", b"lost", 1), Create("/b/deep/path", b"lost")]
        good = good[:before] and [Check("/a/x", 1), good[1]]
        after = Set("/a/x", b"also lost", ANY)
        assert seat.commit(*good, op, after) == Refused(before, why)  # type: ignore[arg-type]
        for each in (seat, other):
            each.sync()
            assert each.read("/a/x") == (b"older", 1)
            assert each.read("/b") is None
            assert each.session.children("/a") == ["e", "x"]

    def test_a_commit_sees_the_ops_before_it(self, seat: Seat) -> None:
        seat.done(Create("/a", b""))
        assert seat.commit(Set("/a", b"1", 0), Set("/a", b"2", 0)) == Refused(1, "version")
        assert seat.commit(Delete("/a"), Set("/a", b"2", 0)) == Refused(1, "missing")
        assert seat.read("/a") == (b"", 0)

    def test_an_empty_commit_is_done(self, seat: Seat) -> None:
        assert seat.done() == ()

    def test_contents_are_any_bytes(self, seat: Seat, other: Seat) -> None:
        contents = {
            "empty": b"",
            "binary": bytes(range(256)),
            "text": '{"name":"Zürich \U0001f600"}'.encode(),
            "large": random.Random(1).randbytes(300_000),
        }
        for name, data in contents.items():
            seat.done(Create(f"/a/{name}", data))
        other.sync()
        for name, data in contents.items():
            assert seat.read(f"/a/{name}") == (data, 0)
            assert other.read(f"/a/{name}") == (data, 0)

    def test_commits_of_one_session_are_answered_in_order(self, seat: Seat) -> None:
        seat.done(Create("/a", b""))
        answers: list[Outcome] = []
        for number in range(100):
            seat.session.commit([Set("/a", b"%d" % number, number)], answers.append)
        seat.world.until(lambda: len(answers) == 100)
        assert answers == [Committed((number + 1,)) for number in range(100)]

    def test_each_version_is_written_once_however_many_sessions_write(self, world: World) -> None:
        """Sessions add 1 to a number under a condition: no addition is lost or counted twice."""
        seats = [Seat(world) for _ in range(4)]
        seats[0].done(Create("/a/n", b"0"))
        for each in seats:
            each.sync()
        written: list[int] = []
        tries = [0] * len(seats)

        def add(number: int) -> None:
            seat = seats[number]
            found = seat.read("/a/n")
            assert found is not None
            data, version = found
            assert int(data) == version  # a read has the contents of its version

            def answered(outcome: Outcome) -> None:
                tries[number] += 1
                if isinstance(outcome, Committed):
                    written.append(outcome.versions[0])
                else:
                    assert outcome == Refused(0, "version")
                if len(written) < 60:
                    add(number)

            seat.session.commit([Set("/a/n", b"%d" % (version + 1), version)], answered)

        for number in range(len(seats)):
            add(number)
        world.until(lambda: len(written) >= 60)
        for each in seats:
            each.sync()
        world.until(lambda: len({each.read("/a/n") for each in seats}) == 1)
        assert sorted(written) == list(range(1, len(written) + 1))

    def test_sessions_that_create_the_same_parents_both_succeed(self, world: World) -> None:
        seats = [Seat(world) for _ in range(3)]
        outcomes: list[Outcome] = []
        for attempt in range(10):
            for number, seat in enumerate(seats):
                op = Create(f"/a/{attempt}/deep/path/{number}", b"")
                seat.session.commit([op], outcomes.append)
        world.until(lambda: len(outcomes) == 30)
        assert set(outcomes) == {Committed((0,))}
        for seat in seats:
            seat.sync()
            assert len(seat.session.children("/a")) == 10
            assert seat.session.children("/a/3/deep/path") == ["0", "1", "2"]

    def test_one_of_many_candidates_wins_each_election(self, world: World) -> None:
        """As a controller campaigns: create an ephemeral path and raise an epoch that was read."""
        seats = {number: Seat(world) for number in range(3)}
        seats[0].done(Create("/b/epoch", b"0"))
        for term in range(8):
            for seat in seats.values():
                seat.sync()
                assert seat.read("/b/epoch") == (b"%d" % term, term)
            outcomes: dict[int, Outcome] = {}
            for number, seat in seats.items():
                ops = [
                    Create("/b/controller", b"%d" % number, True),
                    Set("/b/epoch", b"%d" % (term + 1), term),
                ]

                seat.session.commit(ops, partial(outcomes.__setitem__, number))
            world.until(lambda outcomes=outcomes: len(outcomes) == 3)  # type: ignore[misc]
            (winner,) = [n for n, each in outcomes.items() if isinstance(each, Committed)]
            assert set(outcomes.values()) == {Committed((0, term + 1)), Refused(0, "exists")}
            for seat in seats.values():
                seat.sees("/b/controller", b"%d" % winner)
            seats[winner].session.close()
            del seats[winner]
            seats[winner] = Seat(world)

    def test_a_conditional_commit_may_be_repeated(self, seat: Seat, other: Seat) -> None:
        """After a lost answer: the second try says that the version has moved, and does nothing."""
        seat.done(Create("/a", b"0"))
        ops = [Set("/a", b"mine", 0), Create("/b/x", b"")]
        assert seat.done(*ops) == (1, 0)
        assert seat.commit(*ops) == Refused(0, "version")
        other.sync()
        assert other.read("/a") == (b"mine", 1)

    # ---- the mirror ----

    def test_the_mirror_has_a_commit_when_it_is_answered(self, seat: Seat) -> None:
        found: list[object] = []
        seat.session.commit(
            [Create("/a/x", b"1"), Create("/a/y", b"2"), Set("/a/y", b"3", 0)],
            lambda outcome: found.extend([seat.read("/a/x"), seat.read("/a/y")]),
        )
        seat.world.until(lambda: found)
        assert found == [(b"1", 0), (b"3", 1)]
        found.clear()
        seat.session.commit(
            [Delete("/a/x"), Delete("/a/y", 1), Create("/a/x", b"4")],
            lambda outcome: found.extend([seat.read("/a/x"), *seat.session.children("/a")]),
        )
        seat.world.until(lambda: found)
        assert found == [(b"4", 0), "x"]

    def test_start_returns_with_all_that_was_acknowledged_before(
        self, world: World, seat: Seat
    ) -> None:
        for number in range(30):
            seat.done(Create(f"/a/{number}/below/it", b"%d" % number))
        late = Seat(world)
        assert len(late.session.children("/a")) == 30
        assert late.read("/a/29/below/it") == (b"29", 0)
        assert late.session.state == "connected"
        assert late.moved == []

    def test_sync_brings_all_that_was_acknowledged_to_others(self, seat: Seat, other: Seat) -> None:
        seat.done(Create("/a/n", b""))
        for version in range(20):
            seat.done(Set("/a/n", b"", version), Create(f"/a/{version}/deep", b"x"))
            other.sync()
            assert other.read("/a/n") == (b"", version + 1)
            assert other.read(f"/a/{version}/deep") == (b"x", 0)

    def test_the_mirror_never_goes_back(self, seat: Seat, other: Seat) -> None:
        seat.done(Create("/a/n", b""))
        other.sync()
        seen: list[int] = []
        answers: list[Outcome] = []

        def look() -> None:
            found = other.read("/a/n")
            assert found is not None
            seen.append(found[1])

        for version in range(200):
            seat.session.commit([Set("/a/n", b"", version)], answers.append)
            look()
        seat.world.until(lambda: look() or (len(answers) == 200 and seen[-1] == 200))  # type: ignore[func-returns-value]
        assert seen == sorted(seen)

    def test_only_the_roots_are_in_the_mirror(self, world: World, seat: Seat) -> None:
        seat.done(Create("/a/x", b""), Create("/ab/x", b""), Create("/c/x", b"there"))
        assert seat.read("/a/x") == (b"", 0)
        assert seat.read("/ab/x") is None
        assert seat.read("/c/x") is None
        assert seat.session.children("/c") == []
        assert all(path.startswith("/a") and path != "/ab" for path in seat.changed)
        assert Seat(world, ("/c",)).read("/c/x") == (b"there", 0)
        assert Seat(world, ("/",)).session.children("/ab") == ["x"]

    def test_a_root_may_be_created_deleted_and_created_again(self, seat: Seat, other: Seat) -> None:
        assert other.read("/a") is None
        for number in range(3):
            seat.done(Create("/a", b"%d" % number), Create("/a/x", b"%d" % number))
            other.sees("/a/x", b"%d" % number)
            seat.done(Delete("/a/x"), Delete("/a"))
            other.sees("/a", None)
            other.sees("/a/x", None)
        assert other.session.children("/a") == []

    def test_a_path_that_is_deleted_and_created_at_once_is_the_new_one(
        self, seat: Seat, other: Seat
    ) -> None:
        seat.done(Create("/a/x/below", b"old"), Create("/a/x/gone", b""))
        other.sees("/a/x/gone", b"")
        for number in range(10):
            data = b"%d" % number
            children = [Delete("/a/x/gone")] if number == 0 else []
            seat.done(Delete("/a/x/below"), *children, Delete("/a/x"), Create("/a/x/below", data))
            if number % 2:
                other.sees("/a/x/below", data)
        other.sees("/a/x/below", b"9")
        other.world.until(lambda: other.session.children("/a/x") == ["below"])
        assert other.read("/a/x/gone") is None
        assert other.read("/a/x") == (b"", 0)
        seat.done(Create("/a/x/later", b"watched"))
        other.sees("/a/x/later", b"watched")

    # ---- watchers ----

    def test_the_watcher_is_called_after_each_kind_of_change(self, seat: Seat, other: Seat) -> None:
        for step, op in enumerate(
            [
                *(Create("/a/x/y", b"0"), Set("/a/x/y", b"1", 0), Set("/a/x/y", b"2", 1)),
                *(Delete("/a/x/y"), Create("/a/x/y", b"3"), Delete("/a/x/y"), Delete("/a/x")),
            ]
        ):
            for each in (seat, other):
                each.changed.clear()
            seat.done(op)
            for each in (seat, other):
                each.world.until(lambda each=each, op=op: op.path in each.changed)  # type: ignore[misc]
                assert (each.read(op.path) is None) == isinstance(op, Delete), step

    def test_the_watcher_is_called_when_the_mirror_has_the_change(
        self, seat: Seat, world: World
    ) -> None:
        """The last call for a path sees the last contents: nothing is left to be polled."""
        watching = world.session()
        seen: dict[str, bytes | None] = {}

        def changed(path: str) -> None:
            found = watching.read(path)
            seen[path] = found and found[0]

        watching.start(ROOTS, changed, lambda state: None, timeout=30)
        answers: list[Outcome] = []
        for number in range(20):
            seat.done(Create(f"/a/{number}", b"first"))
        for number in range(20):
            seat.session.commit([Set(f"/a/{number}", b"second", 0)], answers.append)
            if number % 3 == 0:
                seat.session.commit([Delete(f"/a/{number}")], answers.append)
        last = {f"/a/{n}": b"second" if n % 3 else None for n in range(20)}
        world.until(lambda: {path: seen.get(path, b"?") for path in last} == last)
        watching.close()

    def test_every_one_of_many_changes_arrives(self, seat: Seat, other: Seat) -> None:
        answers: list[Outcome] = []
        for number in range(300):
            seat.session.commit([Create(f"/a/{number}/state", b"0")], answers.append)
        seat.world.until(lambda: len(answers) == 300)
        other.sync()
        other.changed.clear()
        for number in range(300):
            seat.session.commit([Set(f"/a/{number}/state", b"1", 0)], answers.append)
        paths = {f"/a/{number}/state" for number in range(300)}
        other.world.until(lambda: set(other.changed) >= paths)
        assert all(other.read(path) == (b"1", 1) for path in paths)

    def test_a_callback_that_raises_stops_no_other(
        self, world: World, seat: Seat, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*arguments: object) -> None:
            raise ZeroDivisionError("a fault of the caller")

        bad = world.session()
        bad.start(ROOTS, fail, fail, timeout=30)
        bad.commit([Create("/a/x", b"")], fail)
        seat.sees("/a/x", b"")
        synced: list[bool] = []
        bad.sync(lambda: synced.append(True))
        world.until(lambda: synced)
        assert "a fault of the caller" in caplog.text
        bad.close()

    def test_a_callback_may_commit(self, seat: Seat) -> None:
        outcomes: list[Outcome] = []

        def chain(outcome: Outcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) < 10:
                seat.session.commit([Set("/a", b"", len(outcomes) - 1)], chain)

        seat.session.commit([Create("/a", b"")], chain)
        seat.world.until(lambda: len(outcomes) == 10)
        assert outcomes == [Committed((version,)) for version in range(10)]

    # ---- sessions and ephemeral paths ----

    def test_an_ephemeral_path_is_deleted_when_its_session_closes(
        self, seat: Seat, other: Seat
    ) -> None:
        seat.done(Create("/a/ids/1", b"mine", True), Create("/a/kept", b""))
        other.sees("/a/ids/1", b"mine")
        assert seat.done(Set("/a/ids/1", b"changed", 0)) == (1,)
        other.sees("/a/ids/1", b"changed")
        other.changed.clear()
        seat.session.close()
        assert seat.session.state == "lost"
        other.sync()
        assert other.read("/a/ids/1") is None
        assert other.session.children("/a/ids") == []
        assert other.read("/a/kept") == (b"", 0)
        assert "/a/ids/1" in other.changed

    def test_an_ephemeral_path_is_deleted_when_its_session_expires(
        self, seat: Seat, other: Seat, world: World
    ) -> None:
        seat.done(Create("/a/ids/1", b"one", True), Create("/a/kept", b""))
        other.done(Create("/a/ids/2", b"two", True))
        world.expire(seat.session)
        other.sees("/a/ids/1", None)
        world.until(lambda: seat.session.state == "lost")
        world.until(lambda: seat.moved[-1:] == ["lost"])
        assert seat.moved.count("lost") == 1
        other.sync()
        assert other.session.children("/a/ids") == ["2"]
        assert other.session.state == "connected"

    def test_a_session_that_has_ended_commits_nothing_more(
        self, seat: Seat, other: Seat, world: World
    ) -> None:
        other.done(Create("/a/n", b"0"))
        world.expire(seat.session)
        world.until(lambda: seat.session.state == "lost")
        synced: list[bool] = []
        seat.session.sync(lambda: synced.append(True))
        assert seat.commit(Set("/a/n", b"late", ANY)) == Unknown()
        assert seat.commit(Create("/a/late", b"", True)) == Unknown()
        other.sync()
        assert other.read("/a/n") == (b"0", 0)
        assert other.read("/a/late") is None
        assert synced == []
        seat.session.close()

    def test_commits_around_the_end_of_a_session_are_answered_once(
        self, seat: Seat, other: Seat, world: World
    ) -> None:
        seat.done(Create("/a/n", b""))
        answers: list[Outcome] = []
        for version in range(50):
            seat.session.commit([Set("/a/n", b"", version)], answers.append)
        world.expire(seat.session)
        for version in range(50, 60):
            seat.session.commit([Set("/a/n", b"", version)], answers.append)
        world.until(lambda: len(answers) == 60)
        world.until(lambda: seat.session.state == "lost")
        assert seat.commit(Check("/a/n", ANY)) == Unknown()
        assert len(answers) == 60
        done = [each for each in answers if isinstance(each, Committed)]
        other.sync()
        found = other.read("/a/n")
        assert found is not None
        # Unknown may hide a commit that was done; Committed is never taken back.
        assert len(done) <= found[1] <= len([a for a in answers if not isinstance(a, Refused)])

    def test_a_new_session_may_take_the_place_of_one_that_ended(
        self, seat: Seat, world: World
    ) -> None:
        seat.done(Create("/a/ids/1", b"first life", True))
        world.expire(seat.session)
        world.until(lambda: seat.session.state == "lost")
        second = Seat(world)
        second.sees("/a/ids/1", None)
        assert second.done(Create("/a/ids/1", b"second life", True)) == (0,)
        seat.session.close()  # late: it must not take the new path away
        second.sync()
        assert second.read("/a/ids/1") == (b"second life", 0)

    def test_a_successor_deletes_the_path_of_its_predecessor_in_one_commit(
        self, seat: Seat, other: Seat
    ) -> None:
        """Registration: a node that has the lock of the directory knows that the holder is dead."""
        seat.done(Create("/a/ids/1", b"old", True), Create("/a/epochs/1", b""))
        other.done(
            Set("/a/epochs/1", b"", 0), Delete("/a/ids/1", 0), Create("/a/ids/1", b"new", True)
        )
        seat.session.close()
        other.sync()
        assert other.read("/a/ids/1") == (b"new", 0)

    def test_after_close_nothing_is_called_and_nothing_can_be_committed(
        self, seat: Seat, other: Seat
    ) -> None:
        answers: list[Outcome] = []
        seat.session.commit([Create("/a/x", b"")], answers.append)
        seat.session.close()
        assert len(answers) == 1
        seat.session.close()
        moved, changed = list(seat.moved), list(seat.changed)
        with pytest.raises(ClosedError):
            seat.session.commit([Create("/a/y", b"")], answers.append)
        with pytest.raises(ClosedError):
            seat.session.sync(lambda: None)
        other.done(Create("/a/z", b""))
        other.sync()
        assert (seat.moved, seat.changed, len(answers)) == (moved, changed, 1)
        assert other.read("/a/y") is None

    def test_a_session_that_was_never_started_can_be_closed(self, world: World) -> None:
        session = world.session()
        assert session.state != "connected"
        session.close()
        with pytest.raises(ClosedError):
            session.start(ROOTS, lambda path: None, lambda state: None)
