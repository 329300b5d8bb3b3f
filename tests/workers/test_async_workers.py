"""AsyncWorkers: handlers as tasks of the caller's loop; and coroutines in a loop of Workers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from logstore import AsyncWorkers, ConfigError, Context, Dead, Outgoing, Record, Store, Workers
from tests.kit import PATIENCE, committed
from tests.workers.ledger import Ledger


@pytest.fixture
def filled(store: Store) -> Store:
    for log in store.create_topic("t", partitions=2):
        log.extend([Record(b"%d" % n, key=b"%d" % (n % 50)) for n in range(100)])
    store.create_topic("out", partitions=1)
    return store


def test_as_many_tasks_as_asked_for_run_at_once_in_the_callers_loop(filled: Store) -> None:
    ledger = Ledger()
    threads = set()

    async def main() -> None:
        together = asyncio.Event()
        running = 0

        async def handle(record: Record) -> Outgoing:
            nonlocal running
            threads.add(threading.current_thread())
            ledger.events.append(("start", record))
            running += 1
            if running == 100:
                together.set()
            await asyncio.wait_for(together.wait(), PATIENCE)
            ledger.events.append(("end", record))
            return Outgoing("out", record.value)

        async with AsyncWorkers(
            filled, "t", group_id="g", handler=handle, concurrency=100
        ) as workers:
            assert await workers.wait(timeout=PATIENCE)
            assert workers.stats().done == 200 and len(workers.assignment()) == 2

    asyncio.run(main())
    assert threads == {threading.main_thread()}
    ledger.check_order()
    assert len(committed(filled["out"][0])) == 200


def test_a_coroutine_runs_in_a_loop_of_its_own_thread(filled: Store) -> None:
    ledger = Ledger()

    async def handle(record: Record) -> None:
        ledger.events.append(("start", record))
        await asyncio.sleep(0)
        ledger.events.append(("end", record))

    with Workers(filled, "t", group_id="g", handler=handle, concurrency=20) as workers:
        assert workers.wait(timeout=PATIENCE)
        assert workers.stats().done == 200
    ledger.check_order()


def test_a_task_is_cancelled_at_its_time_out_and_tried_again(filled: Store) -> None:
    attempts: list[int] = []

    async def main() -> None:
        async def handle(record: Record, context: Context) -> None:
            if record.value == b"0" and record.partition == 0:
                attempts.append(context.attempt)
                if context.attempt == 1:
                    await asyncio.sleep(PATIENCE)

        async with AsyncWorkers(
            filled, "t", group_id="g", handler=handle, timeout=0.05, stuck_max=1000
        ) as workers:
            assert await workers.wait(timeout=PATIENCE)
            assert "HandlerTimeoutError" in workers.stats().last_error

    asyncio.run(main())
    assert attempts == [1, 2]


def test_closing_waits_for_tasks_without_blocking_the_loop(filled: Store) -> None:
    ended = []

    async def main() -> None:
        begun, go = asyncio.Event(), asyncio.Event()

        async def handle(record: Record) -> None:
            begun.set()
            await go.wait()
            ended.append(record)

        workers = AsyncWorkers(filled, "t", group_id="g", handler=handle, concurrency=4)
        await workers.start()
        await begun.wait()
        closing = asyncio.ensure_future(workers.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()  # only a loop that is not blocked gets here and runs the tasks
        await closing
        assert 1 <= len(ended) <= 4

    asyncio.run(main())


def test_an_error_that_stops_the_workers_is_raised_by_wait(filled: Store) -> None:
    async def main() -> None:
        async def handle(record: Record) -> None:
            raise Dead("no such customer")

        async with AsyncWorkers(filled, "t", group_id="g", handler=handle) as workers:
            await workers.wait(timeout=PATIENCE)

    with pytest.raises(Dead, match="customer"):
        asyncio.run(main())


def test_a_function_is_refused(filled: Store) -> None:
    with pytest.raises(ConfigError, match="async def"):
        AsyncWorkers(filled, "t", group_id="g", handler=print)
