"""when_durable: a callback for records on stable storage, with shared fsyncs and few threads."""

from __future__ import annotations

import errno
import os
import queue
import threading

import pytest

from logstore import ClosedError, IndeterminateAppendError, Partition
from logstore.partition.durability import SYNC_THREADS
from logstore.testing import Fault, inject_io, record_io
from tests.conftest import MakeLog
from tests.kit import PATIENCE

Answers = queue.SimpleQueue[tuple[int, BaseException | None]]


@pytest.fixture
def answers() -> Answers:
    return queue.SimpleQueue()


def ask(log: Partition, offset: int, answers: Answers) -> None:
    log.parts.durability.when_durable(offset, lambda error: answers.put((offset, error)))


def test_it_is_called_when_the_records_are_durable(log: Partition, answers: Answers) -> None:
    log.append(b"a", durability="os")
    assert log.durable_offset == 0
    ask(log, 1, answers)
    assert answers.get(timeout=PATIENCE) == (1, None)
    assert log.durable_offset == 1


def test_what_is_durable_is_answered_at_once(log: Partition, answers: Answers) -> None:
    log.append(b"a", durability="fsync")
    with record_io(log.path) as recording:
        ask(log, 1, answers)
        ask(log, 0, answers)
    assert [answers.get_nowait(), answers.get_nowait()] == [(1, None), (0, None)]
    assert not [call for call in recording.operations if call.kind == "datasync"]


def test_many_callers_of_one_log_share_fsyncs(log: Partition, answers: Answers) -> None:
    with record_io(log.path) as recording:
        for n in range(200):
            log.append(b"x", durability="os")
            ask(log, n + 1, answers)
        got = [answers.get(timeout=PATIENCE) for _ in range(200)]
    assert sorted(got) == [(n + 1, None) for n in range(200)]
    syncs = [call for call in recording.operations if call.kind == "datasync"]
    assert 1 <= len(syncs) < 200


def test_many_logs_need_few_threads(make_log: MakeLog, answers: Answers) -> None:
    logs = [make_log(f"t-{n}") for n in range(30)]
    for log in logs:
        log.append(b"x", durability="os")
        ask(log, 1, answers)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("logstore sync") for name in names) <= SYNC_THREADS
    assert [answers.get(timeout=PATIENCE) for _ in logs] == [(1, None)] * len(logs)
    assert all(log.durable_offset == 1 for log in logs)


def test_a_failed_fsync_is_answered_with_the_error(log: Partition, answers: Answers) -> None:
    log.append(b"a", durability="os")
    with inject_io(Fault.fail(errno.EIO, "datasync", "*.log", forever=True)):
        ask(log, 1, answers)
        offset, error = answers.get(timeout=PATIENCE)
    assert offset == 1 and isinstance(error, IndeterminateAppendError)
    ask(log, 1, answers)
    assert isinstance(answers.get(timeout=PATIENCE)[1], IndeterminateAppendError)


def test_a_truncation_is_answered_with_an_error(log: Partition, answers: Answers) -> None:
    log.append(b"a", durability="os")
    log.truncate(0)
    ask(log, 1, answers)
    assert isinstance(answers.get(timeout=PATIENCE)[1], IndeterminateAppendError)


def test_a_clean_close_makes_records_durable(make_log: MakeLog, answers: Answers) -> None:
    log = make_log()
    log.append(b"a", durability="os")
    log.close()
    ask(log, 1, answers)
    assert answers.get(timeout=PATIENCE) == (1, None)
    ask(log, 2, answers)
    assert isinstance(answers.get(timeout=PATIENCE)[1], ClosedError)


def test_a_child_process_has_threads_of_its_own(make_log: MakeLog, answers: Answers) -> None:
    first = make_log("a-0")
    first.append(b"x")
    ask(first, 1, answers)
    assert answers.get(timeout=PATIENCE) == (1, None)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            second = make_log("b-0")
            second.append(b"x")
            ask(second, 1, answers)
            code = 0 if answers.get(timeout=PATIENCE) == (1, None) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
