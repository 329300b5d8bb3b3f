"""The same requests for a real broker and for the listener, and the comparison of the answers.

A walk is a function of a `Walk`: it sends requests and uses the answers (a member id, a producer
id) in later requests.  It runs once against each side.  Each side keeps a transcript, and
`differences` compares the two transcripts field by field.

Ids are compared by where they occur: the first producer id that a side gives is #1, and so on.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Self

from logstore import Record
from logstore.kafka.apis import APIS
from logstore.kafka.handlers.versions import FEATURES
from tests.kafka.peer import Peer, batch, produce_body

START_MS = int(time.time() * 1000) - 100_000  # recent: a marker of a later week rolls a segment
PATIENCE = 120.0
NOT_READY = {14, 15, 16, 51}  # coordinator loading, not available, not here; transaction not ended

ABSENT = "absent"

# Fields that differ, and why.  Null, empty and negative values are compared all the same.
MASKED = {
    "host": "the address of the side",
    "port": "the address of the side",
    "log_dir": "the path of the side",
    "cluster_id": "the id of the side",
    "error_message": "the words of the side",
    "batch_index_error_message": "the words of the side",
    "documentation": "the words of the side",
    "log_append_time_ms": "the time of the request",
    "last_timestamp": "the time of the request",
    "transaction_start_time_ms": "the time of the request",
    "total_bytes": "the disk",
    "usable_bytes": "the disk",
}
# Fields that are not compared at all.
IGNORED = {
    "api_keys": "a broker serves more APIs; a test compares the ranges",
    "finalized_features_epoch": "a broker counts changes of its metadata",
    "synonyms": "a broker names its own defaults, the listener has none",
    "topic_authorized_operations": "the listener has no authorizer",
    "cluster_authorized_operations": "the listener has no authorizer",
    "authorized_operations": "the listener has no authorizer",
}
IDS = {"topic_id", "producer_id", "session_id"}
MEMBER = re.compile(r"(.*)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
BATCH = struct.Struct(">qiibIhiqqqhii")


class Step(NamedTuple):
    """One request of a walk, with what the side answered."""

    name: str
    answer: Any
    allowed: Mapping[str, tuple[Any, Any]]  # by field: the value of Kafka, the value of ours
    asked: object = None


class Side:
    """A broker or a listener.  Closed with every connection that its walks opened."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def await_coordinators(self) -> None:
        """Wait until groups can be joined and transactions begun."""
        with Walk(self) as walk:
            for kind in (0, 1):
                walk.quietly(10, 3, {"key": "warm", "key_type": kind})
            walk.quietly(12, 0, {"group_id": "warm", "generation_id": 1, "member_id": "m"})
            walk.quietly(22, 4, {"transactional_id": "warm", "transaction_timeout_ms": 60_000})


class Walk:
    """Sends requests to one side and keeps the transcript."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.steps: list[Step] = []
        self.ids: dict[object, str] = {}
        self.ids_of: dict[str, bytes] = {}  # topics that a walk fetches by id
        self.peers: list[Peer] = []
        self.first = self.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for peer in self.peers:
            peer.socket.close()

    def connect(self) -> Peer:
        """Return a connection of its own, for a request that waits."""
        self.peers.append(Peer(self.side.address, timeout=PATIENCE))
        return self.peers[-1]

    # ---- requests of the transcript ----

    def ask(
        self,
        key: int,
        version: int,
        body: dict[str, Any],
        *,
        name: str = "",
        client: str = "peer",
        we: Mapping[str, tuple[Any, Any]] | None = None,
        retry: Collection[int] = (),
        only: Callable[[dict[str, Any]], bool] | None = None,
    ) -> dict[str, Any]:
        """Send a request and note the answer, or that the connection was closed.

        `we`: fields that may differ, with the value of Kafka and ours.  `retry`: error codes that
        pass.  `only`: which rows of an answer about everything belong to this walk.
        """
        answer = self._answered(key, version, body, client, retry)
        self.note(name or f"{APIS[key].name} v{version}", answer, we, only, body)
        return answer or {}

    def note(
        self,
        name: str,
        answer: dict[str, Any] | None,
        we: Mapping[str, tuple[Any, Any]] | None = None,
        only: Callable[[dict[str, Any]], bool] | None = None,
        asked: object = None,
    ) -> None:
        """Add an answer to the transcript."""
        kept = "closed" if answer is None else self._comparable(answer, only)
        self.steps.append(Step(name, kept, we or {}, asked))

    def raw(self, name: str, data: bytes) -> None:
        """Send bytes, and note the frame that is answered, or that the connection was closed."""
        peer = self.connect()
        peer.socket.sendall(data)
        try:
            self.steps.append(Step(name, peer.frame().hex(), {}))
        except (EOFError, ConnectionResetError):
            self.steps.append(Step(name, "closed", {}))

    # ---- requests that are not compared ----

    def quietly(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, again and again as long as the side is not ready for it."""
        answer = self._answered(key, version, body, "peer", NOT_READY)
        assert answer is not None, APIS[key].name
        return answer

    def _answered(
        self, key: int, version: int, body: dict[str, Any], client: str, retry: Collection[int]
    ) -> dict[str, Any] | None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                answer = self.first.ask(key, version, body, client=client)
            except (EOFError, ConnectionResetError):
                self.first = self.connect()
                return None
            if not retry or not set(_codes(answer)) & set(retry):
                return answer
            if time.monotonic() > deadline:
                return answer
            time.sleep(0.02)

    def topic(self, name: str, partitions: int = 1, **config: str) -> bytes:
        """Make a topic unless it is there, wait until it can be read, and return its id."""
        configs = [{"name": k.replace("_", "."), "value": v} for k, v in config.items()]
        row = {"name": name, "num_partitions": partitions, "replication_factor": 1}
        asked = {"topics": [row | {"configs": configs}], "timeout_ms": 10_000}
        made = self.quietly(19, 4, asked)["topics"][0]
        assert made["error_code"] in (0, 36), made
        self.await_topic(name, partitions)
        return self.id_of(name)

    def await_topic(self, name: str, partitions: int = 1) -> None:
        """Wait until every partition of a topic has a leader."""
        numbers = [{"partition_index": n, "timestamp": -2} for n in range(partitions)]
        asked = {"replica_id": -1, "topics": [{"name": name, "partitions": numbers}]}
        deadline = time.monotonic() + PATIENCE
        while any(_codes(self.quietly(2, 1, asked))) or not self._described(name)["partitions"]:
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def await_gone(self, name: str) -> None:
        """Wait until a topic is deleted."""
        deadline = time.monotonic() + PATIENCE
        while self._described(name)["error_code"] != 3:
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def _described(self, name: str) -> dict[str, Any]:
        asked = {"topics": [{"name": name}], "allow_auto_topic_creation": False}
        described: dict[str, Any] = self.quietly(3, 10, asked)["topics"][0]
        return described

    def id_of(self, name: str) -> bytes:
        """Return the id of a topic."""
        found: bytes = self._described(name)["topic_id"]
        self._field("topic_id", found, None)  # numbered: rows are sorted by it
        return found

    def produce(self, topic: str, *values: bytes, partition: int = 0) -> None:
        """Append one batch for each value, a millisecond after the one before."""
        for number, value in enumerate(values):
            raw = at(START_MS + number, value)
            answer = self.quietly(0, 9, produce_body(topic, raw, partition=partition))
            assert not any(_codes(answer)), answer

    def joined(
        self, group: str, topic: str = "t", *, instance: str | None = None, **more: Any
    ) -> tuple[str, int]:
        """Join a group alone, bring the assignment, and return the member id and generation."""
        asked = join(group, topic, instance=instance, **more)
        got = self.quietly(11, 5, asked)
        if got["error_code"] == 79:
            got = self.quietly(11, 5, asked | {"member_id": got["member_id"]})
        assert got["error_code"] == 0, got
        member, generation = got["member_id"], got["generation_id"]
        done = self.quietly(14, 3, sync(group, member, generation, instance=instance))
        assert done["error_code"] == 0, done
        return member, generation

    def producer(self, transactional_id: str | None) -> tuple[int, int]:
        """Return a producer id and its epoch."""
        asked = {"transactional_id": transactional_id, "transaction_timeout_ms": 60_000}
        got = self.quietly(22, 4, asked)
        assert got["error_code"] == 0, got
        return got["producer_id"], got["producer_epoch"]

    # ---- what is compared ----

    def _comparable(self, answer: Any, only: Callable[[dict[str, Any]], bool] | None) -> Any:
        if isinstance(answer, list):
            if answer and isinstance(answer[0], dict):
                if only is not None:
                    answer = [each for each in answer if only(each)]
                answer = sorted(answer, key=lambda row: repr(self._order(row)))
            return [self._comparable(each, None) for each in answer]
        if isinstance(answer, dict):
            return {
                name: self._field(name, value, only)
                for name, value in answer.items()
                if name not in IGNORED
            }
        return self._text(answer) if isinstance(answer, str) else answer

    def _order(self, value: Any) -> Any:
        """Return what rows are sorted by: a broker answers some of them in the order of a hash."""
        if isinstance(value, dict):
            return [
                (name, self.ids.get((name, each), "") if name in IDS else self._order(each))
                for name, each in value.items()
                if name not in MASKED and name != "member_id"
            ]
        if isinstance(value, list):
            return [self._order(each) for each in value]
        return bytes(value) if isinstance(value, memoryview) else value

    def _field(self, name: str, value: Any, only: Callable[[dict[str, Any]], bool] | None) -> Any:
        if name in MASKED and value not in (None, "", -1):
            return "masked"
        if name in IDS and value not in (-1, 0, bytes(16)):
            return self.ids.setdefault((name, value), f"{name} #{len(self.ids)}")
        if name == "records":
            return [self._field("batch", each, None) for each in headers(value or b"")]
        if name in ("supported_features", "finalized_features"):
            value = [each for each in value if each["name"] in OUR_FEATURES]
        if name == "configs" and value is not None and value and "value" in value[0]:
            value = [each for each in value if each["name"] not in ONLY_ONE_SIDE]
        return self._comparable(value, only)

    def _text(self, value: str) -> str:
        found = MEMBER.fullmatch(value)
        if not found:
            return value
        return self.ids.setdefault(value, f"{found[1]} #{len(self.ids)}")


OUR_FEATURES = {feature.name for feature in FEATURES}  # a broker has more

# Settings of a topic that only one side has.
ONLY_ONE_SIDE = {
    # of a broker: replicas and tiers
    *("leader.replication.throttled.replicas", "follower.replication.throttled.replicas"),
    *("local.retention.bytes", "local.retention.ms", "remote.log.copy.disable"),
    *("remote.log.delete.on.disable", "remote.storage.enable"),
    # ours: a broker has the second for the node, and the first not at all
    *("max.decompressed.message.bytes", "producer.id.expiration.ms"),
}


def at(timestamp: int, *values: bytes | None, key: bytes | None = None, **options: Any) -> bytes:
    """Return a batch of records with the same time."""
    rows = (Record(value, key=key, timestamp=timestamp) for value in values)
    return batch(*rows, **options)


def headers(data: bytes | memoryview) -> Iterator[dict[str, Any]]:
    """Yield the headers of whole batches; a batch that is cut off at the end is left out."""
    data = bytes(data)
    place = 0
    while place + 61 <= len(data):
        fields = BATCH.unpack_from(data, place)
        base, length, epoch, magic, _, attributes, last, first_time, max_time = fields[:9]
        if place + 12 + length > len(data):
            return
        row = {"base_offset": base, "length": length, "epoch": epoch, "magic": magic}
        row |= {"attributes": attributes, "last_delta": last, "producer_id": fields[9]}
        row |= {"producer_epoch": fields[10], "sequence": fields[11], "count": fields[12]}
        if not attributes & 0x20:  # a marker has the time of its side
            row |= {"first_time": first_time, "max_time": max_time}
        yield row
        place += 12 + length


def join(group: str, topic: str = "t", *, member: str = "", instance: str | None = None,
         protocols: tuple[str, ...] = ("range",), kind: str = "consumer",
         session: int = 10_000) -> dict[str, Any]:  # fmt: skip
    """Return a JoinGroup request of a consumer that reads a topic."""
    name = topic.encode()
    subscription = struct.pack(">hih", 1, 1, len(name)) + name + struct.pack(">ii", -1, 0)
    return {
        "group_id": group, "session_timeout_ms": session, "rebalance_timeout_ms": 10_000,
        "member_id": member, "group_instance_id": instance, "protocol_type": kind,
        "protocols": [{"name": each, "metadata": subscription} for each in protocols],
    }  # fmt: skip


def sync(group: str, member: str, generation: int, *, instance: str | None = None,
         **more: Any) -> dict[str, Any]:  # fmt: skip
    """Return a SyncGroup request of a leader that is the only member."""
    mine = [{"member_id": member, "assignment": b"mine"}]
    return {
        "group_id": group, "generation_id": generation, "member_id": member,
        "group_instance_id": instance, "assignments": mine,
    } | more  # fmt: skip


def commit(group: str, topic: str, offset: int, *, member: str = "", generation: int = -1,
           instance: str | None = None, metadata: str = "") -> dict[str, Any]:  # fmt: skip
    """Return an OffsetCommit request for partition 0."""
    row = {"partition_index": 0, "committed_offset": offset, "committed_metadata": metadata}
    return {
        "group_id": group, "generation_id_or_member_epoch": generation, "member_id": member,
        "group_instance_id": instance, "topics": [{"name": topic, "partitions": [row]}],
    }  # fmt: skip


def _codes(answer: Any) -> Iterator[int]:
    """Yield every error code of an answer."""
    if isinstance(answer, dict):
        for name, value in answer.items():
            if name in ("error_code", "partition_error_code"):
                yield value
            else:
                yield from _codes(value)
    elif isinstance(answer, list):
        for each in answer:
            yield from _codes(each)


def _rows(value: list[Any]) -> dict[object, Any]:
    """Return rows by their name: a row that one side has more moves no other row."""
    found: dict[object, Any] = {}
    for number, row in enumerate(value):
        name = row.get("name", number) if isinstance(row, dict) else number
        found[f"{name} again" if name in found else name] = row
    return found


def _unequal(path: str, left: Any, right: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where two values differ, with both values."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in dict.fromkeys([*left, *right]):
            below = f"{path}.{name}" if path else name
            yield from _unequal(below, left.get(name, ABSENT), right.get(name, ABSENT))
    elif isinstance(left, list) and isinstance(right, list):
        theirs, ours = _rows(left), _rows(right)
        for name in dict.fromkeys([*theirs, *ours]):
            below = f"{path}[{name}]"
            yield from _unequal(below, theirs.get(name, ABSENT), ours.get(name, ABSENT))
    elif left != right:
        yield path, left, right


class Allowed(NamedTuple):
    """A value that differs for a reason."""

    api: str  # empty: every API
    path: str  # its end
    kafka: Any
    ours: Any  # `...`: any value
    reason: str


FOREVER = str(2**63 - 1)
ALLOWED = [
    Allowed("Metadata", "leader_epoch", 0, -1, "a Metadata opens no partition"),
    Allowed("", "error_message", None, "masked", "a broker has no words for some errors"),
    Allowed("", "error_message", "", "masked", "a broker has no words for some errors"),
    Allowed("DescribeTopicPartitions", "leader_epoch", 0, -1, "a describe opens no partition"),
    *(
        Allowed(api, f"[{name}].{field}", *values)
        for api in ("CreateTopics", "DescribeConfigs")
        for name, field, *values in (
            ("retention.ms", "value", "604800000", "-1", "a store deletes nothing unasked"),
            ("message.timestamp.after.max.ms", "value", "3600000", FOREVER, "any time is taken"),
            ("min.insync.replicas", "config_source", 3, 5, "one node: a default of no cluster"),
        )
    ),
]


def differences(kafka: Walk, ours: Walk) -> list[str]:
    """Return every field that differs and may not, and every difference that is not there."""
    found = []
    for theirs, mine in zip(kafka.steps, ours.steps, strict=True):
        assert theirs.name == mine.name
        api = theirs.name.partition(" ")[0]
        unused = set(theirs.allowed)
        left_answer, right_answer = theirs.answer, mine.answer
        if api == "Fetch" and isinstance(left_answer, dict) and isinstance(right_answer, dict):
            left_answer, right_answer = _by_topic(left_answer), _by_topic(right_answer)
        for path, left, right in _unequal("", left_answer, right_answer):
            field = re.sub(r"\[[^]]*\]", "", path).rpartition(".")[2]
            if field in theirs.allowed and _matches(theirs.allowed[field], left, right):
                unused.discard(field)
            elif not any(
                rule.api in ("", api)
                and re.sub(r"\[\d+\]$", "", path).endswith(rule.path)
                and _matches((rule.kafka, rule.ours), left, right)
                for rule in ALLOWED
            ):
                found.append(f"{theirs.name}: {path}: Kafka {left!r}, ours {right!r}")
                found.append(f"    asked: {mine.asked!r:.1000}")
        found += [f"{theirs.name}: {field} does not differ any more" for field in unused]
    return found


def _by_topic(answer: Any) -> Any:
    """Merge neighbours of one topic: a broker starts another row for a partition it has not."""
    merged: list[dict[str, Any]] = []
    for row in answer["responses"]:
        last = merged[-1] if merged else {}
        if (last.get("topic"), last.get("topic_id")) == (row["topic"], row["topic_id"]):
            last["partitions"] = [*last["partitions"], *row["partitions"]]
        else:
            merged.append(dict(row))
    return answer | {"responses": merged}


def _matches(pair: tuple[Any, Any], left: Any, right: Any) -> bool:
    """Whether a pair allows two values; `...` is any value."""
    return pair[0] in (left, ...) and pair[1] in (right, ...)
