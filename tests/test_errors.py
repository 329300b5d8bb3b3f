"""Every public exception can be copied and pickled: a process pool, multiprocessing and a future
that is awaited in another process send exceptions that way."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import logstore
from logstore.checking.problem import Problem, ProblemKind
from logstore.cli.exits import exit_code, message_of
from logstore.errors import LogStoreError


def corrupt() -> logstore.CorruptLogError:
    error = logstore.CorruptLogError(
        "bad checksum", path="a/0.log", position=61, start_offset=3, end_offset=7
    )
    error.problems = (Problem(ProblemKind.DAMAGED_BATCH, Path("a/0.log"), "bad checksum"),)
    return error


def disk_full() -> logstore.DiskFullError:
    error = logstore.DiskFullError(errno.ENOSPC, "No space left on device", "a/0.log")
    error.free_bytes, error.needed_bytes, error.reclaimable_bytes = 0, 100, 5
    error.remedy = "delete something"
    return error


def drain_timeout() -> logstore.DrainTimeoutError:
    error = logstore.DrainTimeoutError("1 handler still runs")
    error.records = (("orders", 0, 7),)
    return error


def handler_timeout() -> logstore.HandlerTimeoutError:
    error = logstore.HandlerTimeoutError("the handler of orders-0 offset 7 took longer than 5 s")
    error.record, error.seconds = ("orders", 0, 7), 5.0
    return error


ERRORS: dict[str, Callable[[], LogStoreError]] = {
    "CodecUnavailableError": lambda: logstore.CodecUnavailableError(
        "snappy", package="cramjam", extra="snappy"
    ),
    "ClusterMemberError": lambda: logstore.ClusterMemberError("a", 1, "alone", where="data"),
    "ClusterMismatchError": lambda: logstore.ClusterMismatchError("a", "b", where="data"),
    "ConflictError": lambda: logstore.ConflictError(5, 7, where="orders-0"),
    "DivergedError": lambda: logstore.DivergedError(
        "the source was truncated", where="orders-0", common_offset=5, end_offset=7
    ),
    **{
        name: lambda name=name: getattr(logstore, name)("__consumer_offsets", 7)
        for name in (
            *("CoordinatorError", "CoordinatorLoadingError"),
            *("CoordinatorNotAvailableError", "NotCoordinatorError"),
        )
    },
    "CorruptLogError": corrupt,
    "CorruptMetadataError": lambda: logstore.CorruptMetadataError(
        "the checksum is wrong", path="a/logstore.cluster"
    ),
    "DiskFullError": disk_full,
    "DrainTimeoutError": drain_timeout,
    "FailedLogError": lambda: logstore.FailedLogError("an fsync failed", offsets=range(0)),
    "FencedError": lambda: logstore.FencedError(4, 5, where="orders-0"),
    "HandlerTimeoutError": handler_timeout,
    "IndeterminateAppendError": lambda: logstore.IndeterminateAppendError(
        "an fsync failed", offsets=range(3, 5), leader_epoch=7
    ),
    "InterruptedAppendError": lambda: logstore.InterruptedAppendError(offsets=range(3, 4)),
    "LeaseLostError": lambda: logstore.LeaseLostError(7, attempts=2),
    "LockedError": lambda: logstore.LockedError("a/.lock", pid=1, holder="java"),
    "LogTruncatedError": lambda: logstore.LogTruncatedError(
        9, truncated_to=5, start=0, end=6, where="orders-0"
    ),
    "MetadataUnavailableError": lambda: logstore.MetadataUnavailableError(
        "no server of localhost:2181 answers", since=1.5
    ),
    "NodeIdInUseError": lambda: logstore.NodeIdInUseError(3, "host-a"),
    "NotEnoughReplicasError": lambda: logstore.NotEnoughReplicasError(1, 2, where="orders-0"),
    "NotLeaderError": lambda: logstore.NotLeaderError("orders-0", leader=2, epoch=5, asked=4),
    "OffsetOutOfRangeError": lambda: logstore.OffsetOutOfRangeError(9, start=0, end=6),
    "OutOfOrderSequenceError": lambda: logstore.OutOfOrderSequenceError(
        "a batch is missing", producer_id=1, sequence=8, expected=4
    ),
    "RebalanceError": lambda: logstore.RebalanceError(
        "the member is unknown", group="g", code="UNKNOWN_MEMBER_ID"
    ),
    "RecordNotFoundError": lambda: logstore.RecordNotFoundError(4, where="orders-0"),
    "RecordTooLargeError": lambda: logstore.RecordTooLargeError(200, 100),
    "ReplicaOfflineError": lambda: logstore.ReplicaOfflineError(
        "an fsync failed", where="orders-0"
    ),
    "RetryLater": lambda: logstore.RetryLater("10m"),
    "SerializationError": lambda: logstore.SerializationError(
        ValueError("x"), part="key", topic="orders", data=b"\xff", partition=0, offset=4
    ),
    "TopicExistsError": lambda: logstore.TopicExistsError("orders", where="data"),
    "UnknownTicketError": lambda: logstore.UnknownTicketError("000032UG03FK0000000O000000"),
    "UnknownTopicError": lambda: logstore.UnknownTopicError(
        "order", near=("orders",), where="data"
    ),
    "UnsafeFileSystemError": lambda: logstore.UnsafeFileSystemError("nfs", path="data"),
    "WhereError": lambda: logstore.WhereError("a value is missing", "key ==", 6),
}

PUBLIC = [
    name
    for name in sorted(logstore.__all__)
    if inspect.isclass(found := getattr(logstore, name)) and issubclass(found, BaseException)
]


def make(name: str) -> LogStoreError:
    kind: type[LogStoreError] = getattr(logstore, name)
    # Those that are not in the table take one text, as any exception does.
    error = ERRORS[name]() if name in ERRORS else kind("a text")
    assert type(error) is kind
    error.add_note("a note")
    return error


def facts(error: LogStoreError) -> dict[str, object]:
    found: dict[str, object] = {
        "type": type(error),
        "str": str(error),
        "repr": repr(error),
        "args": error.args,
        "attributes": {k: v for k, v in vars(error).items() if k != "__notes__"},
        "notes": error.__notes__,
    }
    if isinstance(error, OSError):
        found["os"] = (error.errno, error.strerror, error.filename, error.filename2)
    return found


def test_every_public_exception_is_a_logstore_error() -> None:
    assert set(ERRORS) <= set(PUBLIC)
    assert all(issubclass(getattr(logstore, name), LogStoreError) for name in PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_copy_has_type_text_arguments_attributes_and_notes(name: str) -> None:
    error = make(name)
    for copied in (copy.copy(error), copy.deepcopy(error)):
        assert copied is not error
        assert facts(copied) == facts(error)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", PUBLIC)
def test_a_pickle_has_type_text_arguments_attributes_and_notes(name: str, protocol: int) -> None:
    error = make(name)
    assert facts(pickle.loads(pickle.dumps(error, protocol))) == facts(error)


def test_a_subclass_with_its_own_parameters_can_be_copied() -> None:
    """A user's own subclass, as of an interceptor, inherits this."""
    error = SubclassError(1, second=2)
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), found.second) == (SubclassError, "1 and 2", 2)


class SubclassError(logstore.OffsetOutOfRangeError):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(first, start=0, end=1)
        self.args = (f"{first} and {second}",)
        self.second = second


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ClusterMemberError", 3),
        ("ClusterMismatchError", 3),
        ("CorruptMetadataError", 4),
        ("MetadataUnavailableError", 5),
        ("NodeIdInUseError", 3),
        ("NotEnoughReplicasError", 3),
        ("ReplicaOfflineError", 6),
    ],
)
def test_an_error_of_a_cluster_ends_the_command_with_its_code(name: str, code: int) -> None:
    assert exit_code(make(name)) == code
    assert message_of(make(name)) == str(make(name))


def test_an_indeterminate_append_has_the_epoch_of_its_leader() -> None:
    error = ERRORS["IndeterminateAppendError"]()
    assert isinstance(error, logstore.IndeterminateAppendError)
    assert error.leader_epoch == 7
    for name in ("FailedLogError", "InterruptedAppendError"):
        alone = ERRORS[name]()
        assert isinstance(alone, logstore.IndeterminateAppendError)
        assert alone.leader_epoch == -1


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -m logstore serve", "(python -m logstore serve)"),
        ("x" * 300 + " serve", f"({'x' * 300} ...)"),
        ("python " + "word " * 60, f"(python{' word' * 38} ...)"),
    ],
)
def test_the_command_line_of_a_lock_holder_is_cut_between_words(command: str, shown: str) -> None:
    assert shown in str(logstore.LockedError("a/.lock", pid=1, holder=command))
