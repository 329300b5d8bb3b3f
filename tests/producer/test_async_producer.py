"""AsyncProducer: one engine, two faces; the loop is never blocked, and woken once."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logstore
from logstore import (
    AsyncProducer,
    ClosedError,
    DiskFullError,
    FencedError,
    Position,
    Producer,
    Store,
    Transaction,
    TransactionAbortedError,
)
from logstore.partition.appender import Appender
from logstore.testing import Fault, inject_io
from tests.kit import topic_values


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store") as opened:
        opened.create_topic("t", partitions=2)
        yield opened


def test_append_and_send_are_awaited(store: Store) -> None:
    async def work() -> None:
        async with AsyncProducer(store, linger=600.0) as producer:
            assert await producer.append("t", b"0", partition=1) == Position("t", 1, 0)
            assert store["t"][1].durable_offset == 1
            deliveries = [await producer.send("t", b"%d" % n, partition=0) for n in range(100)]
            found = await asyncio.gather(*(_await(each) for each in deliveries))
            assert [position.offset for position in found] == list(range(100))
            assert (await deliveries[3]).offset == 3  # again
            told: list[Any] = []
            await (await producer.send("t", b"x", callback=told.append))
            assert len(told) == 1
        with pytest.raises(ClosedError):
            await producer.append("t", b"late")
        await producer.close()

    async def _await(delivery: Any) -> Position:
        return await delivery

    asyncio.run(work())
    assert len(topic_values(store, "t")) == 102


def test_many_tasks_need_no_thread_each(store: Store) -> None:
    async def one(producer: AsyncProducer, n: int) -> Position:
        return await producer.append("t", b"%d" % n, key=b"%d" % n)

    async def work() -> set[Position]:
        async with AsyncProducer(store) as producer:
            before = threading.active_count()
            tasks = [asyncio.create_task(one(producer, n)) for n in range(500)]
            await asyncio.sleep(0)
            assert threading.active_count() <= before + 1
            return set(await asyncio.gather(*tasks))

    assert len(asyncio.run(work())) == 500
    assert sorted(v for v in topic_values(store, "t") if v) == sorted(b"%d" % n for n in range(500))


def test_a_full_buffer_waits_and_lets_others_run(store: Store) -> None:
    turns = 0

    async def others(stop: asyncio.Event) -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            await asyncio.sleep(0)

    async def work() -> int:
        stop = asyncio.Event()
        other = asyncio.create_task(others(stop))
        most = 0
        async with AsyncProducer(store, buffer_bytes=100_000, durability="os") as producer:
            for _ in range(3_000):
                await producer.send("t", b"x" * 1_000)
                assert producer._engine is not None
                most = max(most, producer._engine.held_bytes)
        stop.set()
        await other
        return most

    assert asyncio.run(work()) < 400_000
    assert len(topic_values(store, "t")) == 3_000 and turns > 0


def test_a_full_disk_blocks_then_tells_and_loses_nothing(store: Store) -> None:
    async def work() -> None:
        producer = AsyncProducer(store, buffer_bytes=10_000, max_block=0.1)
        taken = []
        full = Fault.fail(errno.ENOSPC, "pwrite", "*t-?/*.log", call=1, forever=True)
        with inject_io(full, root=store.path):
            with pytest.raises(DiskFullError) as caught:
                async with asyncio.timeout(30):
                    for n in range(100):
                        taken.append(await producer.send("t", b"%09d" % n * 100, partition=0))
            assert any("not taken" in note for note in caught.value.__notes__)
            again = [producer.send("t", b"x", partition=0) for _ in range(3)]
            errors = await asyncio.gather(*again, return_exceptions=True)
            assert [type(each) for each in errors] == [DiskFullError] * 3
            assert len({*map(id, errors)}) == 3
        taken.append(await producer.send("t", b"last", partition=0))
        await producer.close()
        assert [(await each).offset for each in taken] == list(range(len(taken)))

    asyncio.run(work())
    assert topic_values(store, "t")[-1] == b"last"


def test_transactions_commit_abort_and_are_fenced(store: Store) -> None:
    async def work() -> None:
        async with AsyncProducer(store, "id") as producer:
            async with producer.transaction() as tx:
                await tx.send("t", b"1")
                await tx.append("t", b"2")
                await tx.commit_offsets({("s", 0): 3}, group_id="g")
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction() as tx:
                    held = await tx.send("t", b"3")
                    _ = 1 / 0
            error = held.exception(60)
            assert error is None or isinstance(error, TransactionAbortedError)
            async with producer.transaction() as tx:
                await tx.append("t", b"4")
                await tx.abort()
            async with AsyncProducer(store, "id"):
                with pytest.raises(FencedError):
                    async with producer.transaction() as tx:
                        await tx.append("t", b"5")

    asyncio.run(work())
    assert sorted(v for v in topic_values(store, "t", "read_committed") if v) == [b"1", b"2"]


@pytest.mark.parametrize("cancels", [1, 2])
def test_a_begin_that_is_cancelled_leaves_no_transaction_open(
    store: Store, monkeypatch: pytest.MonkeyPatch, cancels: int
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = Producer.transaction

    def slowly(self: Producer) -> Transaction:
        transaction = real(self)
        begun.set()
        assert go_on.wait(60)
        return transaction

    async def work() -> None:
        async with AsyncProducer(store, "x") as producer:
            with monkeypatch.context() as patched:
                patched.setattr(Producer, "transaction", slowly)
                tx = producer.transaction()
                task = asyncio.create_task(tx.__aenter__())
                assert await asyncio.to_thread(begun.wait, 60)
                for _ in range(cancels):
                    task.cancel()
                    await asyncio.sleep(0)
                go_on.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with pytest.raises(ClosedError, match="not begun"):
                    await tx.send("t", b"0")
            async with producer.transaction() as tx:
                await tx.send("t", b"1")

    asyncio.run(work())
    assert topic_values(store, "t", "read_committed") == [b"1"]


def test_errors_come_out_where_they_are_awaited(store: Store, monkeypatch: Any) -> None:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise logstore.InvalidRecordError("no")

    async def work() -> None:
        producer = AsyncProducer(store)
        with pytest.raises(logstore.UnknownTopicError):
            await producer.send("nowhere", b"v")
        monkeypatch.setattr(Appender, "write_produced", write)
        with pytest.raises(logstore.InvalidRecordError):
            await producer.append("t", b"v")
        with pytest.raises(logstore.InvalidRecordError):
            await producer.flush()
        await producer.close()

    asyncio.run(work())
