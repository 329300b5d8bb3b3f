"""Kafka's tools, for the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .kafka import VERSION
from .tools import Tools, compiled
from .zookeeper import Ensemble, require_zookeeper


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    started = Tools(compiled("Tools.java", VERSION, tmp_path_factory.mktemp("tools")))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ensemble]:
    """A ZooKeeper of one server.  Every cluster has a root of its own in it."""
    require_zookeeper()
    with Ensemble(tmp_path_factory.mktemp("zookeeper")) as servers:
        yield servers
