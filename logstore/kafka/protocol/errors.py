"""ErrorCode: Kafka's error codes, and which of logstore's exceptions is which code."""

from __future__ import annotations

import os
import re
from enum import IntEnum

from logstore.config import ConfigError
from logstore.errors import (
    ClosedError,
    ConcurrentTransactionsError,
    ConflictError,
    CoordinatorError,
    CoordinatorLoadingError,
    CorruptLogError,
    DiskFullError,
    FailedLogError,
    FencedError,
    IndeterminateAppendError,
    InvalidNameError,
    InvalidRecordError,
    LockedError,
    LogStoreError,
    NotALogError,
    NotCoordinatorError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OutOfOrderSequenceError,
    ReadOnlyError,
    RebalanceError,
    RecordNotFoundError,
    RecordTooLargeError,
    TopicExistsError,
    TransactionAbortedError,
    TransactionStateError,
    UnknownTopicError,
    UnsafeFileSystemError,
    UnsupportedFormatError,
)

__all__ = ["ErrorCode", "KafkaError", "error_code", "error_message"]

MESSAGE_LENGTH_MAX = 300


class ErrorCode(IntEnum):
    """Kafka's codes that the listener answers with."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC_EXCEPTION = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    INVALID_REQUIRED_ACKS = 21
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER_ID = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_ALREADY_EXISTS = 36
    INVALID_PARTITIONS = 37
    INVALID_REPLICATION_FACTOR = 38
    INVALID_REPLICA_ASSIGNMENT = 39
    INVALID_CONFIG = 40
    NOT_CONTROLLER = 41
    INVALID_REQUEST = 42
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    TRANSACTION_COORDINATOR_FENCED = 52
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    SECURITY_DISABLED = 54
    OPERATION_NOT_ATTEMPTED = 55
    KAFKA_STORAGE_ERROR = 56
    LOG_DIR_NOT_FOUND = 57
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    REASSIGNMENT_IN_PROGRESS = 60
    NON_EMPTY_GROUP = 68
    GROUP_ID_NOT_FOUND = 69
    FETCH_SESSION_ID_NOT_FOUND = 70
    INVALID_FETCH_SESSION_EPOCH = 71
    TOPIC_DELETION_DISABLED = 73
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    UNSUPPORTED_COMPRESSION_TYPE = 76
    STALE_BROKER_EPOCH = 77
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83
    ELECTION_NOT_NEEDED = 84
    NO_REASSIGNMENT_IN_PROGRESS = 85
    GROUP_SUBSCRIBED_TO_TOPIC = 86
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    RESOURCE_NOT_FOUND = 91
    DUPLICATE_RESOURCE = 92
    UNACCEPTABLE_CREDENTIAL = 93
    INVALID_UPDATE_VERSION = 95
    FEATURE_UPDATE_FAILED = 96
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103
    TRANSACTIONAL_ID_NOT_FOUND = 105
    FETCH_SESSION_TOPIC_ID_ERROR = 106
    FENCED_MEMBER_EPOCH = 110
    UNRELEASED_INSTANCE_ID = 111
    UNSUPPORTED_ASSIGNOR = 112
    STALE_MEMBER_EPOCH = 113
    MISMATCHED_ENDPOINT_TYPE = 114
    UNSUPPORTED_ENDPOINT_TYPE = 115
    TRANSACTION_ABORTABLE = 120
    INVALID_REGULAR_EXPRESSION = 128


class KafkaError(Exception):
    """A handler's answer that is an error code and nothing else."""

    def __init__(self, code: ErrorCode, message: str | None = None) -> None:
        super().__init__(message or code.name)
        self.code = code


# The most specific class first.  What depends on the API or its version is decided there.
_CODES: tuple[tuple[type[BaseException], ErrorCode], ...] = (
    (CoordinatorLoadingError, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
    (NotCoordinatorError, ErrorCode.NOT_COORDINATOR),
    (CoordinatorError, ErrorCode.COORDINATOR_NOT_AVAILABLE),
    (NotEnoughReplicasError, ErrorCode.NOT_ENOUGH_REPLICAS),
    (UnknownTopicError, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (OffsetOutOfRangeError, ErrorCode.OFFSET_OUT_OF_RANGE),
    (RecordNotFoundError, ErrorCode.UNKNOWN_SERVER_ERROR),
    (RecordTooLargeError, ErrorCode.MESSAGE_TOO_LARGE),
    (UnsupportedFormatError, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
    (NotLeaderError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (FencedError, ErrorCode.INVALID_PRODUCER_EPOCH),
    (OutOfOrderSequenceError, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (TransactionAbortedError, ErrorCode.INVALID_PRODUCER_EPOCH),
    (ConcurrentTransactionsError, ErrorCode.CONCURRENT_TRANSACTIONS),
    (TransactionStateError, ErrorCode.INVALID_TXN_STATE),
    (ConflictError, ErrorCode.INVALID_REQUEST),
    (TopicExistsError, ErrorCode.TOPIC_ALREADY_EXISTS),
    (InvalidNameError, ErrorCode.INVALID_TOPIC_EXCEPTION),
    (ConfigError, ErrorCode.INVALID_CONFIG),
    (ReadOnlyError, ErrorCode.POLICY_VIOLATION),
    (CorruptLogError, ErrorCode.CORRUPT_MESSAGE),
    (FailedLogError, ErrorCode.KAFKA_STORAGE_ERROR),
    (IndeterminateAppendError, ErrorCode.KAFKA_STORAGE_ERROR),
    (DiskFullError, ErrorCode.KAFKA_STORAGE_ERROR),
    (LockedError, ErrorCode.KAFKA_STORAGE_ERROR),
    (NotALogError, ErrorCode.KAFKA_STORAGE_ERROR),
    (UnsafeFileSystemError, ErrorCode.KAFKA_STORAGE_ERROR),
    (ClosedError, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (TimeoutError, ErrorCode.REQUEST_TIMED_OUT),
    (OSError, ErrorCode.KAFKA_STORAGE_ERROR),
)

_REASONS = {
    "crc": ErrorCode.CORRUPT_MESSAGE,
    "codec": ErrorCode.CORRUPT_MESSAGE,
    "size": ErrorCode.MESSAGE_TOO_LARGE,
    "timestamp": ErrorCode.INVALID_TIMESTAMP,
    "transaction": ErrorCode.INVALID_TXN_STATE,
}


def error_code(error: BaseException) -> ErrorCode:
    """Return the code for an exception; UNKNOWN_SERVER_ERROR for one that is not expected."""
    if isinstance(error, KafkaError):
        return error.code
    if isinstance(error, RebalanceError):
        return ErrorCode.__members__.get(error.code, ErrorCode.UNKNOWN_SERVER_ERROR)
    if isinstance(error, InvalidRecordError):
        return _REASONS.get(error.reason, ErrorCode.INVALID_RECORD)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ErrorCode.UNKNOWN_SERVER_ERROR


# An absolute path, of which the last name is kept.
_PATH = re.compile(r"(?<![\w.~/])/(?:[^\s/'\":;,]+/)+([^\s/'\":;,]+)")


def error_message(error: BaseException) -> str | None:
    """Return the words for a client, without paths of this machine."""
    if isinstance(error, KafkaError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, LogStoreError):
        return error.strerror  # str() would name the file
    if isinstance(error, TopicExistsError):
        return f"Topic '{error.topic}' already exists."  # Kafka's words: scripts search for them
    if error_code(error) is ErrorCode.UNKNOWN_SERVER_ERROR:
        return "unexpected error; the server's log has it"
    words = str(error)
    if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
        named = os.fspath(error.filename)
        words = words.replace(named, os.path.basename(named))
    return _PATH.sub(r"\1", words)[:MESSAGE_LENGTH_MAX]
