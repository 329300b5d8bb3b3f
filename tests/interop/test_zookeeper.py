"""ZooKeeperMetadata with real ZooKeeper servers: the suite of all metadata trees, and outages."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from logstore.errors import MetadataUnavailableError
from logstore.replication.metadata import (
    Check,
    Committed,
    Create,
    Delete,
    Op,
    Outcome,
    Refused,
    Set,
    Unknown,
)
from logstore.replication.zookeeper import ZooKeeperMetadata
from tests.replication.metadata_suite import ROOTS, MetadataSuite, Seat

from .zookeeper import Ensemble, require_zookeeper

# With three workers, JVMs and sessions of a second would wait for a CPU: in the campaigns.
pytestmark = [pytest.mark.interop, pytest.mark.slow]

_chroots = itertools.count()


class ZooKeeperWorld:
    """A tree in a chroot of its own."""

    def __init__(self, connect: str, session_timeout_ms: int = 4000) -> None:
        self.connect = f"{connect}/test-{next(_chroots)}"
        self.timeout_ms = session_timeout_ms
        self.sessions: list[ZooKeeperMetadata] = []

    def session(self) -> ZooKeeperMetadata:
        made = ZooKeeperMetadata(self.connect, session_timeout_ms=self.timeout_ms)
        self.sessions.append(made)
        return made

    def expire(self, session: ZooKeeperMetadata) -> None:
        """Close the session from a second connection: the servers then end it for the first."""
        from kazoo.client import KazooClient

        second = KazooClient(
            self.connect,
            client_id=session._client.client_id,
            timeout=self.timeout_ms / 1000,
        )
        second.start(timeout=30)
        second.stop()
        second.close()

    def until(self, holds: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "not in time"
            time.sleep(0.002)

    def close(self) -> None:
        for session in self.sessions:
            session.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    require_zookeeper()
    with Ensemble(tmp_path_factory.mktemp("zookeeper")) as alone:
        yield alone


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    require_zookeeper()
    with Ensemble(tmp_path_factory.mktemp("zookeeper"), 3) as ensemble:
        yield ensemble


@pytest.fixture
def world(server: Ensemble) -> Iterator[ZooKeeperWorld]:
    made = ZooKeeperWorld(server.connect)
    yield made
    made.close()


@pytest.fixture
def wide(three: Ensemble) -> Iterator[ZooKeeperWorld]:
    """Sessions of three servers, each with a server of its own choice."""
    made = ZooKeeperWorld(three.connect, 10_000)
    yield made
    made.close()


@pytest.mark.campaign
class TestOneServer(MetadataSuite):
    @pytest.fixture
    def world(self, server: Ensemble) -> Iterator[ZooKeeperWorld]:  # type: ignore[override]
        made = ZooKeeperWorld(server.connect)
        yield made
        made.close()


class TestThreeServers(MetadataSuite):
    @pytest.fixture
    def world(self, three: Ensemble) -> Iterator[ZooKeeperWorld]:  # type: ignore[override]
        made = ZooKeeperWorld(three.connect)
        yield made
        made.close()


def test_without_kazoo_the_error_has_the_command() -> None:
    code = (
        "import sys\nsys.modules['kazoo'] = None\n"
        "from logstore.replication.zookeeper import ZooKeeperMetadata\n"
        "ZooKeeperMetadata('localhost:1')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert 'pip install "logstore-engine[zookeeper]"' in ended.stderr


def test_no_server_is_an_error_with_the_time(unused_port: int) -> None:
    before = time.time()
    session = ZooKeeperMetadata(f"127.0.0.1:{unused_port}")
    with pytest.raises(MetadataUnavailableError, match=f"127.0.0.1:{unused_port}") as caught:
        session.start(ROOTS, lambda path: None, lambda state: None, timeout=0.5)
    assert before <= caught.value.since <= time.time()
    assert session.state == "lost"


@pytest.fixture
def unused_port() -> int:
    from .kafka import _free_ports

    (port,) = _free_ports(1)
    return port


def test_two_thousand_states_changed_at_once_arrive(world: ZooKeeperWorld) -> None:
    seat, other = Seat(world), Seat(world)
    count = 2_000
    answers: list[Outcome] = []
    for number in range(count):
        op = Create(f"/a/topics/{number % 20}/partitions/{number}/state", b"0" * 150)
        seat.session.commit([op], answers.append)
    world.until(lambda: len(answers) == count)
    assert set(answers) == {Committed((0,))}
    other.sync()
    paths = [f"/a/topics/{n % 20}/partitions/{n}/state" for n in range(count)]
    began = time.monotonic()
    for path in paths:
        seat.session.commit([Set(path, b"1" * 150, 0)], answers.append)
    for path in paths:
        other.sees(path, b"1" * 150)
    seconds = time.monotonic() - began
    print(f"{count} states changed and seen by another session in {seconds:.2f} s")
    began = time.monotonic()
    assert Seat(world).read(paths[-1]) == (b"1" * 150, 1)
    print(f"a new session has all of them after {time.monotonic() - began:.2f} s")


# ---- outages --------------------------------------------------------------------------------


def test_a_session_outlives_the_leader_of_the_servers(
    three: Ensemble, wide: ZooKeeperWorld
) -> None:
    seats = [Seat(wide) for _ in range(4)]
    seats[0].done(Create("/a/n", b"0"), Create("/a/ids/0", b"", True))
    for each in seats:
        each.sync()
    leader = three.leader
    three.kill(leader)
    try:
        # Unknown: the connection broke.  The same conditional commit may be repeated.
        for version in range(20):
            seat = seats[version % len(seats)]
            outcome = seat.commit(Set("/a/n", b"%d" % (version + 1), version))
            if outcome == Unknown():
                outcome = seat.commit(Set("/a/n", b"%d" % (version + 1), version))
            assert outcome in (Committed((version + 1,)), Refused(0, "version"))
        for each in seats:
            each.sees("/a/n", b"20")
            assert each.read("/a/ids/0") == (b"", 0)
            assert each.session.state == "connected"
            assert "lost" not in each.moved
    finally:
        three.start(leader)


def test_all_servers_are_killed_and_started_again(three: Ensemble) -> None:
    world = ZooKeeperWorld(three.connect, 12_000)
    try:
        seat, other = Seat(world), Seat(world)
        seat.done(Create("/a/n", b"0"), Create("/a/ids/1", b"mine", True))
        other.sync()
        three.kill_all()
        world.until(lambda: seat.moved == ["suspended"] and other.moved == ["suspended"])
        assert seat.session.state == "suspended"
        assert seat.read("/a/ids/1") == (b"mine", 0)  # the mirror stays
        answers: list[Outcome] = []
        synced: list[bool] = []
        seat.session.commit([Set("/a/n", b"1", 0)], answers.append)
        other.session.sync(lambda: synced.append(True))
        time.sleep(13)  # longer than the session: without servers nothing expires
        assert (answers, synced) == ([], [])
        assert seat.moved == other.moved == ["suspended"]
        for number in three.numbers:
            three.launch(number)
        world.until(lambda: answers and synced)
        assert answers == [Committed((1,))]
        other.sees("/a/n", b"1")
        assert seat.moved == other.moved == ["suspended", "connected"]
        assert other.read("/a/ids/1") == (b"mine", 0)
        seat.done(Create("/a/later", b"watched"))  # the watches were set again
        other.sees("/a/later", b"watched")
    finally:
        world.close()


def test_changes_during_an_outage_of_one_session_are_seen_after_it(
    three: Ensemble, wide: ZooKeeperWorld
) -> None:
    seat = Seat(wide)
    seat.done(Create("/a/set", b"0"), Create("/a/gone/below", b""), Create("/a/again", b"old"))
    followers = [number for number in three.numbers if number != three.leader]
    (follower,) = followers[:1]
    # A session that knows one server only.
    single = ZooKeeperMetadata(
        f"127.0.0.1:{three.ports[follower]}/{wide.connect.partition('/')[2]}",
        session_timeout_ms=20_000,
    )
    wide.sessions.append(single)
    changed: list[str] = []
    moved: list[str] = []
    single.start(ROOTS, changed.append, moved.append, timeout=30)
    three.kill(follower)
    wide.until(lambda: single.state == "suspended")
    ops: list[Op] = [Set("/a/set", b"1", 0), Create("/b/new/deep", b"x"), Delete("/a/gone/below")]
    ops += [Delete("/a/gone"), Delete("/a/again"), Create("/a/again", b"new")]
    outcome = seat.commit(*ops)
    if outcome == Unknown():  # it was a client of the same server
        outcome = seat.commit(*ops)
    assert outcome in (Committed((1, 0, -1, -1, -1, 0)), Refused(0, "version"))
    assert single.read("/a/set") == (b"0", 0)
    changed.clear()
    three.start(follower)
    wide.until(lambda: single.state == "connected")
    synced: list[bool] = []
    single.sync(lambda: synced.append(True))
    wide.until(lambda: synced)
    assert single.read("/a/set") == (b"1", 1)
    assert single.read("/b/new/deep") == (b"x", 0)
    assert single.read("/a/gone") is None
    assert single.read("/a/gone/below") is None
    assert single.read("/a/again") == (b"new", 0)
    assert moved == ["suspended", "connected"]
    paths = {"/a/set", "/b/new", "/b/new/deep", "/a/gone", "/a/gone/below", "/a/again"}
    assert set(changed) >= paths


def test_a_paused_process_loses_its_session_and_commits_nothing_more(server: Ensemble) -> None:
    """SIGSTOP for longer than the session: the process learns it from the first answer."""
    world = ZooKeeperWorld(server.connect)
    code = (
        "import sys, time\n"
        "from logstore.replication.metadata import Create, Set\n"
        "from logstore.replication.zookeeper import ZooKeeperMetadata\n"
        "session = ZooKeeperMetadata(sys.argv[1], session_timeout_ms=1000)\n"
        "states = []\n"
        "session.start(('/a',), lambda path: None, states.append)\n"
        "def show(outcome):\n    print(outcome, flush=True)\n"
        "session.commit([Create('/a/ids/1', b'', True)], show)\n"
        "sys.stdin.readline()\n"
        "session.commit([Set('/a/n', b'late', 0)], show)\n"
        "while session.state != 'lost':\n    time.sleep(0.01)\n"
        "print(states, flush=True)\n"
        "session.close()\n"
    )
    try:
        seat = Seat(world)
        seat.done(Create("/a/n", b"0"))
        process = subprocess.Popen(
            [sys.executable, "-c", code, world.connect],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "Committed(versions=(0,))\n"
        seat.sees("/a/ids/1", b"")
        os.kill(process.pid, signal.SIGSTOP)
        seat.sees("/a/ids/1", None)
        process.stdin.write("\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
        assert "Unknown()" in output
        assert "'lost'" in output
        seat.sync()
        assert seat.read("/a/n") == (b"0", 0)
    finally:
        world.close()


def test_a_lost_answer_is_unknown_and_the_commit_may_be_repeated(
    server: Ensemble, world: ZooKeeperWorld
) -> None:
    """Kill the server while commits are under way: each is done, refused or unknown."""
    world.timeout_ms = 30_000
    seat, other = Seat(world), Seat(world)
    seat.done(Create("/a/n", b"0"))
    answers: list[Outcome] = []
    for version in range(3000):
        seat.session.commit([Set("/a/n", b"", version)], answers.append)
    world.until(lambda: len(answers) > 50)
    server.kill(1)
    world.until(lambda: seat.moved)
    server.start(1)
    world.until(lambda: len(answers) == 3000)
    done = sum(isinstance(each, Committed) for each in answers)
    unknown = answers.count(Unknown())
    assert unknown > 0
    other.sync()
    found = other.read("/a/n")
    assert found is not None
    assert done <= found[1] <= done + unknown
    outcome = seat.commit(Set("/a/n", b"again", done - 1))  # the condition is over
    assert outcome == Refused(0, "version")
    assert isinstance(seat.commit(Check("/a/n", found[1])), Committed)


def test_a_path_never_seems_to_be_deleted_when_the_connection_breaks(
    server: Ensemble, world: ZooKeeperWorld
) -> None:
    """Reads are under way when the server is killed: their answer is not that nothing is there."""
    world.timeout_ms = 20_000
    seat, other = Seat(world), Seat(world, start=False)
    paths = [f"/a/{number}" for number in range(150)]
    seat.done(*(Create(path, b"") for path in paths))
    gone: list[str] = []

    def look(path: str) -> None:
        if other.session.read(path) is None:
            gone.append(path)

    def late(state: str) -> None:
        time.sleep(0.5)  # the reads that failed are answered first
        listen(state)

    client, listen = other.session._client, other.session._listen
    client.remove_listener(listen)
    client.add_listener(late)
    other.session.start(ROOTS, look, other.moved.append, timeout=30)
    answers: list[Outcome] = []
    for version in range(10):
        for path in paths:
            seat.session.commit([Set(path, b"", version)], answers.append)
    world.until(lambda: len(answers) > 300)
    server.kill(1)
    world.until(lambda: other.moved == ["suspended"])
    assert len(other.session.children("/a")) == 150
    synced: list[bool] = []
    other.session.sync(lambda: synced.append(True))
    server.start(1)
    world.until(lambda: synced)
    assert len(other.session.children("/a")) == 150
    assert gone == []


def test_a_session_that_is_lost_opens_no_other(world: ZooKeeperWorld) -> None:
    """kazoo would: then what it still has in its queue would be committed by a second session."""
    seat = Seat(world, start=False)
    session = seat.session
    after_the_end: list[object] = []
    connect = session._connect

    def counted(*arguments: object, **options: object) -> object:
        if session._ended:
            after_the_end.append(arguments)
        return connect(*arguments, **options)

    session._connect = counted
    # The callback waits, so that kazoo has the time for another connection.
    session.start(ROOTS, lambda path: None, lambda state: time.sleep(1), timeout=30)
    world.expire(session)
    world.until(lambda: session.state == "lost")
    assert seat.commit(Create("/a/late", b"")) == Unknown()
    session.close()
    assert after_the_end == []


def test_a_sync_waits_for_watches_that_have_arrived_but_were_not_called_yet(
    world: ZooKeeperWorld,
) -> None:
    seat, other = Seat(world), Seat(world, start=False)
    fire = other.session._fire

    def slow(event: object) -> None:
        time.sleep(0.05)
        fire(event)

    other.session._fire = slow
    other.start()
    seat.done(Create("/a/n", b""))
    for version in range(10):
        seat.done(Set("/a/n", b"", version))
        other.sync()
        assert other.read("/a/n") == (b"", version + 1)
