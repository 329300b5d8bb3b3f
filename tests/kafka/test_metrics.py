"""Metrics, the request log and slow requests."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import logstore
from logstore import KafkaServer, Store
from logstore.kafka import broker as broker_module
from logstore.kafka.calls import Call
from logstore.kafka.metrics import (
    BOUNDS,
    MEANINGS,
    PREFIX,
    TOPICS_MAX,
    ApiCounts,
    TopicCounts,
    metrics_text,
)
from tests.kafka.peer import Peer, batch, fetch_body, produce_body
from tests.kafka.test_server import join_body, until

PRODUCE, FETCH, METADATA, JOIN_GROUP, API_VERSIONS, INIT_PRODUCER_ID = 0, 1, 3, 11, 18, 22
ADD_PARTITIONS = 24
SECRET = b"a value that is in no log"


@pytest.fixture(autouse=True)
def topics(store: Store) -> None:
    store.create_topic("t")


# ---- metrics ----


def test_a_request_is_counted_by_its_api(server: KafkaServer, peer: Peer) -> None:
    peer.ask(PRODUCE, 9, produce_body("t", batch(b"x", b"y")))
    peer.ask(FETCH, 11, fetch_body("t", 0))
    peer.ask(PRODUCE, 9, produce_body("t", batch(b"x", compression="gzip")))
    found = server.metrics()
    for name in ("request_seconds", "handler_seconds"):
        assert found[f'{name}_count{{api="Produce"}}'] == 2
        assert found[f'{name}_bucket{{api="Produce",le="+Inf"}}'] == 2
        assert 0 < found[f'{name}_sum{{api="Produce"}}'] < 60
    assert found['worker_requests_total{api="Produce"}'] >= 1, "a compressed batch"
    assert found['worker_requests_total{api="Fetch"}'] == 0
    assert found['api_request_bytes_total{api="Produce"}'] > 200
    total = sum(found[f'api_request_bytes_total{{api="{api}"}}'] for api in ("Produce", "Fetch"))
    assert total == found["request_bytes_total"]
    total = sum(found[f'api_response_bytes_total{{api="{api}"}}'] for api in ("Produce", "Fetch"))
    assert total == found["response_bytes_total"]
    assert not [name for name in found if "JoinGroup" in name], "no request, no series"


def test_bytes_and_records_by_topic(store: Store, server: KafkaServer, peer: Peer) -> None:
    sent = batch(b"x", b"y", b"z")
    peer.ask(PRODUCE, 9, produce_body("t", sent))
    peer.ask(PRODUCE, 9, produce_body("missing", sent))
    peer.ask(FETCH, 11, fetch_body("t", 0))
    topic_id = store["t"].id
    assert topic_id is not None
    body = fetch_body("", 0)
    body["topics"][0]["topic_id"] = topic_id.bytes
    peer.ask(FETCH, 16, body)
    found = server.metrics()
    assert found['bytes_in_total{topic="t"}'] == len(sent)
    assert found['records_in_total{topic="t"}'] == 3
    assert found['bytes_out_total{topic="t"}'] == 2 * len(sent)
    assert not [name for name in found if "missing" in name]


def test_names_of_topics_are_bounded() -> None:
    counts = TopicCounts()
    for number in range(TOPICS_MAX + 10):
        counts.appended([(f"t{number}", 100, 1)])
    counts.appended([("t0", 100, 1)])
    assert len(counts.by_name) == TOPICS_MAX + 1
    assert counts.by_name["other"].records_in == 10
    assert counts.by_name["t0"].records_in == 2


def test_the_parts_of_a_request_add_up() -> None:
    counts = ApiCounts()
    call = SimpleNamespace(
        began=10.0, started=10.5, handled=12.0, received=7, sent=9, may_wait=True
    )
    assert counts.add(cast(Call, call), 15.0) == 1.5
    assert (counts.queue_seconds, counts.handler_seconds, counts.wait_seconds) == (0.5, 1.5, 3.0)
    assert counts.total_seconds == 5.0
    assert counts.total[BOUNDS.index(10.0)] == 1, "above 3 s, at most 10 s"
    assert counts.handler[BOUNDS.index(3.0)] == 1
    call.handled = 0.0  # an inline handler that answered at once
    assert counts.add(cast(Call, call), 11.0) == 0.5


def test_a_fetch_that_waits_is_no_work(server: KafkaServer, peer: Peer) -> None:
    peer.ask(FETCH, 11, fetch_body("t", 0, max_wait_ms=50))
    found = server.metrics()
    assert found['wait_seconds_total{api="Fetch"}'] >= 0.04
    assert found['handler_seconds_sum{api="Fetch"}'] < found['wait_seconds_total{api="Fetch"}']
    assert found['purgatory_expired_total{kind="fetch"}'] == 1


def test_groups_and_transactions(server: KafkaServer, peer: Peer) -> None:
    assert not [name for name in server.metrics() if name.startswith("groups")]
    peer.ask(JOIN_GROUP, 3, join_body())
    assert server.metrics()['groups{state="CompletingRebalance"}'] == 1
    asked: dict[str, Any] = {"transactional_id": "tx", "transaction_timeout_ms": 10_000}
    made = peer.ask(INIT_PRODUCER_ID, 1, asked)
    assert server.metrics()["transactions_open"] == 0
    asked = {
        "v3_and_below_transactional_id": "tx",
        "v3_and_below_producer_id": made["producer_id"],
        "v3_and_below_producer_epoch": made["producer_epoch"],
        "v3_and_below_topics": [{"name": "t", "partitions": [0]}],
    }
    peer.ask(ADD_PARTITIONS, 3, asked)
    assert server.metrics()["transactions_open"] == 1


def test_software_names_are_bounded_and_quoted(
    server: KafkaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logstore.kafka.metrics.CLIENTS_MAX", 1)
    with Peer(server.address) as one, Peer(server.address) as two, Peer(server.address) as three:
        asked = {"client_software_name": "same", "client_software_version": "1.0"}
        one.ask(API_VERSIONS, 3, asked)
        two.ask(API_VERSIONS, 3, asked)
        three.ask(API_VERSIONS, 0, {})
        found = server.metrics()
        assert found['clients{software="same 1.0"}'] == 2
        assert found['clients{software="other"}'] == 1
        assert server._broker is not None
        next(iter(server._broker.connections)).software = 'a "b"\n\\'
        monkeypatch.setattr("logstore.kafka.metrics.CLIENTS_MAX", 50)
        assert server.metrics()['clients{software="a \\"b\\"\\n\\\\"}'] == 1


LINE = re.compile(r'([a-z_]+)(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? \S+')


def test_the_text_is_what_prometheus_reads(server: KafkaServer, peer: Peer) -> None:
    peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
    peer.ask(JOIN_GROUP, 3, join_body())
    text = metrics_text(server.metrics())
    typed: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# TYPE"):
                _, _, name, kind = line.split()
                assert name not in typed, "one block for each name"
                typed[name] = kind
            continue
        match = LINE.fullmatch(line)
        assert match, line
        family = re.sub("_(bucket|sum|count)$", "", match[1])
        assert family in typed or match[1] in typed
    assert typed[f"{PREFIX}request_seconds"] == "histogram"
    assert typed[f"{PREFIX}requests_total"] == "counter"
    assert typed[f"{PREFIX}connections"] == "gauge"
    assert {name.removeprefix(PREFIX) for name in typed} <= set(MEANINGS)
    assert f'{PREFIX}requests_total{{api="Produce"}} 1\n' in text


# ---- the request log ----


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The lines that are logged from now on."""
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(record.getMessage()))

    logger = logging.getLogger("logstore.kafka.request")
    handler = Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def test_the_request_log_has_no_record_data(
    lines: list[dict[str, Any]], server: KafkaServer, peer: Peer
) -> None:
    peer.ask(PRODUCE, 9, produce_body("t", batch(SECRET)))
    peer.ask(PRODUCE, 9, produce_body("missing", batch(SECRET)))
    peer.ask(FETCH, 11, fetch_body("t", 0))
    peer.ask(METADATA, 8, {"topics": []})
    until(lambda: len(lines) == 4)
    produce, missing, fetch, metadata = lines
    assert (produce["api"], produce["version"], produce["correlation_id"]) == ("Produce", 9, 1)
    assert produce["client_id"] == "peer"
    assert produce["peer"].startswith("127.0.0.1:")
    assert produce["errors"] == []
    assert produce["partitions"] == [{"topic": "t", "partition": 0, "offset": 0}]
    assert missing["errors"] == ["UNKNOWN_TOPIC_OR_PARTITION"]
    size = len(batch(SECRET))
    assert fetch["partitions"] == [{"topic": "t", "partition": 0, "offset": 0, "bytes": size}]
    assert fetch["response_bytes"] > size
    assert fetch["request_bytes"] > 0
    assert "partitions" not in metadata
    for line in lines:
        assert line["total_ms"] >= line["handler_ms"] >= 0
    assert SECRET.decode() not in json.dumps(lines)


def test_the_request_log_can_be_turned_on_and_off_while_the_server_runs(
    server: KafkaServer, peer: Peer, lines: list[dict[str, Any]], store: Store
) -> None:
    broker = server._broker
    assert broker is not None
    until(lambda: broker.request_log is not None)
    logging.getLogger("logstore.kafka.request").setLevel(logging.INFO)
    until(lambda: broker.request_log is None)
    peer.ask(METADATA, 8, {"topics": []})
    assert lines == []


def test_slow_requests_get_a_warning_at_most_once_a_second(
    server: KafkaServer,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(broker_module, "SLOW_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, "logstore.kafka"):
        for _ in range(5):
            peer.ask(METADATA, 8, {"topics": []})
        until(lambda: server.metrics()["slow_requests_total"] == 5)
    warnings = [each.getMessage() for each in caplog.records if "own work" in each.getMessage()]
    assert 1 <= len(warnings) < 5
    assert warnings[0].startswith("Metadata of ")


def test_fsyncs_are_timed(tmp_path: Path) -> None:
    with (
        logstore.open(tmp_path / "s", durability="fsync") as store,
        KafkaServer(store) as server,
        Peer(server.address) as peer,
    ):
        store.create_topic("t")
        peer.ask(PRODUCE, 9, produce_body("t", batch(b"x")))
        found = server.metrics()
        assert found["sync_seconds_total"] > 0
        assert found['wait_seconds_total{api="Produce"}'] > 0
