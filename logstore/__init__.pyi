"""The public names, for type checkers."""

from logstore.checking.problem import (
    Problem as Problem,
)
from logstore.checking.problem import (
    ProblemKind as ProblemKind,
)
from logstore.checking.problem import (
    Severity as Severity,
)
from logstore.clock import (
    Clock as Clock,
)
from logstore.clock import (
    GuardedClock as GuardedClock,
)
from logstore.clock import (
    ManualClock as ManualClock,
)
from logstore.clock import (
    SystemClock as SystemClock,
)
from logstore.config import (
    ConfigError as ConfigError,
)
from logstore.config import (
    PartitionConfig as PartitionConfig,
)
from logstore.consumer.assignors import (
    Assignor as Assignor,
)
from logstore.consumer.assignors import (
    GroupMember as GroupMember,
)
from logstore.consumer.async_consumer import (
    AsyncConsumer as AsyncConsumer,
)
from logstore.consumer.consumer import (
    Consumer as Consumer,
)
from logstore.consumer.received import (
    ConsumedRecord as ConsumedRecord,
)
from logstore.consumer.received import (
    ReceivedRecord as ReceivedRecord,
)
from logstore.coordinators.group_admin import (
    GroupDescription as GroupDescription,
)
from logstore.coordinators.group_admin import (
    GroupMemberDescription as GroupMemberDescription,
)
from logstore.coordinators.group_admin import (
    Groups as Groups,
)
from logstore.coordinators.group_admin import (
    OffsetReset as OffsetReset,
)
from logstore.coordinators.group_events import GroupState as GroupState
from logstore.coordinators.group_events import Transition as Transition
from logstore.coordinators.lag import (
    Lag as Lag,
)
from logstore.coordinators.offset_records import (
    CommittedOffset as CommittedOffset,
)
from logstore.coordinators.offset_records import (
    TopicPartition as TopicPartition,
)
from logstore.coordinators.transaction_coordinator import (
    Transactions as Transactions,
)
from logstore.coordinators.transaction_state import (
    TransactionDescription as TransactionDescription,
)
from logstore.delays.scheduler import Scheduler as Scheduler
from logstore.delays.ticket import DelayedRecord as DelayedRecord
from logstore.delays.ticket import Ticket as Ticket
from logstore.errors import (
    ClosedError as ClosedError,
)
from logstore.errors import (
    ClusterMemberError as ClusterMemberError,
)
from logstore.errors import (
    ClusterMismatchError as ClusterMismatchError,
)
from logstore.errors import (
    CodecUnavailableError as CodecUnavailableError,
)
from logstore.errors import (
    ConcurrentTransactionsError as ConcurrentTransactionsError,
)
from logstore.errors import (
    ConflictError as ConflictError,
)
from logstore.errors import (
    CoordinatorError as CoordinatorError,
)
from logstore.errors import (
    CoordinatorLoadingError as CoordinatorLoadingError,
)
from logstore.errors import (
    CoordinatorNotAvailableError as CoordinatorNotAvailableError,
)
from logstore.errors import (
    CorruptLogError as CorruptLogError,
)
from logstore.errors import (
    CorruptMetadataError as CorruptMetadataError,
)
from logstore.errors import (
    DiskFullError as DiskFullError,
)
from logstore.errors import (
    DivergedError as DivergedError,
)
from logstore.errors import (
    FailedLogError as FailedLogError,
)
from logstore.errors import (
    FencedError as FencedError,
)
from logstore.errors import (
    ForkedHandleError as ForkedHandleError,
)
from logstore.errors import (
    IndeterminateAppendError as IndeterminateAppendError,
)
from logstore.errors import (
    InterruptedAppendError as InterruptedAppendError,
)
from logstore.errors import (
    InvalidNameError as InvalidNameError,
)
from logstore.errors import (
    InvalidRecordError as InvalidRecordError,
)
from logstore.errors import (
    LockedError as LockedError,
)
from logstore.errors import (
    LogStoreError as LogStoreError,
)
from logstore.errors import (
    LogTruncatedError as LogTruncatedError,
)
from logstore.errors import (
    MetadataUnavailableError as MetadataUnavailableError,
)
from logstore.errors import (
    NodeIdInUseError as NodeIdInUseError,
)
from logstore.errors import (
    NotALogError as NotALogError,
)
from logstore.errors import (
    NotCoordinatorError as NotCoordinatorError,
)
from logstore.errors import (
    NotEnoughReplicasError as NotEnoughReplicasError,
)
from logstore.errors import (
    NotLeaderError as NotLeaderError,
)
from logstore.errors import (
    OffsetOutOfRangeError as OffsetOutOfRangeError,
)
from logstore.errors import (
    OutOfOrderSequenceError as OutOfOrderSequenceError,
)
from logstore.errors import (
    ReadOnlyError as ReadOnlyError,
)
from logstore.errors import (
    RebalanceError as RebalanceError,
)
from logstore.errors import (
    RecordNotFoundError as RecordNotFoundError,
)
from logstore.errors import (
    RecordTooLargeError as RecordTooLargeError,
)
from logstore.errors import (
    ReplicaOfflineError as ReplicaOfflineError,
)
from logstore.errors import (
    TopicExistsError as TopicExistsError,
)
from logstore.errors import (
    TransactionAbortedError as TransactionAbortedError,
)
from logstore.errors import (
    TransactionStateError as TransactionStateError,
)
from logstore.errors import (
    UnknownTopicError as UnknownTopicError,
)
from logstore.errors import (
    UnsafeFileSystemError as UnsafeFileSystemError,
)
from logstore.errors import (
    UnsupportedFormatError as UnsupportedFormatError,
)
from logstore.format.batch import (
    BatchHeader as BatchHeader,
)
from logstore.format.batch import (
    with_producer as with_producer,
)
from logstore.format.encoder import (
    BatchEncoder as BatchEncoder,
)
from logstore.format.index import (
    AbortedTransaction as AbortedTransaction,
)
from logstore.format.index import (
    OffsetIndex as OffsetIndex,
)
from logstore.format.index import (
    TimeIndex as TimeIndex,
)
from logstore.format.index import (
    TransactionIndex as TransactionIndex,
)
from logstore.format.validation import (
    AppendedBatches as AppendedBatches,
)
from logstore.interceptors import (
    ConsumerInterceptor as ConsumerInterceptor,
)
from logstore.interceptors import (
    Outgoing as Outgoing,
)
from logstore.interceptors import (
    ProducerInterceptor as ProducerInterceptor,
)
from logstore.kafka.config import KafkaConfig as KafkaConfig
from logstore.kafka.server import KafkaServer as KafkaServer
from logstore.kafka.source import KafkaSource as KafkaSource
from logstore.log.epochs import (
    EpochEnd as EpochEnd,
)
from logstore.log.epochs import (
    LeaderEpochs as LeaderEpochs,
)
from logstore.log.producer_files import (
    DiscardedSnapshot as DiscardedSnapshot,
)
from logstore.log.producer_state import (
    OngoingTransaction as OngoingTransaction,
)
from logstore.log.retention import (
    RetentionDecision as RetentionDecision,
)
from logstore.log.retention import (
    RetentionPolicy as RetentionPolicy,
)
from logstore.log.segment import (
    Segment as Segment,
)
from logstore.opening import (
    open as open,
)
from logstore.opening import (
    open_member as open_member,
)
from logstore.partition.partition import (
    Partition as Partition,
)
from logstore.partition.scan import (
    LocatedBatch as LocatedBatch,
)
from logstore.partition.scan import (
    Scan as Scan,
)
from logstore.partition.scan import (
    Skipped as Skipped,
)
from logstore.partition.writer import (
    Writer as Writer,
)
from logstore.partitioner import (
    KeyPartitioner as KeyPartitioner,
)
from logstore.partitioner import (
    Partitioner as Partitioner,
)
from logstore.partitioner import (
    RandomPartitioner as RandomPartitioner,
)
from logstore.partitioner import (
    RoundRobinPartitioner as RoundRobinPartitioner,
)
from logstore.producer.async_producer import (
    AsyncProducer as AsyncProducer,
)
from logstore.producer.async_producer import (
    AsyncTransaction as AsyncTransaction,
)
from logstore.producer.delivery import (
    Delivery as Delivery,
)
from logstore.producer.producer import (
    Producer as Producer,
)
from logstore.producer.transaction import (
    Transaction as Transaction,
)
from logstore.queues.async_queue import (
    AsyncQueue as AsyncQueue,
)
from logstore.queues.message import (
    Message as Message,
)
from logstore.queues.queue import (
    Queue as Queue,
)
from logstore.queues.queue import (
    QueueSize as QueueSize,
)
from logstore.queues.std_queue import (
    StdQueue as StdQueue,
)
from logstore.record import (
    BytesColumn as BytesColumn,
)
from logstore.record import (
    Columns as Columns,
)
from logstore.record import (
    Record as Record,
)
from logstore.recovery.report import Damage as Damage
from logstore.recovery.report import RecoveryReport as RecoveryReport
from logstore.recovery.report import TornTail as TornTail
from logstore.replication.cluster import Cluster as Cluster
from logstore.replication.cluster_topic import ClusterPartition as ClusterPartition
from logstore.replication.cluster_topic import ClusterTopic as ClusterTopic
from logstore.replication.cluster_topic import Reassignment as Reassignment
from logstore.replication.config import NodeConfig as NodeConfig
from logstore.replication.follow import Follow as Follow
from logstore.replication.follow import FollowedPartition as FollowedPartition
from logstore.replication.follow import FollowStatus as FollowStatus
from logstore.replication.node import Node as Node
from logstore.replication.status import ClusterStatus as ClusterStatus
from logstore.replication.status import NodeStatus as NodeStatus
from logstore.replication.status import PartitionStatus as PartitionStatus
from logstore.serialization import (
    Serde as Serde,
)
from logstore.serialization import (
    SerializationError as SerializationError,
)
from logstore.store.recovery_report import (
    StoreRecovery as StoreRecovery,
)
from logstore.store.store import (
    Store as Store,
)
from logstore.store.topic import (
    PartitionDescription as PartitionDescription,
)
from logstore.store.topic import (
    Position as Position,
)
from logstore.store.topic import (
    Topic as Topic,
)
from logstore.store.topic import (
    TopicDescription as TopicDescription,
)
from logstore.upkeep.compaction import (
    Compactor as Compactor,
)
from logstore.upkeep.compaction_report import CompactedSegment as CompactedSegment
from logstore.upkeep.compaction_report import CompactionReport as CompactionReport
from logstore.upkeep.maintenance import (
    Maintenance as Maintenance,
)
from logstore.upkeep.maintenance import (
    MaintenanceAct as MaintenanceAct,
)
from logstore.upkeep.maintenance import (
    MaintenanceFault as MaintenanceFault,
)
from logstore.upkeep.maintenance import (
    MaintenanceReport as MaintenanceReport,
)
from logstore.upkeep.repair import (
    repair as repair,
)
from logstore.upkeep.repair_report import Repair as Repair
from logstore.upkeep.repair_report import RepairStep as RepairStep
from logstore.where import (
    Where as Where,
)
from logstore.where import (
    WhereError as WhereError,
)
from logstore.work_errors import (
    DrainTimeoutError as DrainTimeoutError,
)
from logstore.work_errors import (
    HandlerTimeoutError as HandlerTimeoutError,
)
from logstore.work_errors import (
    LeaseLostError as LeaseLostError,
)
from logstore.work_errors import (
    PoisonRecordError as PoisonRecordError,
)
from logstore.work_errors import (
    ScheduleError as ScheduleError,
)
from logstore.work_errors import (
    StuckWorkersError as StuckWorkersError,
)
from logstore.work_errors import (
    UnknownTicketError as UnknownTicketError,
)
from logstore.workers.context import (
    Context as Context,
)
from logstore.workers.context import (
    Dead as Dead,
)
from logstore.workers.context import (
    RetryLater as RetryLater,
)
from logstore.workers.context import (
    Skip as Skip,
)
from logstore.workers.stats import (
    Running as Running,
)
from logstore.workers.stats import (
    WorkerStats as WorkerStats,
)
from logstore.workers.workers import (
    AsyncWorkers as AsyncWorkers,
)
from logstore.workers.workers import (
    Workers as Workers,
)

__version__: str
__all__: list[str]
