"""Workers and AsyncWorkers: process records of a group with many handlers at once.

    def bill(record): ...

    with Workers(store, "orders", group_id="billing", handler=bill, concurrency=16) as workers:
        workers.wait(until="idle", timeout=60)

At least once: a record is finished after its handler has returned.  A commit has the exact set of
finished records, so a crash repeats only those that ran, and those that finished since the last
commit.  Exactly once for outputs: the records that a handler returns are written in the transaction
that commits the record.

This class checks the settings and connects the parts: Strands decides, Control reads and commits,
a pool calls the handler.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

from logstore.clock import Clock, SystemClock
from logstore.closeable import Closeable
from logstore.config import ConfigError
from logstore.consumer.consumer import AnyAssignor, Consumer
from logstore.consumer.positions import Start
from logstore.consumer.rebalancing import Topics
from logstore.consumer.wakeup import Bell
from logstore.coordinators.offset_records import TopicPartition
from logstore.errors import ClosedError
from logstore.record import Record
from logstore.serialization import Deserializer, deserializer
from logstore.store.companions import expect_store
from logstore.store.store import Store
from logstore.waking import uninterrupted
from logstore.workers.context import Runner, is_async, seconds
from logstore.workers.control import Control, Settings
from logstore.workers.deciding import InPlace
from logstore.workers.desk import Desk, Pool
from logstore.workers.items import DONE, SKIPPED, Limits
from logstore.workers.running import RunningStrands
from logstore.workers.stats import Running, WorkerStats
from logstore.workers.strands import Strands
from logstore.workers.tasks import TaskPool
from logstore.workers.threads import ThreadPool

__all__ = ["AsyncWorkers", "Workers"]

ORDERS = ("key", "partition", "none")
EXECUTORS = ("thread", "asyncio")


class Workers(Closeable):
    """Reads topics as one member of a group, and calls `handler` for many records at once.

    `handler` is called with a record, and with a Context if it has a second parameter.  It ends the
    record by returning None, an Outgoing or a list of them.  If it raises, the record is tried
    again with a growing delay; see RetryLater, Skip and Dead.  A coroutine function is awaited.

    - `order`: "key" processes the records of one key of a partition one after the other, and those
      without a key in any order; "partition" all of a partition; "none" in any order.
      `key`: a function of the record, if another value than its key gives the order.
    - `concurrency`: handlers at once.  `executor`: "thread" or "asyncio"; by the handler.
    - `buffer_records`, `buffer_bytes`: open records of a partition, and bytes of all open records;
      reading stops there.  `rate`: records a second.
    - `commit_interval`, `commit_records`: commit after so many seconds or records.
    - `timeout`: seconds for one record; then `Context.cancelled` is set, a task is cancelled, and a
      thread is replaced, at most `stuck_max` times.  The strand waits for the handler, unless
      `abandon_after` more seconds have passed: then the record is tried again although the old
      handler may still run.
    - `revoke_timeout`, `drain_timeout`: how long a rebalance and `close` wait for handlers.
    - `crash_limit`: how often a record may end the process before it is an error.
    - `start`, `isolation`, `assignor`, `instance_id`, `key_deserializer`, `value_deserializer`,
      `on_corrupt`: as for Consumer; values are deserialized where the handler runs.

    Durations are seconds or a text such as "1m30s".  Threads may share it.
    """

    def __init__(
        self,
        store: Store,
        *topics: Topics,
        group_id: str,
        handler: Callable[..., Any],
        order: str = "key",
        concurrency: int = 8,
        executor: str | None = None,
        key: Callable[[Record], Hashable] | None = None,
        timeout: float | str | None = None,
        abandon_after: float | str | None = None,
        stuck_max: int | None = None,
        buffer_records: int = 1000,
        buffer_bytes: int = 32 << 20,
        commit_interval: float | str = 1.0,
        commit_records: int = 1000,
        revoke_timeout: float | str = 10.0,
        drain_timeout: float | str = 30.0,
        crash_limit: int = 3,
        rate: float | None = None,
        start: Start = "earliest",
        isolation: str = "read_uncommitted",
        assignor: AnyAssignor | Sequence[AnyAssignor] = "cooperative-sticky",
        instance_id: str | None = None,
        key_deserializer: str | Deserializer | None = None,
        value_deserializer: str | Deserializer | None = None,
        on_corrupt: str = "raise",
    ) -> None:
        _check(handler, order, executor, key, group_id, rate)
        for name, number in (
            *(("concurrency", concurrency), ("buffer_records", buffer_records)),
            *(("buffer_bytes", buffer_bytes), ("commit_records", commit_records)),
            *(("crash_limit", crash_limit), ("stuck_max", 1 if stuck_max is None else stuck_max)),
        ):
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, not {number!r}")
        self._store = expect_store(store, "Workers")
        self._clock: Clock = store.clock or SystemClock()
        self.group_id = group_id
        self._concurrency = concurrency
        self._stuck_max_given = stuck_max is not None
        self._executor = executor or ("asyncio" if is_async(handler) else "thread")
        self._name = f"logstore workers {group_id}"
        self._settings = Settings(
            group_id=group_id, order=order, key=key,
            commit_interval=seconds("commit_interval", commit_interval),
            commit_records=commit_records, timeout=_optional("timeout", timeout),
            abandon_after=_optional("abandon_after", abandon_after),
            stuck_max=concurrency if stuck_max is None else stuck_max,
            revoke_timeout=seconds("revoke_timeout", revoke_timeout),
            drain_timeout=seconds("drain_timeout", drain_timeout),
            committed_only=isolation == "read_committed",
        )  # fmt: skip
        self._runner = Runner(
            handler, key_deserializer=deserializer(key_deserializer),
            value_deserializer=deserializer(value_deserializer), timeout=self._settings.timeout,
        )  # fmt: skip
        self._limits = Limits(buffer_records, buffer_bytes, crash_limit)
        self._rate = rate
        self._make_consumer = functools.partial(
            Consumer, store, *topics, group_id=group_id, start=start, isolation=isolation,
            assignor=assignor, instance_id=instance_id, on_corrupt=on_corrupt,
        )  # fmt: skip
        self._loop: asyncio.AbstractEventLoop | None = None  # of AsyncWorkers
        self._control: Control | None = None
        self._desk: Desk | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    # ---- starting ----

    def start(self) -> None:
        """Start the threads, and join the group.  Does nothing if they are started."""
        with self._starting:
            if self._closed:
                raise ClosedError("the workers are closed")
            if self._control is not None:
                return
            registry = RunningStrands.of(self._store)
            number = registry.enter(self, self.group_id)
            try:
                control = self._made_control(registry, number)
            except BaseException:
                registry.depart(self, self.group_id, number)
                raise
            self._control = control

            def run() -> None:
                try:
                    control.run()
                finally:
                    registry.depart(self, self.group_id, number)

            self._thread = threading.Thread(target=run, name=self._name, daemon=True)
            uninterrupted(self._thread.start)

    def _made_control(self, registry: RunningStrands, number: int) -> Control:
        strands = Strands(self._limits, rate=self._rate)
        desk = Desk(strands, registry, Bell(), self._clock, self._settings.commit_records)
        self._desk = desk
        control = Control(
            self._store, self._settings, desk, InPlace(), registry, number, self._make_consumer
        )
        pool: Pool
        if self._executor == "thread":
            pool = ThreadPool(desk, self._runner, self._name, self._concurrency)
        else:
            pool = TaskPool(desk, self._runner, self._name, self._concurrency, self._loop)
        control.pool = pool
        return control

    def run(self, *, timeout: float | str | None = None, handle_signals: bool = False) -> None:
        """Start, and return after `stop`, or after `timeout` seconds without a record to process.

        `handle_signals`: SIGTERM stops as well; call it in the main thread then.  Raises the error
        that stopped the workers.  Ctrl-C drains; a second one does not wait.
        """
        limit = _optional("timeout", timeout)
        before: Any = None
        if handle_signals:
            before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            with self:
                control = self._started()
                since: float | None = None
                bell = Bell()
                control_desk = self._entered(bell)
                try:
                    while not control.ended and not control.stopping:
                        bell.clear()
                        now = time.monotonic()
                        since = (since or now) if control.idle else None
                        if limit is not None and since is not None and now - since >= limit:
                            break
                        left = limit if since is None or limit is None else since + limit - now
                        # Bounded: signal handlers run between two waits.
                        bell.wait(1.0 if left is None else min(1.0, left))
                finally:
                    control_desk.waiters.discard(bell)
        finally:
            if handle_signals:
                signal.signal(signal.SIGTERM, before)

    def _started(self) -> Control:
        if self._control is None:
            raise ClosedError("the workers are not started: use `with`, start() or run()")
        return self._control

    def _entered(self, bell: Bell) -> Desk:
        assert self._desk is not None
        self._desk.waiters.add(bell)
        self._desk.bell.ring()
        return self._desk

    def __enter__(self) -> Self:
        self.start()
        return self

    # ---- waiting and ending ----

    def wait(self, until: str = "idle", timeout: float | str | None = None) -> bool:
        """Wait for a state; return False after `timeout` seconds.

        "idle": no record is open, and all assigned partitions were read to their ends.
        "caught_up": all records that are in the assigned partitions now are finished.  Raises the
        error that stopped the workers.
        """
        reached = self._condition(until)
        bell = Bell()
        desk = self._entered(bell)
        limit = _optional("timeout", timeout)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            while True:
                bell.clear()
                if reached():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                bell.wait(left)
        finally:
            desk.waiters.discard(bell)

    def _condition(self, until: str) -> Callable[[], bool]:
        """Return a function: whether the state is reached.  It raises if it cannot be any more."""
        control = self._started()
        if until not in ("idle", "caught_up"):
            raise ValueError(f"wait until 'idle' or 'caught_up', not {until!r}")
        ends: dict[TopicPartition, int] = {}
        turn = control.turn  # it may have looked at the logs before this call

        def reached() -> bool:
            if control.error is not None:
                raise control.error
            if control.ended:
                raise ClosedError("the workers have stopped")
            is_idle = control.idle and control.idle_turn > turn
            if is_idle or until == "idle":
                return is_idle
            desk = self._desk
            assert desk is not None
            with desk.lock:
                held = {tp: each.progress.committed for tp, each in desk.strands.held.items()}
            for tp in held:
                ends.setdefault(tp, control.end_of(tp))
            return bool(held) and all(held.get(tp, end) >= end for tp, end in ends.items())

        return reached

    def stop(self, *, drain: bool = True) -> None:
        """End: start no record any more, wait for running handlers unless `drain` is false, commit.

        Returns at once, so handlers and signal handlers may call it; `close` waits for the end.
        """
        if self._control is not None:
            self._control.request_stop(drain=drain)

    def drain(self, timeout: float | str | None = None) -> None:
        """Stop, and wait for the end; handlers have `timeout` seconds, else `drain_timeout`.

        Raises DrainTimeoutError if handlers still run after that: their records are processed
        again.  Raises the error that stopped the workers.
        """
        control = self._control
        if control is not None:
            control.request_stop(timeout=_optional("timeout", timeout))
            self._await_end(control)
            self._closed = True
            control.raise_error()
        self._closed = True

    def _await_end(self, control: Control) -> None:
        thread = self._thread
        assert thread is not None
        if thread is threading.current_thread():
            return
        bell = Bell()
        desk = self._entered(bell)
        try:
            while not control.ended:
                bell.clear()
                if not control.ended:
                    bell.wait(None)
        except KeyboardInterrupt:
            control.request_stop(drain=False)
            raise
        finally:
            desk.waiters.discard(bell)
        thread.join()

    def close(self) -> None:
        """Stop, and wait for the end, as `drain` does.  Does nothing if it is closed."""
        if not self._closed:
            self.drain()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except BaseException as failure:
            if error is None:
                raise
            # The block's own error is raised; often both are the same.
            if failure is not error:
                error.add_note(f"and the workers ended with: {failure!r}")

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    def stop_with_store(self) -> None:
        """End without waiting for handlers: the store is being closed."""
        if self._control is not None:
            self._control.request_stop(drain=False)
            self._await_end(self._control)

    # ---- changing and looking ----

    def pause(self, *partitions: tuple[str, int]) -> None:
        """Start and read no record of the named partitions, or of all that are assigned now."""
        self._started().set_paused(self._named(partitions), paused=True)

    def resume(self, *partitions: tuple[str, int]) -> None:
        """Process records of the named partitions, or of all that are assigned now, again."""
        self._started().set_paused(self._named(partitions), paused=False)

    def _named(self, partitions: Sequence[tuple[str, int]]) -> list[TopicPartition]:
        if partitions:
            return [TopicPartition(*each) for each in partitions]
        assert self._desk is not None
        with self._desk.lock:
            return list(self._desk.strands.held)

    def set_concurrency(self, n: int) -> None:
        """Run at most `n` handlers at once from now on; those that run are not stopped."""
        if n < 1:
            raise ConfigError(f"concurrency must be at least 1, not {n!r}")
        self._concurrency = n
        if self._control is not None:
            self._control.pool.resize(n)

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that it processes now, sorted."""
        self._started()
        return sorted(self._named(()))

    def stats(self) -> WorkerStats:
        """Return numbers: what runs, waits and failed, totals, and the lag."""
        control, desk = self._started(), self._desk
        assert desk is not None
        now, strands = self._clock.monotonic(), desk.strands
        with desk.lock:
            began = [work.started_at for work in strands.running if work.started_at is not None]
            committed = {tp: held.progress.committed for tp, held in strands.held.items()}
            counts = strands.counts
            numbers = {
                "running": len(strands.running), "waiting": strands.waiting,
                "retrying": strands.blocked, "leaving": strands.leaving,
                "stuck": len(control.pool.stuck), "done": counts.closed[DONE],
                "failed": counts.failed, "skipped": counts.closed[SKIPPED],
            }  # fmt: skip
        return WorkerStats(
            **numbers, per_second=control.paces[2],
            oldest_running_seconds=max((now - each for each in began), default=0.0),
            lag=sum(max(0, control.end_of(tp) - offset) for tp, offset in committed.items()),
            stopped=dict(control.stopped), last_error=control.last_error,
        )  # fmt: skip

    def stuck(self) -> list[Running]:
        """Return the handlers that are over their `timeout`; without one, all that run."""
        control, desk = self._started(), self._desk
        assert desk is not None
        now = self._clock.monotonic()
        with desk.lock:
            works = set(control.pool.stuck)
            if self._settings.timeout is None:
                works.update(desk.strands.running)
        found = []
        for work in works:
            since = work.started_at
            if since is not None:
                found.append(Running(work.record, since, now - since, *control.pool.stack(work)))
        return sorted(found, key=lambda each: each.started_at)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._control else "not started"
        return f"<Workers of group {self.group_id!r} {state}>"


class AsyncWorkers:
    """Workers for asyncio: the handler is a coroutine function, awaited in the caller's loop.

    The arguments are those of Workers.  ``async with`` starts and closes it.  Reading and commits
    are done by a thread, since a rebalance waits for handlers, and a commit for the disk: neither
    blocks the loop.
    """

    def __init__(self, store: Store, *topics: Topics, handler: Callable[..., Any],
                 **options: Any) -> None:  # fmt: skip
        if not is_async(handler):
            raise ConfigError("the handler of AsyncWorkers is a coroutine function: async def")
        self.workers = Workers(store, *topics, handler=handler, executor="asyncio", **options)

    async def start(self) -> None:
        """Start, with the handlers in the running loop."""
        self.workers._loop = asyncio.get_running_loop()
        self.workers.start()

    async def wait(self, until: str = "idle", timeout: float | str | None = None) -> bool:
        """As `Workers.wait`; no thread is blocked."""
        reached = self.workers._condition(until)
        return await self._until(reached, _optional("timeout", timeout))

    async def _until(self, reached: Callable[[], bool], limit: float | None) -> bool:
        bell = Bell()
        desk = self.workers._entered(bell)
        deadline = None if limit is None else time.monotonic() + limit
        try:
            while True:
                bell.clear()
                if reached():
                    return True
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                await bell.wait_in_loop(left)
        finally:
            desk.waiters.discard(bell)

    def stop(self, *, drain: bool = True) -> None:
        """As `Workers.stop`."""
        self.workers.stop(drain=drain)

    async def drain(self, timeout: float | str | None = None) -> None:
        """As `Workers.drain`."""
        workers = self.workers
        control = workers._control
        if control is not None:
            control.request_stop(timeout=_optional("timeout", timeout))
            try:
                await self._until(lambda: control.ended, None)
            except asyncio.CancelledError:
                control.request_stop(drain=False)
                raise
        workers.drain()

    async def close(self) -> None:
        """As `Workers.close`."""
        if not self.workers.closed:
            await self.drain()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            await self.close()
        except BaseException as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(f"and the workers ended with: {failure!r}")

    def pause(self, *partitions: tuple[str, int]) -> None:
        """As `Workers.pause`."""
        self.workers.pause(*partitions)

    def resume(self, *partitions: tuple[str, int]) -> None:
        """As `Workers.resume`."""
        self.workers.resume(*partitions)

    def set_concurrency(self, n: int) -> None:
        """As `Workers.set_concurrency`."""
        self.workers.set_concurrency(n)

    def assignment(self) -> list[TopicPartition]:
        """As `Workers.assignment`."""
        return self.workers.assignment()

    def stats(self) -> WorkerStats:
        """As `Workers.stats`."""
        return self.workers.stats()

    def stuck(self) -> list[Running]:
        """As `Workers.stuck`."""
        return self.workers.stuck()

    def __repr__(self) -> str:
        return f"<Async{repr(self.workers)[1:]}"


def _optional(name: str, duration: float | str | None) -> float | None:
    return None if duration is None else seconds(name, duration)


def _check(
    handler: object, order: str, executor: str | None, key: object, group_id: str,
    rate: float | None,
) -> None:  # fmt: skip
    if not callable(handler):
        raise TypeError(f"handler is a function of a record, not {handler!r}")
    if not group_id:
        raise ConfigError("workers are a member of a group: name it with group_id=")
    if order not in ORDERS:
        raise ConfigError(f"order must be 'key', 'partition' or 'none', not {order!r}")
    if key is not None and order != "key":
        raise ConfigError(f"key= is for order='key', not for order={order!r}")
    if executor == "process":
        raise ConfigError(
            "workers do not start processes: use executor='thread', and in the handler "
            "concurrent.futures.ProcessPoolExecutor.submit(...).result() for work of the CPU"
        )
    if executor is not None and executor not in EXECUTORS:
        raise ConfigError(f"executor must be 'thread' or 'asyncio', not {executor!r}")
    if executor is not None and (executor == "asyncio") != is_async(handler):
        raise ConfigError("executor='asyncio' is for a coroutine function, 'thread' for a function")
    if rate is not None and not rate > 0:
        raise ConfigError(f"rate must be more than 0 records a second, not {rate!r}")
