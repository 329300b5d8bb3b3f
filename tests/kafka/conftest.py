"""A store with a listener, for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import logstore
from logstore import Store
from logstore.kafka.server import KafkaServer
from tests.kafka.peer import Peer


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with logstore.open(tmp_path / "store", durability="os") as opened:
        yield opened


@pytest.fixture
def server(store: Store) -> Iterator[KafkaServer]:
    with KafkaServer(store) as started:
        yield started


@pytest.fixture
def peer(server: KafkaServer) -> Iterator[Peer]:
    with Peer(server.address) as connected:
        yield connected
