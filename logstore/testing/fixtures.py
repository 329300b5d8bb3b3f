"""pytest fixtures for code that uses logstore: a store, crashes, a clock, a recorder, a listener.

Enable them in a ``conftest.py``::

    pytest_plugins = ["logstore.testing.fixtures"]

They are deliberately not a pytest entry point: a test run that does not use logstore does not load
them, and their names cannot hide a fixture of another package.  Importing this module needs pytest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logstore import Store
from logstore import open as open_store
from logstore.clock import ManualClock
from logstore.testing.operations import (
    Recorder,
)
from logstore.testing.sandbox import directory_in_memory

try:
    import pytest
except ImportError as error:
    raise ImportError(
        'logstore\'s fixtures need the pytest package: pip install "logstore-engine[test]"'
    ) from error

if TYPE_CHECKING:
    from logstore.kafka.faults import Faults
    from logstore.kafka.server import KafkaServer

__all__ = [
    "KafkaServerUnderTest",
    "StoreUnderTest",
    "kafka_options",
    "kafka_server",
    "logstore_clock",
    "logstore_history",
    "logstore_options",
    "logstore_store",
]


class StoreUnderTest:
    """A store in a directory of its own that can be crashed and opened again.

    ``store`` is the current handle: get topics from it again after a crash.  The default directory
    is temporary, in memory if possible because a crash copies every file, and `close` removes it.
    A given `directory` must be empty and is kept.  Not thread-safe.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        clock: ManualClock | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of ``logstore.open``.  The default `clock` is a new ManualClock."""
        self.clock = ManualClock() if clock is None else clock
        self.crashes = 0
        self._temporary = directory is None  # then `close` removes it
        self._directory = Path(
            directory_in_memory("logstore-test-") if directory is None else directory
        )
        self._options = options
        self.store = open_store(self.path, clock=self.clock, **options)

    def __repr__(self) -> str:
        return f"<StoreUnderTest {self.path} after {self.crashes} crashes>"

    @property
    def path(self) -> Path:
        """Return the store's current directory.  Every crash changes it."""
        return self._directory / f"life-{self.crashes}"

    def crash(self) -> Store:
        """Simulate ``kill -9`` and reopen; return the new handle.

        Everything that was written to the operating system is kept, synced or not.  Records in the
        buffer of a writer or a producer are lost.  Stop threads that write before this call.
        """
        before, old = self.path, self.store
        self.crashes += 1
        # Copy the files first: closing the old handle changes only the old directory.
        shutil.copytree(before, self.path, symlinks=True)
        old.close()
        shutil.rmtree(before)
        self.store = open_store(self.path, clock=self.clock, **self._options)
        return self.store

    def reopen(self) -> Store:
        """Close cleanly and reopen; return the new handle."""
        self.store.close()
        self.store = open_store(self.path, clock=self.clock, **self._options)
        return self.store

    def close(self) -> None:
        """Close the current handle, and remove the directory if it is a temporary one."""
        try:
            self.store.close()
        finally:
            if self._temporary:
                shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> StoreUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KafkaServerUnderTest:
    """A store with a listener for Kafka's clients, which can be crashed and goes on.

    ``store`` and ``server`` are the current ones: get topics from ``store`` again after a crash.
    The address stays the same.  The clock is the system's.  Not thread-safe.
    """

    def __init__(self, directory: str | os.PathLike[str], **config: Any) -> None:
        """`directory` must be empty and is kept.  `config` has the settings of KafkaConfig."""
        self.crashes = 0
        self._directory = Path(directory)
        # A client that was written for a cluster asks for three replicas.
        self._config = {"logstore_any_replication_factor": True} | config
        self._address = "127.0.0.1:0"
        self.store: Store
        self.server: KafkaServer
        self._open()

    def __repr__(self) -> str:
        return f"<KafkaServerUnderTest on {self._address} after {self.crashes} crashes>"

    @property
    def path(self) -> Path:
        """Return the store's current directory.  Every crash changes it."""
        return self._directory / f"life-{self.crashes}"

    @property
    def bootstrap_servers(self) -> str:
        """The address for Kafka's clients, such as ``127.0.0.1:40123``."""
        return self.server.bootstrap_servers

    @property
    def faults(self) -> Faults:
        """Errors, delays and lost answers on demand.  A crash removes the rules."""
        return self.server.faults

    def crash(self) -> Store:
        """Simulate ``kill -9`` of the listener with its store, and start both again.

        Connections are cut, requests under way get no answer, and clients connect again.  What was
        written to the operating system is kept: every record that a client has an answer for.
        Records in the buffer of a writer or a producer of this process are lost.  Stop threads of
        this process that write before this call.
        """
        self.server.close(timeout=0)  # no answer is sent after the files are copied
        before, old = self.path, self.store
        self.crashes += 1
        # Copy the files first: closing the old handle changes only the old directory.
        shutil.copytree(before, self.path, symlinks=True)
        old.close()
        shutil.rmtree(before)
        self._open()
        return self.store

    def _open(self) -> None:
        from logstore.kafka.server import KafkaServer

        self.store = open_store(self.path, durability="os")
        self.server = KafkaServer(self.store, self._address, config=self._config).start()
        # The free port that the first start got is used again: clients connect to the same address.
        self._address = self.server.bootstrap_servers

    def close(self) -> None:
        """Close the listener and the store."""
        self.store.close()

    def __enter__(self) -> KafkaServerUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def kafka_options() -> Mapping[str, Any]:
    """Settings of the listener of `kafka_server`; override this fixture to choose others."""
    return {}


@pytest.fixture
def kafka_server(
    tmp_path: Path, kafka_options: Mapping[str, Any]
) -> Iterator[KafkaServerUnderTest]:
    """An empty store with a listener for Kafka's clients, on a free port; closed after the test."""
    with KafkaServerUnderTest(tmp_path / "kafka-server", **kafka_options) as under_test:
        yield under_test


@pytest.fixture
def logstore_clock() -> ManualClock:
    """A ManualClock: it moves only when the test advances it."""
    return ManualClock()


@pytest.fixture
def logstore_history() -> Recorder:
    """A Recorder; check its ``history()`` with `logstore.testing.assert_clean`."""
    return Recorder()


@pytest.fixture
def logstore_options() -> Mapping[str, Any]:
    """Options of the store of `logstore_store`; override this fixture to choose others."""
    return {"durability": "os"}


@pytest.fixture
def logstore_store(
    logstore_clock: ManualClock, logstore_options: Mapping[str, Any]
) -> Iterator[StoreUnderTest]:
    """An empty store on `logstore_clock` that can be crashed; closed after the test."""
    with StoreUnderTest(clock=logstore_clock, **logstore_options) as under_test:
        yield under_test
