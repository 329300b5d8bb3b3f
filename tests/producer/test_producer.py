"""Producer: batching, back-pressure, futures, idempotence, and that nothing is lost silently."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import logstore
from logstore import (
    ClosedError,
    ConfigError,
    DiskFullError,
    FencedError,
    InvalidNameError,
    KeyPartitioner,
    Position,
    Producer,
    RandomPartitioner,
    RecordTooLargeError,
    RoundRobinPartitioner,
    SerializationError,
    Store,
    UnknownTopicError,
)
from logstore.coordinators.internal_topics import CONSUMER_OFFSETS
from logstore.format.batch import BatchHeader, split
from logstore.partition.appender import Appender
from logstore.producer.delivery import Delivery
from logstore.root.producer_ids import BLOCK, FIRST, ProducerIds
from logstore.testing.io import inject_io
from logstore.testing.io_calls import Fault
from tests.kit import topic_values, wait_until_freed


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store") as opened:
        opened.create_topic("orders", partitions=4)
        opened.create_topic("one")
        yield opened


def headers_of(store: Store, topic: str, number: int = 0) -> list[BatchHeader]:
    raw = b"".join(store[topic][number].read_batches(0, 1 << 30))
    return [header for header, _ in split(raw)]


# ---- where records go -----------------------------------------------------------------------


def test_append_says_where_the_record_is_and_it_is_durable(store: Store) -> None:
    with Producer(store) as producer:
        first = producer.append("orders", b"12 EUR", key=b"alice", headers=[("h", b"x")])
        again = producer.append("orders", b"13 EUR", key=b"alice", timestamp=1_700_000_000_000)
    assert isinstance(first, Position)
    assert (again.partition, again.offset) == (first.partition, first.offset + 1)
    log = store["orders"][first.partition]
    assert log.durable_offset >= 2
    assert (log[0].value, log[0].key, log[0].headers) == (b"12 EUR", b"alice", (("h", b"x"),))
    assert log[1].timestamp == 1_700_000_000_000


@settings(max_examples=20)
@given(keys=st.lists(st.binary(max_size=20) | st.none(), max_size=60))
def test_a_key_goes_where_the_topic_and_kafka_put_it(
    tmp_path_factory: pytest.TempPathFactory, keys: list[bytes | None]
) -> None:
    with logstore.open(tmp_path_factory.mktemp("s")) as store:
        topic = store.create_topic("t", partitions=3)
        with Producer(store, durability="os") as producer:
            sent = [producer.send("t", b"%d" % n, key=key) for n, key in enumerate(keys)]
        for n, (key, delivery) in enumerate(zip(keys, sent, strict=True)):
            position = delivery.result()
            if key is not None:
                assert position.partition == topic.partitioner(key, b"", 3)
            record = topic[position.partition][position.offset]
            assert (record.key, record.value) == (key, b"%d" % n)


def test_records_without_a_key_stay_together_and_reach_all_partitions(store: Store) -> None:
    with Producer(store, partitioner=KeyPartitioner(seed=1), batch_bytes=16_000) as producer:
        chosen = [producer.send("orders", b"x" * 1000).partition for _ in range(800)]
    assert set(chosen) == {0, 1, 2, 3}
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert 40 < changes < 800 / 16 + 2


def test_partitioners_by_name_instance_and_callable(store: Store) -> None:
    def chosen(partitioner: Any, n: int = 12) -> list[int]:
        with Producer(store, partitioner=partitioner) as producer:
            return [producer.send("orders", b"v", key=b"same").partition for _ in range(n)]

    assert chosen("round_robin", 6) == [0, 1, 2, 3, 0, 1]
    assert chosen(RoundRobinPartitioner(), 3) == [0, 1, 2]
    assert set(chosen("random", 100)) == {0, 1, 2, 3}
    assert chosen(RandomPartitioner(seed=5)) == chosen(RandomPartitioner(seed=5))
    assert chosen(lambda key, value, count: count - 1) == [3] * 12
    with pytest.raises(ConfigError, match="'round_robin'"):
        Producer(store, partitioner="sticky-ish")
    wrong = Producer(store, partitioner=lambda *_: 9)
    with wrong, pytest.raises(ValueError, match="from 0 to 3"):
        wrong.send("orders", b"v")


def test_partitions_that_are_added_and_partitioners_that_change_are_noticed(store: Store) -> None:
    with Producer(store) as producer:
        producer.append("one", b"a")
        store["one"].add_partitions(2)
        assert producer.append("one", b"b", partition=2) == Position("one", 2, 0)
        store["one"].partitioner = lambda key, value, count: 1
        assert producer.append("one", b"c").partition == 1
        with pytest.raises(IndexError, match="no partition 3: it has 0 to 2"):
            producer.send("one", b"d", partition=3)
        with pytest.raises(TypeError):
            producer.send("one", b"d", partition="0")


# ---- futures --------------------------------------------------------------------------------


def test_a_delivery_answers_without_a_flush(store: Store) -> None:
    with Producer(store, linger=600.0) as producer:
        deliveries = [producer.send("one", b"%d" % n) for n in range(50)]
        # append() does not wait until other records fill the batch.
        assert [d.result(60).offset for d in deliveries] == list(range(50))
        assert deliveries[7].done() and deliveries[7].exception() is None
        assert not deliveries[7].cancel() and not deliveries[7].cancelled()
        assert repr(deliveries[7]) == "<Delivery to one-0 offset 7>"


def test_what_lingers_is_written_by_itself_and_calls_back_in_order(store: Store) -> None:
    told: list[int] = []
    done = threading.Event()

    def tell(delivery: Any) -> None:
        told.append(delivery.result(0).offset)
        if len(told) == 20:
            done.set()

    with Producer(store, linger=0.005) as producer:
        for n in range(20):
            producer.send("one", b"%d" % n, callback=tell)
        assert done.wait(60)
        assert store["one"][0].durable_offset == 20
    assert told == list(range(20))


def test_a_callback_that_fails_is_logged_and_harms_nobody(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(delivery: object) -> None:
        raise RuntimeError("not today")

    with Producer(store) as producer:
        first = producer.send("one", b"a", callback=fail)
        second = producer.send("one", b"b")
        producer.flush()
    assert (first.result().offset, second.result().offset) == (0, 1)
    assert "not today" in caplog.text
    late: list[int] = []
    first.add_done_callback(lambda delivery: late.append(delivery.result().offset))
    assert late == [0]


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("dedupe_id", [None, "b"])
def test_a_callback_keeps_no_other_thread_from_sending(
    store: Store, durability: str, dedupe_id: str | None
) -> None:
    # Every send writes what was sent before, and so calls back.
    with Producer(store, linger=600.0, buffer_bytes=1, durability=durability) as producer:
        sent: list[Position] = []

        def other() -> None:
            sent.append(producer.append("orders", b"2", partition=0, dedupe_id=dedupe_id))

        def callback(_: Delivery) -> None:
            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            thread.join(60)

        producer.send("orders", b"1", partition=0, callback=callback)
        producer.append("orders", b"3", partition=0, dedupe_id=dedupe_id and "a")
        assert len(sent) == 1


def test_callbacks_of_many_threads_send_to_each_others_topics(store: Store) -> None:
    store.create_topic("other")
    called: list[Position] = []
    with Producer(store, linger=0.001, durability="os") as producer:

        def work(mine: str, others: str) -> None:
            def callback(delivery: Delivery) -> None:
                called.append(delivery.result(0))
                producer.send(others, b"x" * 4000, partition=0)

            for _ in range(500):
                producer.send(mine, b"x" * 4000, partition=0, callback=callback)

        topics = ("orders", "other")
        threads = [threading.Thread(target=work, args=pair, daemon=True)
                   for pair in (topics, topics[::-1])]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        producer.flush()
    for topic in topics:
        offsets = [each.offset for each in called if each.topic == topic]
        assert len(offsets) == 500


class Chain:
    """Every record that is delivered sends another, so many times."""

    def __init__(self, producer: Producer, length: int) -> None:
        self.producer = producer
        self.left = length
        self.accepted: list[Delivery] = []
        self.refused: list[Exception] = []

    def send(self, _: object = None) -> None:
        if self.left > 0:
            self.left -= 1
            try:
                sent = self.producer.send("orders", b"x", partition=0, callback=self.send)
            except ClosedError as error:
                self.refused.append(error)
            else:
                self.accepted.append(sent)


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("end", [Producer.flush, Producer.close])
def test_what_callbacks_send_is_written_before_the_end(
    store: Store, durability: str, end: Any
) -> None:
    producer = Producer(store, linger=600.0, durability=durability)
    chain = Chain(producer, 5)
    chain.send()
    end(producer)
    assert producer.pending == 0
    assert [each.result(0).offset for each in chain.accepted] == [0, 1, 2, 3, 4]
    producer.close()
    assert store["orders"][0].end_offset == 5


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_callbacks_that_never_stop_do_not_keep_a_producer_open(
    store: Store, durability: str
) -> None:
    producer = Producer(store, linger=600.0, durability=durability, max_block=0.05)
    chain = Chain(producer, 1 << 30)
    chain.send()
    producer.close()
    assert len(chain.refused) == 1
    assert all(each.exception(0) is None for each in chain.accepted)
    assert store["orders"][0].end_offset == len(chain.accepted)


@pytest.mark.parametrize("durability", ["os", "fsync"])
def test_callbacks_of_a_store_that_closes_lose_nothing_silently(
    tmp_path: Path, durability: str
) -> None:
    with logstore.open(tmp_path / "closing", durability=durability) as store:
        store.create_topic("orders")
        chain = Chain(Producer(store, linger=600.0), 5)
        chain.send()
    assert len(chain.accepted) + len(chain.refused) >= 2
    assert all(each.exception(0) is None for each in chain.accepted)
    with logstore.open(tmp_path / "closing") as store:
        assert store["orders"][0].end_offset == len(chain.accepted)


def test_what_close_cannot_write_it_raises(store: Store, monkeypatch: Any) -> None:
    producer = Producer(store, linger=600.0, max_block=0.05)
    real = Producer._close_now

    def late(self: Producer) -> None:  # as another thread, after the flush
        self._put(self._router.lane(self._routes["orders"], 0), b"2", None, (), None)
        monkeypatch.setattr(Appender, "write_produced", full)
        real(self)

    def full(*_: Any, **__: Any) -> None:
        raise DiskFullError(28, "ENOSPC")

    monkeypatch.setattr(Producer, "_close_now", late)
    producer.append("orders", b"1", partition=0)
    with pytest.raises(DiskFullError):
        producer.close()
    assert producer.closed


@pytest.mark.parametrize("durability", ["os", "fsync"])
@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_no_callback_ends_the_thread(
    store: Store, durability: str, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Delivery) -> None:
        raise kind

    with Producer(store, durability=durability) as producer:
        called = threading.Event()
        producer.send("orders", b"1", partition=0, callback=fail)
        producer.send("orders", b"2", partition=0, callback=lambda _: called.set())
        assert called.wait(60)
        # By the thread, again.
        assert producer.send("orders", b"3", partition=0).result(60).offset == 2
    assert kind.__name__ in caplog.text


def test_an_interrupt_in_a_callback_comes_out_and_the_others_are_called(store: Store) -> None:
    def interrupt(_: Delivery) -> None:
        raise KeyboardInterrupt

    with Producer(store, linger=600.0) as producer:
        called: list[Delivery] = []
        producer.send("orders", b"1", partition=0, callback=interrupt)
        producer.send("orders", b"2", partition=0, callback=called.append)
        with pytest.raises(KeyboardInterrupt):
            producer.flush()
        assert len(called) == 1
        producer.flush()


def test_a_time_out_leaves_the_record_on_its_way(store: Store) -> None:
    store_lock = store["one"][0].parts.view.lock
    with Producer(store, linger=600.0) as producer:
        delivery = producer.send("one", b"a")
        with store_lock, pytest.raises(TimeoutError, match="still pending"):
            delivery.result(0.01)
        assert delivery.result(60).offset == 0


# ---- batches and the buffer -----------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_the_producers_numbered_without_a_gap(store: Store, compression: str) -> None:
    with Producer(store, batch_bytes=2_000, compression=compression) as producer:
        for n in range(500):
            producer.send("one", b"%04d" % n * 20)
        producer.flush()
        producer.append("one", b"last")
        owner = (producer.producer_id, producer.producer_epoch)
    found = headers_of(store, "one")
    assert len(found) > 10
    assert {(each.producer_id, each.producer_epoch) for each in found} == {owner}
    expected = 0
    for header in found:
        assert header.base_sequence == expected == header.base_offset
        expected += header.record_count
    assert expected == 501
    assert topic_values(store, "one")[-1] == b"last"
    store.check()


def test_a_repeated_batch_is_answered_with_its_first_offsets(store: Store) -> None:
    with Producer(store) as producer:
        producer.append("one", b"a")
        (raw,) = store["one"][0].read_batches(0)
        again = store["one"][0].append_batch(raw)
        assert again.duplicate and again.offsets == range(0, 1)
        assert producer.append("one", b"b").offset == 1
        # A producer whose partition was closed and opened again continues where it was.
        store["one"][0].close()
        assert producer.append("one", b"c").offset == 2
    assert [h.base_sequence for h in headers_of(store, "one")] == [0, 1, 2]


def test_the_buffer_over_many_partitions_is_bounded(store: Store) -> None:
    store.create_topic("wide", partitions=40)
    with Producer(store, linger=600.0, buffer_bytes=200_000, durability="os") as producer:
        most = 0
        for n in range(3_000):
            producer.send("wide", b"x" * 1_000, partition=n % 40)
            most = max(most, producer.held_bytes)
    assert most < 400_000
    assert len(topic_values(store, "wide")) == 3_000


def test_a_full_disk_blocks_then_tells_and_loses_nothing(store: Store, monkeypatch: Any) -> None:
    log = store["one"][0]
    log.append(b"first")
    real = Appender.write_produced
    full = True

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if full:
            raise logstore.DiskFullError(28, "no space")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Appender, "write_produced", write)
    with Producer(store, max_block=0.05, linger=600.0) as producer:
        delivery = producer.send("one", b"kept")
        with pytest.raises(logstore.DiskFullError) as caught:
            producer.flush()
        assert "1 records are held" in caught.value.__notes__[0]
        with pytest.raises(logstore.DiskFullError):
            producer.close()
        assert not producer.closed and not delivery.done()
        full = False
        assert producer.append("one", b"next").offset == 2
        assert delivery.result(60).offset == 1
    assert topic_values(store, "one") == [b"first", b"kept", b"next"]


def test_records_that_fail_for_good_are_told_to_everyone(store: Store, monkeypatch: Any) -> None:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise logstore.IndeterminateAppendError("EIO", offsets=range(0, 2))

    monkeypatch.setattr(Appender, "write_produced", write)
    producer = Producer(store)
    deliveries = [producer.send("one", b"a"), producer.send("one", b"b")]
    with pytest.raises(logstore.IndeterminateAppendError):
        producer.flush()
    for delivery in deliveries:
        with pytest.raises(logstore.IndeterminateAppendError):
            delivery.result(0)
        assert "failed" in repr(delivery)
    producer.flush()  # the error is raised once
    producer.send("one", b"c")
    with pytest.raises(logstore.IndeterminateAppendError):
        producer.close()
    assert producer.closed


# ---- what is refused ------------------------------------------------------------------------


def test_bad_input_is_told_and_nothing_is_sent(store: Store) -> None:
    with Producer(store) as producer:
        producer.append("one", b"warm")
        with pytest.raises(UnknownTopicError, match="did you mean 'orders'"):
            producer.send("order", b"v")
        with pytest.raises(InvalidNameError, match="coordinators"):
            producer.send("__transaction_state", b"v")
        with pytest.raises(TypeError, match="encode"):
            producer.send("one", "text")
        with pytest.raises(TypeError):
            producer.send("one", b"v", key="text")
        with pytest.raises(logstore.InvalidRecordError, match="needs a key"):
            producer.send("one", None)
        with pytest.raises(RecordTooLargeError):
            producer.send("one", b"x" * (2 << 20))
        with pytest.raises(TypeError):
            producer.send("one", b"v", nonsense=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            producer.send("one")  # type: ignore[call-arg]
        assert producer.send("one", None, key=b"k").result(60).offset == 1
        assert producer.send("one", bytearray(b"mutable")).result(60).offset == 2
    assert topic_values(store, "one") == [b"warm", None, b"mutable"]
    for wrong in ({"linger": 0}, {"batch_bytes": -1}, {"buffer_bytes": 0}, {"max_block": 0},
                  {"compression": "brotli"}, {"durability": "maybe"}):  # fmt: skip
        with pytest.raises(ConfigError):
            Producer(store, **wrong).send("one", b"v")  # type: ignore[arg-type]


def test_a_closed_producer_says_so(store: Store) -> None:
    producer = Producer(store)
    producer.send("one", b"a")
    producer.close()
    producer.close()
    for call in (producer.send, producer.append):
        with pytest.raises(ClosedError):
            call("one", b"b")
    with pytest.raises(ClosedError):
        producer.flush()
    assert topic_values(store, "one") == [b"a"]


def test_a_topic_that_was_deleted_is_unknown(store: Store) -> None:
    producer = Producer(store, linger=600.0)
    producer.append("one", b"a")
    lost = producer.send("one", b"b")
    store.delete_topic("one")
    with pytest.raises(ClosedError):
        producer.flush()
    assert isinstance(lost.exception(0), ClosedError)
    with pytest.raises(UnknownTopicError):
        producer.append("one", b"c")
    store.create_topic("one")
    assert producer.append("one", b"d").offset == 0
    producer.close()


# ---- serializers and interceptors -----------------------------------------------------------


def test_serializers_and_interceptors_stand_before_the_log(store: Store) -> None:
    told: list[object] = []

    class Traces:
        def on_send(self, outgoing: Any) -> Any:
            return outgoing._replace(headers=[*outgoing.headers, ("trace", b"1")])

        def on_acknowledgement(self, position: object, error: object) -> None:
            told.append((position, error))

    with Producer(
        store, key_serializer="string", value_serializer="json", interceptors=[Traces()]
    ) as producer:
        position = producer.append("one", {"a": [1]}, key="k")
        with pytest.raises(SerializationError, match="value of a record of one"):
            producer.send("one", object())
        with pytest.raises(SerializationError, match="key"):
            producer.send("one", 1, key=7)
        producer.send("one", None, key="k")
    record = store["one"][0][0]
    assert (record.key, record.value, record.headers) == (b"k", b'{"a":[1]}', (("trace", b"1"),))
    assert topic_values(store, "one") == [b'{"a":[1]}', None]
    assert told == [(position, None), (Position("one", 0, 1), None)]


# ---- ends -----------------------------------------------------------------------------------


def test_closing_the_store_writes_what_was_sent(tmp_path: Path) -> None:
    store = logstore.open(tmp_path)
    store.create_topic("t")
    producer = Producer(store, linger=600.0)
    deliveries = [producer.send("t", b"%d" % n) for n in range(10)]
    store.close()
    assert [d.result(0).offset for d in deliveries] == list(range(10))
    with logstore.open(tmp_path) as again:
        assert again.recovery.clean
        assert len(topic_values(again, "t")) == 10


@pytest.mark.parametrize("end", ["", "import sys; sys.exit(3)", "del producer", "raise SystemExit"])
def test_the_end_of_the_interpreter_writes_what_was_sent(tmp_path: Path, end: str) -> None:
    code = f"""
        import logstore
        store = logstore.open({str(tmp_path)!r})
        store.create_topic("t")
        producer = logstore.Producer(store, linger=600.0)
        for n in range(100):
            producer.send("t", b"%d" % n)
        {end}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=120, check=False)
    with logstore.open(tmp_path) as store:
        assert topic_values(store, "t") == [b"%d" % n for n in range(100)]


def test_threads_share_a_producer(store: Store) -> None:
    def work(me: int) -> None:
        for n in range(2_000):
            delivery = producer.send("orders", b"%d %d" % (me, n), key=b"%d" % me)
            if n % 500 == 499:
                delivery.result(60)

    with Producer(store, batch_bytes=4_000, durability="os") as producer:
        threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for me in range(4):
        mine = [v for v in topic_values(store, "orders") if v and v.startswith(b"%d " % me)]
        assert mine == [b"%d %d" % (me, n) for n in range(2_000)]
    store.check()


# ---- producer ids ---------------------------------------------------------------------------


def test_ids_are_never_given_out_twice(tmp_path: Path) -> None:
    clock = logstore.ManualClock()
    seen: set[int] = set()
    for _ in range(3):
        with logstore.open(tmp_path, clock=clock) as store:
            taken = {store.producer_ids.take() for _ in range(BLOCK + 5)}
            assert len(taken) == BLOCK + 5 and not taken & seen
            assert min(taken) >= FIRST
            seen |= taken
    assert FIRST + clock.now_ms <= min(seen)


@pytest.mark.parametrize("damage", [b"", b"{}", b"nonsense", b'{"next": "x"}'])
def test_a_lost_file_of_ids_brings_none_back(tmp_path: Path, damage: bytes) -> None:
    clock = logstore.ManualClock()
    with logstore.open(tmp_path, clock=clock) as store:
        before = store.producer_ids.take()
    path = tmp_path / ProducerIds.NAME
    path.write_bytes(damage) if damage else path.unlink()
    clock.advance(60_000)
    with logstore.open(tmp_path, clock=clock) as store:
        assert store.producer_ids.take() > before
        assert store.producer_ids.take(above=before + 10**9) > before + 10**9


def test_a_lane_that_is_stuck_gives_up_although_another_has_nothing_to_write(store: Store) -> None:
    """An empty lane does not show that the disk works."""
    for name in ("empty", "full"):
        store.create_topic(name)
    producer = Producer(store, linger=0.001, delivery_timeout=0.3)
    producer.send("empty", b"x").result(30)
    with inject_io(Fault.fail(errno.ENOSPC, "pwrite", "*/full-0/*.log", forever=True)):
        delivery = producer.send("full", b"x")
        with pytest.raises(DiskFullError):
            delivery.result(30)
    with pytest.raises(DiskFullError):
        producer.close()


@pytest.mark.parametrize("offsets", [None, 7, {("a", -1): 1}, {("a", 0): "x"}])
def test_offsets_that_make_no_sense_leave_the_transaction_as_it_was(
    store: Store, offsets: Any
) -> None:
    store.create_topic("a")
    with Producer(store, "copier") as producer:
        with producer.transaction() as tx:
            tx.send("a", b"x")
            with pytest.raises((TypeError, ValueError)):
                tx.commit_offsets(offsets, group_id="workers")
        assert [r.value for r in store["a"][0].scan(isolation="read_committed")] == [b"x"]
    assert CONSUMER_OFFSETS not in store


@pytest.mark.parametrize("how", ["append", "result", "exception", "flush"])
def test_a_producer_with_a_record_that_failed_is_freed(store: Store, how: str) -> None:
    """The frames of the error hold deliveries, which the garbage collector does not see."""

    def fail() -> weakref.ref[Producer]:
        producer = Producer(store)
        producer.append("one", b"v")
        with inject_io(Fault.fail(errno.EIO, "pwrite", "*one-0/*.log", forever=True)):
            sent = [] if how == "append" else [producer.send("one", b"v") for _ in range(2)]
            with pytest.raises(OSError, match="Input/output error"):
                if how == "append":
                    producer.append("one", b"w")
                elif how == "result":
                    sent[0].result(60)
                elif how == "exception":
                    raise sent[0].exception(60) or AssertionError
                else:
                    producer.flush()
        with contextlib.suppress(OSError):
            producer.close()
        return weakref.ref(producer)

    wait_until_freed(fail())


def test_each_delivery_of_a_pack_raises_an_error_of_its_own(store: Store) -> None:
    with Producer(store) as producer:
        with inject_io(Fault.fail(errno.EIO, "pwrite", "*one-0/*.log", forever=True)):
            sent = [producer.send("one", b"v") for _ in range(2)]
            with pytest.raises(OSError, match="Input/output error"):
                producer.flush()
        errors = [each.exception(60) for each in sent]
    assert isinstance(errors[0], OSError) and isinstance(errors[1], OSError)
    assert errors[0] is not errors[1] and errors[0].__traceback__ is None
    assert errors[0].errno == errno.EIO
    assert errors[0].filename == errors[1].filename and str(errors[0].filename).endswith(".log")


def test_a_partition_that_could_not_be_made_ready_leaves_no_file_open(tmp_path: Path) -> None:
    with logstore.open(tmp_path) as store:
        store.create_topic("t")[0].append(b"v")
    store = logstore.open(tmp_path)
    log = store["t"][0]
    errors = []
    for _ in range(3):
        with inject_io(Fault.fail(errno.EIO, "pwrite", "*.durable")):
            with pytest.raises(OSError, match="Input/output error") as caught:
                log.append(b"w")
            errors.append(caught.value)
    store.close()
    open_files = [
        os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    ]
    assert not [each for each in open_files if each.startswith(str(tmp_path))]


def test_a_producer_that_was_fenced_is_freed(store: Store) -> None:
    def fence() -> weakref.ref[Producer]:
        old = Producer(store, "x")
        tx = old.transaction()
        tx.append("one", b"v")
        Producer(store, "x").close()
        sent = tx.send("one", b"w")
        with pytest.raises(FencedError) as caught:
            sent.result(60)
        assert (caught.value.epoch, caught.value.current) == (0, 2), str(caught.value)
        with contextlib.suppress(FencedError):
            old.close()
        return weakref.ref(old)

    wait_until_freed(fence())


def test_failures_that_no_flush_raises_take_a_bounded_amount_of_memory(store: Store) -> None:
    failed: list[Delivery] = []
    producer = Producer(store)
    for _ in range(300):
        producer.note_failure(OSError(errno.EIO, "Input/output error"))
    assert len(producer._failures._kept) == 100
    with pytest.raises(
        BaseExceptionGroup, match=r"^300 packs of records failed; 200 .* not"
    ) as all_:
        producer.flush()
    assert len(all_.value.exceptions) == 100
    producer.flush()  # they are raised once
    producer.send("one", b"v", callback=failed.append)
    producer.close()
    assert failed[0].exception(0) is None
