"""Every option of the source: what it means, and the error if it cannot be used."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import time
import types
import warnings
from collections.abc import Callable

import pytest

pytest.importorskip("pyspark", reason='no pyspark: pip install "logstore-engine[spark]"')

import pyspark_logstore
from pyspark_logstore.commits import SinkError
from pyspark_logstore.options import SOURCE_OPTIONS, Bound, OptionError, SourceOptions
from pyspark_logstore.pattern import java_pattern
from pyspark_logstore.sink_options import SinkOptions


def parse(*, streaming: bool = False, **options: str) -> SourceOptions:
    return SourceOptions.parse({"path": "/data", **options}, streaming=streaming)


def test_the_defaults_are_those_of_sparks_kafka_source() -> None:
    batch, stream = parse(), parse(streaming=True)
    assert (batch.start.kind, batch.end.kind) == ("earliest", "latest")
    assert stream.start.kind == "latest"
    assert batch.fail_on_data_loss and not batch.headers and not batch.committed
    assert batch.min_partitions is None and batch.partition_records_max is None
    assert (stream.trigger_offsets_max, stream.trigger_offsets_min) == (None, None)
    assert stream.trigger_delay_ms == 15 * 60_000
    assert not batch.latest_without_match


def test_names_are_known_in_any_case_of_letters() -> None:
    assert SourceOptions.parse({"PATH": "/x", "STARTINGOFFSETS": "Earliest"}).path == "/x"


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"startingOffsets": "earliest"}, Bound("startingOffsets", "earliest")),
        ({"startingOffsets": "last:100"}, Bound("startingOffsets", "last", 100)),
        (
            {"startingOffsets": '{"t": {"0": 5, "11": -2}}'},
            Bound("startingOffsets", "offsets", by_partition={"t": {0: 5, 11: -2}}),
        ),
        (
            {"startingOffsetsByTimestamp": '{"t":{"0":7}}', "startingOffsets": "earliest"},
            Bound("startingOffsetsByTimestamp", "times", by_partition={"t": {0: 7}}),
        ),
        (
            {"startingTimestamp": "9", "startingOffsetsByTimestamp": '{"t":{"0":7}}'},
            Bound("startingTimestamp", "time", 9),
        ),
        (
            {"startingTimestamp": "1970-01-02T00:00:00.001+01:00"},
            Bound("startingTimestamp", "time", 86_400_001 - 3_600_000),
        ),
    ],
)
def test_a_time_goes_before_times_and_these_before_offsets(
    options: dict[str, str], bound: Bound
) -> None:
    assert parse(**options).start == bound


def test_ending_bounds_have_the_same_order() -> None:
    options = {"endingTimestamp": "9", "endingOffsets": '{"t":{"0":-1}}'}
    assert parse(**options).end == Bound("endingTimestamp", "time", 9)
    del options["endingTimestamp"]
    assert parse(**options).end.by_partition == {"t": {0: -1}}


def test_a_relative_time_counts_back_from_now() -> None:
    before = time.time() * 1000
    found = parse(startingTimestamp="-10m").start.number
    assert before - 600_000 - 1 <= found <= time.time() * 1000 - 600_000


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///a/b%20c", "/a/b c"),
        ("file:/a/b", "/a/b"),
        ("/plain", "/plain"),
        ("rel/x", "rel/x"),
    ],
)
def test_a_path_may_be_a_file_uri(text: str, path: str) -> None:
    assert parse(path=text).path == path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": " "}, r"path: is missing: \.load"),
        ({"path": "s3://bucket/x"}, r"not a directory of a mounted file system: mount it"),
        ({"paths": "x"}, r"paths: is not known: did you mean path"),
        ({"minPartition": "3"}, r"did you mean minPartitions"),
        ({"kafka.bootstrap.servers": "h:9"}, r'give "path", or use format\("kafka"\)'),
        ({"kafka.auto.offset.reset": "latest"}, r"cannot be set: use startingOffsets"),
        ({"kafka.key.deserializer": "x"}, r"cannot be set: keys come as bytes"),
        ({"kafka.value.deserializer": "x"}, r"cannot be set: values come as bytes"),
        ({"kafka.enable.auto.commit": "true"}, r"cannot be set: the checkpoint"),
        ({"kafka.interceptor.classes": "x"}, r"cannot be set: interceptors"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, r"assign: cannot be used with subscribe"),
        ({"subscribe": " , "}, r"names no topic"),
        ({"subscribePattern": "a\\p{L}"}, r"cannot be read as Java would read it: \\p"),
        ({"assign": '{"a":[0]'}, r"assign: is not JSON: .* at character 8; write it like"),
        ({"assign": '{"a":0}'}, r"'a' needs a list of partitions"),
        ({"assign": '{"a":[true]}'}, r"'a' needs a list of partitions"),
        ({"assign": "{}"}, r"names no partition"),
        ({"startingOffsets": "latest"}, r"a batch cannot start at latest"),
        ({"startingOffsets": "newest"}, r"must be earliest, latest, last:100, group:NAME or"),
        ({"startingOffsets": "tag:v1"}, r"'tag:v1' is not available yet"),
        ({"startingOffsets": "group:"}, r"must be earliest, latest, last:100, group:NAME or"),
        ({"where": "key = 1"}, r"where: .* at character 5, near .*; a condition looks like key =="),
        ({"maxRecords": "0"}, r"must be a positive whole number, not '0'"),
        ({"startingOffsets": '{"a":{"0":1}'}, r"startingOffsets: is not JSON: .* at character 12"),
        ({"startingOffsets": '{"a":[1]}'}, r"'a' needs an object by partition"),
        ({"startingOffsets": '{"a":{"x":1}}'}, r"'x' of 'a' is not a partition"),
        ({"startingOffsets": '{"a":{"0":1.5}}'}, r"a-0 has 1.5, not a number"),
        ({"startingOffsets": '{"a":{"0":-1}}'}, r"a batch cannot start a-0 at -1"),
        ({"startingOffsets": '{"a":{"0":-3}}'}, r"a-0 has offset -3: an offset is >= 0, or -2"),
        ({"endingOffsets": "earliest"}, r"earliest would leave nothing"),
        ({"endingOffsets": '{"a":{"0":-2}}'}, r"a-0 cannot end at -2"),
        ({"endingOffsets": "end"}, r"must be latest or JSON such as"),
        ({"startingTimestamp": "noon"}, r"'noon' is not a time: write ms since 1970"),
        ({"startingTimestamp": "2024-05-01T12:00:00"}, r"names no time zone: write .*Z for UTC"),
        ({"startingOffsetsByTimestamp": '{"a":{"0":-2}}'}, r"a-0 has time -2"),
        ({"startingOffsetsByTimestampStrategy": "skip"}, r"must be error or latest, not 'skip'"),
        ({"failOnDataLoss": "maybe"}, r"must be true or false, not 'maybe'"),
        ({"isolationLevel": "serializable"}, r"must be read_uncommitted or read_committed"),
        ({"minPartitions": "0"}, r"must be a positive whole number, not '0'"),
        ({"maxRecordsPerPartition": "1e3"}, r"must be a positive whole number"),
        ({"maxBytesPerPartition": "64 furlongs"}, r'must be a size such as "64m"'),
        ({"includeHeaders": "1"}, r"must be true or false"),
        ({"onCorrupt": "ignore"}, r"must be raise or skip"),
        ({"columns": ","}, r"names no column"),
        ({"maxTriggerDelay": "soon"}, r'must be a time such as "15m"'),
    ],
)
def test_what_cannot_be_used_is_named_with_its_remedy(options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(**options)


def refusal(act: Callable[[], object], kind: type[Exception]) -> str | None:
    """Return the text of the error that `act` raises; None if it raises none."""
    try:
        act()
    except kind as error:
        return str(error)
    return None


@pytest.mark.parametrize("value", ["", "bogus!", "-5", "[1]", "{", "nan"])
def test_an_error_shows_the_name_of_an_option_as_documented(value: str) -> None:
    """Spark gives the names in lower case."""
    for name in SOURCE_OPTIONS:
        given = {"path": "/data", name.lower(): value}
        text = refusal(functools.partial(SourceOptions.parse, given, streaming=None), OptionError)
        assert text is None or name in text
    for name in (field.name for field in dataclasses.fields(SinkOptions)):
        given = {"path": "/data", "txnappid": "a", name.lower(): value}
        text = refusal(functools.partial(SinkOptions.parse, given), SinkError)
        assert text is None or name in text
    with pytest.raises(SinkError, match=r"^kafka\.batch\.size must be a whole number"):
        SinkOptions.parse({"path": "/data", "kafka.batch.size": "many"})


@pytest.mark.parametrize("partitioner", [":loads", ".json:loads", "json:__name__", "json:no"])
def test_a_partitioner_that_is_no_function_is_refused(partitioner: str) -> None:
    with pytest.raises(SinkError, match="partitioner"):
        SinkOptions.parse({"path": "/data", "partitioner": partitioner})


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(OptionError, match="is for batch queries; a stream has no end"):
        parse(streaming=True, **{name: "1"})


def test_limits_of_a_trigger(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "maxOffsetsPerTrigger": "10",
        "minOffsetsPerTrigger": "5",
        "maxTriggerDelay": "30s",
        "maxBytesPerTrigger": "64m",
    }
    options = parse(streaming=True, **given)
    assert (options.trigger_offsets_max, options.trigger_offsets_min) == (10, 5)
    assert (options.trigger_delay_ms, options.trigger_bytes_max) == (30_000, 64 << 20)
    with caplog.at_level(logging.WARNING):
        parse(**given)
    assert caplog.text.count("has no effect on a batch query") == 4


def test_options_of_a_kafka_client_are_taken_and_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        given = {
            "kafkaConsumer.pollTimeoutMs": "1",
            "fetchOffset.numRetries": "1",
            "groupIdPrefix": "x",
            "kafka.security.protocol": "SSL",
        }
        assert parse(**given) == parse()
    assert caplog.text == ""
    assert parse(**{"Kafka.Group.Id": "g"}).group == "g"


@pytest.mark.parametrize(
    ("pattern", "topic"),
    [
        ("or.*", "orders"),
        ("\\Qa.b\\E-?", "a.b"),
        ("(?<first>[a-c])\\k<first>", "aa"),
        ("(?i)ORDERS", "orders"),
        ("[\\w&]+", "a_b"),
        ("(?:a|b)++", "abab"),
        ("x{2,3}", "xxx"),
    ],
)
def test_a_java_pattern_means_the_same_here(pattern: str, topic: str) -> None:
    assert java_pattern(pattern).fullmatch(topic)
    assert not java_pattern(pattern).fullmatch("!" + topic)


@pytest.mark.parametrize(
    "pattern", ["[a-z&&[^b]]", "[a[b]]", "\\p{Alpha}", "a\\Z", "\\h", "a(?i)b", "(", "a\\", "(?x)a"]
)
def test_a_pattern_that_python_reads_differently_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        java_pattern(pattern)


@pytest.mark.parametrize(("command", "warned"), [("/bin/sh", True), (sys.executable, False)])
def test_register_warns_if_the_workers_run_another_python(command: str, warned: bool) -> None:
    registered: list[object] = []
    spark = types.SimpleNamespace(
        _sc=types.SimpleNamespace(pythonExec=command),
        dataSource=types.SimpleNamespace(register=registered.append),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyspark_logstore.register(spark)  # type: ignore[arg-type]
    assert len(registered) == 1
    assert ["PYSPARK_PYTHON=" in str(each.message) for each in caught] == [True] * warned
