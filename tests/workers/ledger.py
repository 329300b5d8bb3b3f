"""Ledger: what handlers did, in one order; and the checks of W1 and W2 over it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.kit import PATIENCE, wait_until


class Ledger:
    """Starts and ends of handlers.  Threads share it: a list's append is one step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []  # ("start" | "end" | "raise", record)

    def handler(self, act: Callable[[Any], Any] = lambda record: None) -> Callable[[Any], Any]:
        """Return a handler that notes its start and its end around `act`."""

        def handle(record: Any) -> Any:
            self.events.append(("start", record))
            try:
                result = act(record)
            except BaseException:
                self.events.append(("raise", record))
                raise
            self.events.append(("end", record))
            return result

        return handle

    def values(self, kind: str = "end") -> list[bytes]:
        return [record.value for what, record in list(self.events) if what == kind]

    def wait_for(self, count: int, kind: str = "end") -> None:
        wait_until(lambda: len(self.values(kind)) >= count, f"{count} of {kind!r}")

    def check_order(self) -> None:
        """W1, W2: of one key of a partition one handler runs at a time, and in offset order.

        A record that is processed again begins at an offset at or below the last one.
        """
        running: dict[tuple[str, int, bytes | None], int] = {}
        last: dict[tuple[str, int, bytes | None], int] = {}
        for kind, record in self.events:
            strand = record.topic, record.partition, record.key
            if record.key is None:
                strand = record.topic, record.partition, b"%d" % record.offset
            if kind == "start":
                assert strand not in running, f"{strand} runs at {running[strand]}: {record.offset}"
                assert record.offset > last.get(strand, -1), f"{strand} was at {last[strand]}"
                running[strand] = record.offset
            else:
                assert running.pop(strand) == record.offset
                if kind == "end":
                    last[strand] = record.offset

    def assert_each_once(self, values: list[bytes]) -> None:
        assert Counter(self.values()) == Counter(values)


class Gatekeeper:
    """Handlers of chosen values wait until they are let through."""

    def __init__(self, *values: bytes) -> None:
        self.gates = {value: threading.Event() for value in values}

    def __call__(self, record: Any) -> None:
        gate = self.gates.get(record.value)
        if gate is not None:
            assert gate.wait(PATIENCE), "the test ended before it let the handler through"

    def open(self, *values: bytes) -> None:
        for value in values or self.gates:
            self.gates[value].set()
