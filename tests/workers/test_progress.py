"""Progress: its arithmetic against a set of offsets, and its text against every damage."""

from __future__ import annotations

import base64
import uuid

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logstore.workers.progress import (
    BYTES_MAX,
    LIMIT,
    BadProgressError,
    Place,
    Progress,
    described,
    varint,
)

PLACE = Place("billing", uuid.UUID(int=7), 3)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    seen = draw(st.integers(0, 1 << 40))
    offsets = draw(st.sets(st.integers(max(0, seen - 5000), seen - 1), max_size=60) if seen
                   else st.just(set()))  # fmt: skip
    starts = {}
    if offsets:
        starts = draw(st.dictionaries(st.sampled_from(sorted(offsets)), st.integers(1, 127),
                                      max_size=5))  # fmt: skip
    return Progress(seen, offsets, starts)


def test_the_text_of_the_example_is_this_byte_for_byte() -> None:
    progress = Progress(110, [100, 103, 104])
    text = progress.encode(PLACE)
    assert text.startswith("ls1:") and len(text) == 4 + 12
    raw = base64.urlsafe_b64decode(text[4:])
    assert raw[:-4].hex(" ") == "0a 00 03 02 00"
    assert progress.size == len(raw) == 9
    assert described(text, 100) == "3 open, 7 finished above"


def test_one_straggler_before_a_million_finished_records_takes_few_bytes() -> None:
    progress = Progress(0)
    progress.add(0)
    progress.advance(1_000_000)
    assert progress.size == 9
    assert len(progress.encode(PLACE)) == 4 + 12


@given(progresses(), st.booleans())
def test_a_text_is_read_back_as_it_was(progress: Progress, clean: bool) -> None:
    text = progress.encode(PLACE, clean=clean)
    back = Progress.decode(text, PLACE, progress.committed, end=progress.seen)
    assert (back.seen, list(back), back.starts) == (progress.seen, list(progress), progress.starts)
    assert back.clean == clean
    assert back.size == progress.size
    assert back.encode(PLACE, clean=clean) == text


@given(progresses())
@settings(max_examples=30)
def test_every_truncation_and_every_changed_character_is_refused(progress: Progress) -> None:
    text = progress.encode(PLACE)
    damaged = [text[:n] for n in range(len(text))]
    for at in range(4, len(text)):
        # Each of the six bits of a character.
        value = ALPHABET.index(text[at])
        damaged += [text[:at] + ALPHABET[value ^ 1 << bit] + text[at + 1 :] for bit in range(6)]
    damaged += [text + "A", text + "=", text + "\n"]
    for each in damaged:
        with pytest.raises(BadProgressError):
            Progress.decode(each, PLACE, progress.committed)


@given(progresses())
def test_a_text_of_another_place_or_offset_is_refused(progress: Progress) -> None:
    text = progress.encode(PLACE)
    for place in (
        PLACE._replace(group="b"), PLACE._replace(partition=4), PLACE._replace(topic_id=None),
    ):  # fmt: skip
        with pytest.raises(BadProgressError, match="checksum"):
            Progress.decode(text, place, progress.committed)
    with pytest.raises(BadProgressError, match="checksum"):
        Progress.decode(text, PLACE, progress.committed + 1)
    with pytest.raises(BadProgressError, match="ends at"):
        Progress.decode(text, PLACE, progress.committed, end=progress.seen - 1)


def sealed(fields: bytes, committed: int = 100) -> str:
    """Return a text with a valid checksum around any fields."""
    from logstore.workers.progress import _checksum

    raw = fields + _checksum(PLACE, committed, fields)
    return "ls1:" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (bytes([10, 0, 3, 2, 20]), "not below"),  # an open offset at or beyond `seen`
        (bytes([10, 0, 2]), "too early"),
        (bytes([10, 0, 100]), "open offsets"),
        (bytes([10, 0, 1, 7]), "too many"),
        (bytes([10, 8, 1]), "flags"),
        (bytes([0, 0, 1]), "open offsets"),
        (bytes([10, 0, 0]), "open offsets"),
        (bytes([10, 2, 1, 1, 1, 1]), "more than"),  # a start of an offset that is not listed
        (bytes([10, 2, 1, 2, 0, 1]), "more than"),
        (bytes([0x8A, 0, 0, 1]), "needless"),
        (b"\xff" * 12, "more than"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: bytes, reason: str) -> None:
    with pytest.raises(BadProgressError, match=reason):
        Progress.decode(sealed(fields), PLACE, 100)


@given(st.binary(max_size=60))
def test_any_fields_with_a_valid_checksum_are_refused_or_written_back_the_same(raw: bytes) -> None:
    try:
        found = Progress.decode(sealed(raw), PLACE, 100)
    except BadProgressError:
        return
    assert all(100 <= offset < found.seen for offset in found)
    again = Progress.decode(found.encode(PLACE, clean=found.clean), PLACE, 100)
    assert (list(again), again.seen, again.starts) == (list(found), found.seen, found.starts)


@given(st.integers(0, 1 << 62))
def test_a_varint_has_the_size_that_is_computed(number: int) -> None:
    from logstore.workers.progress import varint_size

    assert len(varint(number)) == varint_size(number)


class ProgressMachine(RuleBasedStateMachine):
    """Offsets are opened, finished and opened again; the model is a set of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress(1000)
        self.open: set[int] = set()
        self.seen = 1000
        self.finished: list[int] = []

    @rule(gap=st.integers(0, 1 << 20), count=st.integers(1, 200))
    def read(self, gap: int, count: int) -> None:
        for offset in range(self.seen + gap, self.seen + gap + count):
            if not self.progress.fits(offset):
                break
            self.progress.add(offset)
            self.open.add(offset)
            self.seen = offset + 1
            # W7: what was admitted fits.
            assert self.progress.size <= BYTES_MAX

    @rule(gap=st.integers(0, 1 << 40))
    def pass_a_gap(self, gap: int) -> None:
        self.seen += gap
        self.progress.advance(self.seen)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), count=st.integers(1, 80))
    def finish(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.open)), max_size=count,
                                    unique=True))  # fmt: skip
        for offset in chosen:
            self.progress.finish(offset)
            self.open.discard(offset)
        self.finished = chosen

    @rule()
    def undo(self) -> None:
        for offset in self.finished:
            self.progress.reopen(offset)
            self.open.add(offset)
        self.finished = []

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def count_starts(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)))
        if self.progress.count_start(offset) and data.draw(st.booleans()):
            self.progress.end_start(offset)

    @rule(back=st.integers(0, 50))
    def truncate(self, back: int) -> None:
        to = max(1000, self.seen - back)
        gone = self.progress.cut(to)
        assert gone == sorted(offset for offset in self.open if offset >= to)
        self.open -= set(gone)
        self.finished = []
        self.seen = to

    @invariant()
    def it_is_as_the_model(self) -> None:
        progress = self.progress
        assert list(progress) == sorted(self.open)
        assert progress.seen == self.seen
        assert progress.committed == min(self.open, default=self.seen)
        text = progress.encode(PLACE)  # asserts that `size` is exact
        assert progress.size <= LIMIT and len(text) <= 4096
        back = Progress.decode(text, PLACE, progress.committed)
        assert (list(back), back.starts) == (list(progress), progress.starts)


TestProgress = ProgressMachine.TestCase
TestProgress.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
