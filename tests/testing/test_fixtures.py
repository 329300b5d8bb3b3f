"""The pytest fixtures of the test kit, and the example that shows how to use them."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from logstore.testing.fixtures import (  # noqa: F401
    KafkaServerUnderTest,
    StoreUnderTest,
    kafka_options,
    kafka_server,
    logstore_clock,
    logstore_options,
    logstore_store,
)
from tests.kafka.peer import Peer, batch, produce_body

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "testing_your_code"


def test_a_crash_keeps_what_was_appended_and_loses_what_was_buffered(
    logstore_store: StoreUnderTest,  # noqa: F811
) -> None:
    log = logstore_store.store.create_topic("orders")[0]
    log.append(b"a")
    out = log.writer(linger=None)
    out.append(b"buffered")
    log = logstore_store.crash()["orders"][0]
    assert [record.value for record in log] == [b"a"]
    assert not log.recovery.clean
    assert logstore_store.path.name == "life-1"
    log = logstore_store.reopen()["orders"][0]
    assert log.recovery.clean


def test_the_clock_of_the_store_is_the_fixture(
    logstore_store: StoreUnderTest,  # noqa: F811
    logstore_clock: object,  # noqa: F811
) -> None:
    assert logstore_store.clock is logstore_clock
    log = logstore_store.store.create_topic("orders")[0]
    log.append(b"a")
    assert log[0].timestamp == logstore_store.clock.time_ms()


def test_the_example_of_testing_your_own_code_passes(tmp_path: Path) -> None:
    """As a user runs it: from its own directory, with pytest's own settings."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null",
         "--rootdir", str(EXAMPLE), "--basetemp", str(tmp_path / "pytest"), str(EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 passed" in ended.stdout


def test_nobody_who_does_not_ask_for_the_fixtures_needs_pytest() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import sys, logstore.testing; print('pytest' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.strip() == "False"


def test_a_kafka_server_for_the_tests_of_a_client(
    kafka_server: KafkaServerUnderTest,  # noqa: F811
) -> None:
    with Peer(kafka_server.server.address) as peer:
        kafka_server.store.create_topic("out")
        answer = peer.ask(0, 9, produce_body("out", batch(b"a")))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 0
        assert kafka_server.store["out"][0].end_offset == 1
        new = {"name": "wide", "num_partitions": 2, "replication_factor": 3}
        answer = peer.ask(19, 5, {"topics": [new], "timeout_ms": 1000})
        assert answer["topics"][0]["error_code"] == 0
        address, path = kafka_server.bootstrap_servers, kafka_server.path
        store = kafka_server.crash()
        assert peer.is_closed()
    assert store is kafka_server.store
    assert not store.recovery.clean
    assert kafka_server.bootstrap_servers == address
    assert kafka_server.path != path
    assert not path.exists()
    assert [record.value for record in store["out"][0]] == [b"a"]
    with Peer(kafka_server.server.address) as peer:
        kafka_server.faults.fail("Produce", "NOT_ENOUGH_REPLICAS")
        answer = peer.ask(0, 9, produce_body("out", batch(b"b")))
        assert answer["responses"][0]["partition_responses"][0]["error_code"] == 19
    assert address in repr(kafka_server)


def test_a_real_client_goes_on_after_a_crash(
    kafka_server: KafkaServerUnderTest,  # noqa: F811
) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    settings = {
        "bootstrap.servers": kafka_server.bootstrap_servers,
        "enable.idempotence": True,
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 100,
        "logger": logging.getLogger("client"),
    }
    producer = kafka.Producer(settings)
    failed: list[object] = []
    for number in range(60):
        if number in (20, 40):
            kafka_server.crash()
        producer.produce(
            "orders", b"%d" % number, on_delivery=lambda error, _: failed.append(error)
        )
        producer.poll(0)
        if number % 10 == 0:
            assert producer.flush(20) == 0
    assert producer.flush(20) == 0
    assert failed == [None] * 60
    log = kafka_server.store["orders"][0]
    assert [record.value for record in log] == [b"%d" % number for number in range(60)]


def test_the_settings_of_the_kafka_server(tmp_path: Path) -> None:
    with KafkaServerUnderTest(tmp_path / "k", num_partitions=3) as under_test:
        with Peer(under_test.server.address) as peer:
            peer.ask(3, 8, {"topics": [{"name": "auto"}], "allow_auto_topic_creation": True})
        assert len(under_test.store["auto"].partition_numbers) == 3
