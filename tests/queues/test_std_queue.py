"""StdQueue: the cases of CPython's own test_queue, and what a crash leaves."""

from __future__ import annotations

import queue
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from logstore import Queue, StdQueue, Store

cpython = pytest.importorskip("test.test_queue")


class PickledNowhere:
    """Objects of the cases as bytes: the cases compare small ints and texts."""

    @staticmethod
    def dump(value: object) -> bytes:
        return repr(value).encode()

    @staticmethod
    def load(raw: bytes) -> object:
        import ast

        return ast.literal_eval(raw.decode())


CASES = (
    *("test_basic", "test_queue_join", "test_queue_task_done"),
    *("test_negative_timeout_raises_exception", "test_nowait", "test_shrinking_queue"),
)


@pytest.mark.parametrize("case", CASES)
def test_a_case_of_cpython_passes(make_store: Callable[..., Store], case: str) -> None:
    store = make_store()
    made: list[Queue] = []

    def new(maxsize: int = 0) -> Any:
        jobs = Queue(store, f"q{len(made)}", value_serializer=PickledNowhere.dump,
                     value_deserializer=PickledNowhere.load)  # fmt: skip
        made.append(jobs)
        # The cases find the expected order by the name of the class.
        return type("Queue", (StdQueue,), {})(jobs, maxsize)

    class Judge(cpython.BaseQueueTestMixin, unittest.TestCase):  # type: ignore[misc, name-defined]
        type2test = staticmethod(new)
        queue = queue

    result = unittest.TestResult()
    Judge(case).run(result)
    assert result.testsRun == 1
    assert not result.errors and not result.failures, (result.errors, result.failures)


def test_an_item_that_is_not_done_is_there_after_a_restart(store: Store) -> None:
    jobs = Queue(store, "jobs")
    items = StdQueue(jobs)
    items.put(b"a")
    items.put(b"b")
    assert (items.get(), items.get()) == (b"a", b"b")
    items.task_done()
    jobs.close()
    again = StdQueue(Queue(store, "jobs"))
    assert again.get() == b"b" and again.empty()
    again.task_done()
    again.join()
    with pytest.raises(ValueError, match="too many"):
        again.task_done()
