"""check_store: looks for damage in the root of a store and in every partition."""

from __future__ import annotations

from collections.abc import Iterable

from logstore.checking.partition_check import (
    CheckProgress,
    bytes_to_inspect,
    check_choice,
    find_problems,
    raise_first_error,
)
from logstore.checking.problem import Problem, ProblemKind
from logstore.checking.root_check import RootInspection
from logstore.errors import ClosedError, LogStoreError, UnknownTopicError
from logstore.files.directory import Directory
from logstore.store.topic import Topic

__all__ = ["check_store"]


def check_store(
    directory: Directory,
    topics: Iterable[Topic],
    *,
    deep: bool,
    on_corrupt: str,
    progress: CheckProgress | None,
) -> list[Problem]:
    """Return the problems of the root's files and of all partitions; see `Store.check`.

    Writes nothing.  A topic that is deleted during the check is left out.
    """
    check_choice(on_corrupt)
    problems = RootInspection(directory).run()
    unopened: BaseException | None = None
    done = total = 0

    def moved(now: int, in_all: int) -> None:
        if progress is not None:
            progress(done + now, total + in_all)

    for topic in topics:
        for number in topic.partition_numbers:
            where = directory.path / f"{topic.name}-{number}"
            try:
                partition = topic[number]
                size = bytes_to_inspect(partition.segments, deep=deep)
                problems += find_problems(partition.parts.view, deep=deep, progress=moved)
            except UnknownTopicError:
                break  # deleted during the check
            except ClosedError:
                raise
            except (LogStoreError, OSError) as error:
                unopened = unopened or error
                if not any(problem.path == where for problem in problems):
                    kind = ProblemKind.UNOPENABLE_PARTITION
                    problems.append(Problem(kind, where, str(error)))
                continue
            done, total = done + size, total + size
    if on_corrupt == "raise":
        if unopened is not None:
            raise unopened
        raise_first_error(problems)
    return problems
