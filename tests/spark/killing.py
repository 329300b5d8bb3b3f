"""A process that is killed at a chosen step of its work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any


def killed_at(step: int, act: Callable[[], object], calls: Iterable[tuple[Any, str]]) -> bool:
    """Whether `act`, in a process of its own, was killed at call number `step` of `calls`.

    `calls` are (owner, attribute) pairs.  False: it came to its end before that.
    """
    child = os.fork()
    if child == 0:
        try:
            _count_down(step, calls)
            act()
        except BaseException:  # noqa: BLE001  the exit code shows it
            os._exit(2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def _count_down(steps: int, calls: Iterable[tuple[Any, str]]) -> None:
    left = steps

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return original(*args, **kwargs)

        setattr(owner, name, call)

    for owner, name in calls:
        counted(owner, name)
