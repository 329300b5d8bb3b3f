"""The log directory of a live broker, read while it runs and after it stopped."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from logstore import Partition

from .kafka import Broker, require_kafka
from .rows import Row, awkward_rows, plain_rows, row_of

pytestmark = pytest.mark.interop

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
START_MS = 1_700_000_000_000
SEED = 20


def many_rows(timestamp: int, count: int) -> list[Row]:
    """Rows of 0 to 2000 bytes, half of them compressible."""
    rng = random.Random(SEED)
    rows = []
    for i in range(count):
        size = rng.randrange(2000)
        value = rng.randbytes(size) if i % 2 else b"%d " % i * (size // 5)
        rows.append(Row(timestamp=timestamp + i, key=b"%d" % rng.randrange(100), value=value))
    return rows


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    require_kafka()
    pytest.importorskip("confluent_kafka")
    from .clients import produce

    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        for codec in CODECS:
            stored = "uncompressed" if codec == "none" else codec
            settings = {"compression.type": stored, "retention.ms": -1}
            broker.create_topic(codec, {**settings, "internal.segment.bytes": 1 << 18})
            for part, sender in enumerate((codec, "none")):  # the producer compresses, the broker
                now = START_MS + part * 100_000
                rows = [*awkward_rows(now, codec), *many_rows(now, 600), *plain_rows(now, "x", 50)]
                produce(broker.bootstrap, codec, rows, compression_type=sender, batch_size=1 << 16)
        yield broker


@pytest.fixture(scope="module")
def consumed(broker: Broker) -> dict[str, list[Row]]:
    from .clients import read_all

    return {codec: read_all(broker.bootstrap, codec) for codec in CODECS}


def read_by_us(directory: Path) -> list[Row]:
    with Partition.open(directory, readonly=True) as log:
        return [row_of(record) for record in log.scan()]


@pytest.mark.parametrize("codec", CODECS)
def test_a_running_brokers_partition_is_read_as_its_consumers_read_it(
    broker: Broker, consumed: dict[str, list[Row]], codec: str
) -> None:
    assert broker.running
    assert len(consumed[codec]) == 2 * 659
    assert read_by_us(broker.partition_dir(codec)) == consumed[codec]


@pytest.fixture(scope="module")
def stopped(broker: Broker, consumed: dict[str, list[Row]]) -> Broker:
    broker.stop()
    return broker


@pytest.mark.parametrize("codec", CODECS)
def test_a_stopped_brokers_partition_is_read_as_its_consumers_read_it(
    stopped: Broker, consumed: dict[str, list[Row]], codec: str
) -> None:
    directory = stopped.partition_dir(codec)
    assert len(list(directory.glob("*.log"))) > 1
    assert read_by_us(directory) == consumed[codec]


@pytest.mark.parametrize("codec", CODECS)
def test_a_stopped_brokers_partition_is_opened_for_writing(
    stopped: Broker, consumed: dict[str, list[Row]], codec: str
) -> None:
    with Partition.open(stopped.partition_dir(codec)) as log:
        assert [row_of(record) for record in log.scan()] == consumed[codec]
        assert log.append(b"ours") == len(consumed[codec])
        log.check()
