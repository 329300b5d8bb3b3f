"""Leader epochs: the cache, its file, and replicas that diverge and agree again."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore import EpochEnd, FencedError, LeaderEpochs, OffsetOutOfRangeError, Partition
from logstore.log.epochs import read_leader_epochs
from tests.conftest import MakeLog
from tests.kit import values

FILE = "leader-epoch-checkpoint"


# ---- the cache ----


def test_an_epoch_starts_once() -> None:
    epochs = LeaderEpochs()
    assert epochs.latest is None
    assert epochs.assign(0, 0)
    assert not epochs.assign(0, 0)
    assert not epochs.assign(0, 7)  # later records of the same epoch
    assert epochs.assign(2, 9)
    assert epochs.entries == [(0, 0), (2, 9)]
    assert epochs.latest == 2


def test_a_lower_epoch_or_offset_ends_a_newer_history() -> None:
    epochs = LeaderEpochs([(1, 5), (2, 6)])
    epochs.assign(1, 7)
    assert epochs.entries == [(1, 7)]
    epochs = LeaderEpochs([(1, 5), (2, 9)])
    epochs.assign(3, 9)
    assert epochs.entries == [(1, 5), (3, 9)]
    with pytest.raises(ValueError, match="at least 0, not -1 and 3"):
        epochs.assign(-1, 3)


def test_the_epoch_of_an_offset() -> None:
    epochs = LeaderEpochs([(2, 6), (3, 8), (4, 11)])
    expected = {5: None, 6: 2, 7: 2, 8: 3, 10: 3, 11: 4, 99: 4}
    assert {offset: epochs.epoch_for(offset) for offset in expected} == expected


def test_where_an_epoch_ended() -> None:
    epochs = LeaderEpochs([(5, 11), (7, 20)])
    assert epochs.end_offset_for(7, 30) == EpochEnd(7, 30)
    assert epochs.end_offset_for(5, 30) == EpochEnd(5, 20)
    assert epochs.end_offset_for(6, 30) == EpochEnd(5, 20)  # never had it: the one before
    assert epochs.end_offset_for(4, 30) == EpochEnd(4, 11)  # before all it knows
    assert epochs.end_offset_for(8, 30) is None
    assert epochs.end_offset_for(-1, 30) is None
    assert LeaderEpochs().end_offset_for(0, 30) is None


def test_cutting_from_either_end() -> None:
    epochs = LeaderEpochs([(2, 6), (3, 8), (4, 11)])
    assert not epochs.truncate_from_end(12)
    assert epochs.truncate_from_end(11)
    assert epochs.entries == [(2, 6), (3, 8)]
    epochs = LeaderEpochs([(2, 6), (3, 8), (4, 11)])
    assert not epochs.truncate_from_start(6)
    assert epochs.truncate_from_start(9)
    assert epochs.entries == [(3, 9), (4, 11)]
    assert epochs.truncate_from_start(50)
    assert epochs.entries == [(4, 50)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=20))
def test_epochs_and_offsets_both_increase_whatever_is_assigned(
    entries: list[tuple[int, int]],
) -> None:
    epochs = LeaderEpochs()
    for epoch, offset in entries:
        epochs.assign(epoch, offset)
        assert epochs.latest == epoch
        assert epochs.epoch_for(offset) == epoch
        found = epochs.entries
        assert all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(found))
    assert LeaderEpochs(epochs.entries) == epochs


# ---- replicas, as lists ----


class Replica:
    """A log of (epoch, value) and its epochs: what one broker knows."""

    def __init__(self) -> None:
        self.records: list[tuple[int, int]] = []
        self.epochs = LeaderEpochs()

    @property
    def end(self) -> int:
        return len(self.records)

    def lead(self, epoch: int) -> None:
        self.epochs.assign(epoch, self.end)

    def append(self, epoch: int, value: int) -> None:
        self.epochs.assign(epoch, self.end)
        self.records.append((epoch, value))

    def truncate(self, offset: int) -> None:
        del self.records[offset:]
        self.epochs.truncate_from_end(offset)

    def agree_with(self, leader: Replica) -> int:
        """Ask and cut until the histories agree; how many questions it took."""
        questions = 0
        while self.epochs.latest is not None:
            questions += 1
            answer = leader.epochs.end_offset_for(self.epochs.latest, leader.end)
            if answer is None:
                self.truncate(0)  # the leader does not know: start again at 0
                break
            before = self.epochs.latest
            cut = self.epochs.cut_for(answer, self.end)
            self.truncate(cut.offset)
            if cut.agreed:
                break
            assert self.epochs.latest is None or self.epochs.latest < before
        return questions

    def fetch(self, leader: Replica, most: int) -> None:
        for epoch, value in leader.records[self.end : self.end + most]:
            self.append(epoch, value)


def test_a_follower_keeps_what_the_new_leader_has_beyond_its_high_watermark() -> None:
    """KIP-101, first case: cutting to the high watermark would lose the second record."""
    leader, follower = Replica(), Replica()
    leader.lead(0)
    leader.append(0, 1)
    leader.append(0, 2)
    follower.fetch(leader, 9)
    # The follower restarts: by its high watermark it would cut to 1.  The leader answers that epoch
    # 0 ends at 2, so nothing is cut, and when the leader dies nothing is lost.
    follower.agree_with(leader)
    assert follower.records == [(0, 1), (0, 2)]


def test_two_logs_that_diverged_at_the_same_offset_agree_again() -> None:
    """KIP-101, second case: same length, different records."""
    a, b = Replica(), Replica()
    a.append(0, 1)
    b.fetch(a, 9)
    a.append(0, 2)  # not fetched; A stops
    b.lead(1)
    b.append(1, 3)
    a.agree_with(b)
    assert a.records == [(0, 1)]
    a.fetch(b, 9)
    assert a.records == b.records == [(0, 1), (1, 3)]


def test_fast_fail_overs_need_more_than_one_question() -> None:
    """KIP-279: the leader never had the follower's last epoch, nor the follower the one before."""
    a, b = Replica(), Replica()
    for value in range(10):
        a.append(0, value)
    b.fetch(a, 99)
    b.lead(1)
    b.append(1, 100)
    b.append(1, 101)
    a.lead(2)
    a.append(2, 200)
    b.lead(3)
    b.append(3, 300)
    questions = a.agree_with(b)
    assert a.records == b.records[:10]
    assert questions == 2
    a.fetch(b, 99)
    assert a.records == b.records


actions = st.lists(
    st.one_of(
        st.tuples(st.just("elect"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("append"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("follow"), st.integers(0, 2), st.integers(0, 5)),
        st.tuples(st.just("lose"), st.integers(0, 2), st.integers(0, 3)),
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(actions, st.integers(0, 2))
def test_replicas_converge_after_any_history_of_fail_overs(
    history: list[tuple[str, int, int]], last: int
) -> None:
    """Any replica may become leader at any time, unclean or not; tails may be lost in a crash."""
    replicas = [Replica(), Replica(), Replica()]
    epoch, leader, value = 0, 0, 0
    replicas[0].lead(0)
    for action, number, amount in history:
        if action == "elect":
            epoch, leader = epoch + 1, number
            replicas[leader].lead(epoch)
        elif action == "append":
            for _ in range(number):
                value += 1
                replicas[leader].append(epoch, value)
        elif action == "follow" and number != leader:
            replicas[number].agree_with(replicas[leader])
            assert_prefix_of_common(replicas[number], replicas[leader])
            replicas[number].fetch(replicas[leader], amount)
        elif action == "lose" and number != leader:
            replicas[number].truncate(max(0, replicas[number].end - amount))
    epoch += 1
    replicas[last].lead(epoch)
    replicas[last].append(epoch, -1)
    for replica in replicas:
        if replica is replicas[last]:
            continue
        both = replica.epochs.common_end(replica.end, replicas[last].epochs, replicas[last].end)
        before = list(replica.records)
        replica.agree_with(replicas[last])
        assert replica.end == (both or 0)
        common = common_prefix(before, replicas[last].records)
        assert replica.records == before[:common], "nothing that agreed was cut, all else was"
        replica.fetch(replicas[last], 10**6)
        assert replica.records == replicas[last].records
        # Its entries are the leader's, but for epochs without a record at the very end.
        assert replica.epochs.entries == [
            entry for entry in replicas[last].epochs.entries if entry[1] < replica.end
        ]


def common_prefix(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def assert_prefix_of_common(follower: Replica, leader: Replica) -> None:
    assert follower.records == leader.records[: follower.end]


# ---- a partition ----


def epochs_on_disk(log: Partition) -> list[tuple[int, int]]:
    return LeaderEpochs(
        tuple(map(int, line.split()))  # type: ignore[misc]
        for line in (log.path / FILE).read_text().splitlines()[2:]
    ).entries


def batch_epochs(log: Partition) -> list[tuple[int, int]]:
    """(epoch, base offset) of every batch, as the files have it."""
    return [
        (int.from_bytes(raw[12:16], "big"), int.from_bytes(raw[:8], "big"))
        for raw in log.scan().batches()
    ]


def test_a_new_log_is_in_epoch_0(log: Partition) -> None:
    assert log.leader_epoch == 0
    assert log.leader_epochs.entries == epochs_on_disk(log) == [(0, 0)]
    log.append(b"a")
    assert batch_epochs(log) == [(0, 0)]


def test_a_new_epoch_is_on_disk_before_its_first_record(log: Partition) -> None:
    log.extend([b"a", b"b"])
    log.become_leader(3)
    assert (log.path / FILE).read_text() == "0\n2\n0 0\n3 2\n"
    log.append(b"c")
    with log.writer() as out:
        out.append(b"d")
    assert batch_epochs(log) == [(0, 0), (3, 2), (3, 3)]
    assert log.end_offset_for_epoch(0) == EpochEnd(0, 2)
    assert log.end_offset_for_epoch(2) == EpochEnd(0, 2)
    assert log.end_offset_for_epoch(3) == EpochEnd(3, 4)
    assert log.end_offset_for_epoch(4) is None


def test_an_epoch_that_is_over_is_fenced(log: Partition) -> None:
    log.become_leader(5)
    log.become_leader(5)
    with pytest.raises(FencedError, match=r"epoch 4 of orders-0 is over: 5 has begun") as caught:
        log.become_leader(4)
    assert (caught.value.epoch, caught.value.current) == (4, 5)
    for epoch in (-1, 1 << 31):
        with pytest.raises(ValueError, match="an epoch is an int from 0 to 2147483647"):
            log.become_leader(epoch)
    assert log.leader_epoch == 5


def test_the_promise_of_an_epoch_survives_a_reopen_without_a_record(make_log: MakeLog) -> None:
    log = make_log()
    log.append(b"a")
    log.become_leader(7)
    log.close()
    log = make_log()
    assert log.leader_epoch == 7
    with pytest.raises(FencedError):
        log.become_leader(6)
    log.append(b"b")
    assert batch_epochs(log) == [(0, 0), (7, 1)]


def test_truncation_cuts_the_epochs_even_where_it_cuts_nothing_else(log: Partition) -> None:
    log.extend([b"a", b"b"])
    log.become_leader(1)
    log.truncate(2)
    assert log.leader_epochs.entries == epochs_on_disk(log) == [(0, 0)]
    assert log.leader_epoch == 1  # the promise stands; the next append writes it down again
    log.append(b"c")
    assert log.leader_epochs.entries == epochs_on_disk(log) == [(0, 0), (1, 2)]
    log.truncate(1)
    assert epochs_on_disk(log) == [(0, 0)]
    log.append(b"d")
    assert epochs_on_disk(log) == [(0, 0), (1, 1)]
    assert batch_epochs(log) == [(0, 0), (1, 1)]


def test_trimming_moves_the_first_epoch(log: Partition) -> None:
    log.extend([b"a", b"b"])
    log.become_leader(1)
    log.extend([b"c", b"d"])
    log.trim(1)
    assert epochs_on_disk(log) == [(0, 1), (1, 2)]
    log.trim(3)
    assert epochs_on_disk(log) == [(1, 3)]


def make_history(log: Partition) -> list[tuple[int, int]]:
    """Several epochs over several segments."""
    for epoch in (0, 2, 3, 7):
        log.become_leader(epoch)
        for number in range(6):
            log.append(b"%d" % number)
            if (epoch + number) % 4 == 0:
                log.roll()
    return log.leader_epochs.entries


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    "content", [None, b"", b"0\n2\n0 0\n", b"\xff\xfe", b"1\n1\n0 0\n", b"0\n1\n-1 0\n"]
)
def test_a_lost_or_damaged_file_is_rebuilt_from_the_batches(
    make_log: MakeLog, tmp_path: Path, clean: bool, content: bytes | None
) -> None:
    log = make_log()
    expected = make_history(log)
    if clean:
        log.close()
    shutil.copytree(log.path, tmp_path / "copy" / "orders-0")
    path = tmp_path / "copy" / "orders-0" / FILE
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with Partition.open(path.parent) as copy:
        assert copy.leader_epochs.entries == expected
        assert copy.leader_epoch == 7
        assert read_leader_epochs(copy.parts.view.directory) == expected


def test_a_file_that_is_behind_catches_up_after_a_crash(make_log: MakeLog, tmp_path: Path) -> None:
    log = make_log()
    log.append(b"a")
    behind = (log.path / FILE).read_bytes()
    log.become_leader(4)
    log.append(b"b")
    shutil.copytree(log.path, tmp_path / "copy" / "orders-0")
    (tmp_path / "copy" / "orders-0" / FILE).write_bytes(behind)
    with Partition.open(tmp_path / "copy" / "orders-0") as copy:
        assert copy.leader_epochs.entries == [(0, 0), (4, 1)]
        assert copy.leader_epoch == 4


def test_a_flipped_epoch_in_one_batch_does_not_become_history(
    make_log: MakeLog, tmp_path: Path
) -> None:
    """The batch's checksum does not cover the field."""
    log = make_log()
    sizes = [log.segments[-1].size_bytes for _ in range(4) if log.append(b"x") >= 0]
    shutil.copytree(log.path, tmp_path / "copy" / "orders-0")
    segment = tmp_path / "copy" / "orders-0" / f"{0:020d}.log"
    data = bytearray(segment.read_bytes())
    data[sizes[1] + 12] ^= 0x40
    segment.write_bytes(data)
    with Partition.open(segment.parent) as copy:
        assert copy.leader_epochs.entries == [(0, 0)]
        assert copy.leader_epoch == 0


def test_a_readonly_reader_sees_the_epochs(make_log: MakeLog) -> None:
    log = make_log()
    reader = make_log(readonly=True)
    log.append(b"a")
    log.become_leader(2)
    log.append(b"b")
    assert reader.leader_epoch == 2
    assert reader.leader_epochs.entries == [(0, 0), (2, 1)]
    assert reader.end_offset_for_epoch(0) == EpochEnd(0, 1)


# ---- partitions as replicas ----


def catch_up(follower: Partition, leader: Partition) -> int:
    """Cut until the histories agree, then copy; how many questions it took."""
    questions = 0
    while (latest := follower.leader_epochs.latest) is not None:
        questions += 1
        answer = leader.end_offset_for_epoch(latest)
        assert answer is not None
        if follower.truncate_to_epoch(answer):
            break
    for record in leader.scan(follower.end_offset):
        epoch = leader.leader_epochs.epoch_for(record.offset)
        assert epoch is not None
        if epoch > (follower.leader_epochs.latest or 0):
            follower.become_leader(max(epoch, follower.leader_epoch))
        follower.append(record.value)
    return questions


def test_partitions_that_diverged_in_fast_fail_overs_agree_again(make_log: MakeLog) -> None:
    a, b = make_log("a-0"), make_log("b-0")
    for log in (a, b):
        log.extend([b"0", b"1", b"2"])
    b.become_leader(1)
    b.extend([b"b3", b"b4"])
    a.become_leader(2)
    a.append(b"a3")
    b.become_leader(3)
    b.append(b"b5")
    assert catch_up(a, b) == 2
    assert values(a) == values(b) == [b"0", b"1", b"2", b"b3", b"b4", b"b5"]
    a.check()


def test_a_cut_by_epoch_never_goes_below_the_start(make_log: MakeLog) -> None:
    log = make_log()
    log.extend([b"a", b"b", b"c"])
    log.trim(2)
    assert log.truncate_to_epoch(EpochEnd(0, 1))
    assert (log.start_offset, log.end_offset) == (2, 2)
    with pytest.raises(OffsetOutOfRangeError):
        log.truncate(1)
