"""pytest fixtures for code that uses a log: a store of its own, crashes, a clock, a recorder.

Ask for them in a ``conftest.py``::

    pytest_plugins = ["logstore.testing.fixtures"]

They are no entry point on purpose: whoever has logstore installed and tests something else must
not pay for it, and no name of theirs can be hidden by one of ours.  Importing this needs pytest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from logstore import Store
from logstore import open as open_store
from logstore.clock import ManualClock
from logstore.testing.history import Recorder

try:
    import pytest
except ImportError as error:
    raise ImportError(
        'logstore\'s fixtures need the pytest package: pip install "logstore[test]"'
    ) from error

__all__ = [
    "StoreUnderTest",
    "logstore_clock",
    "logstore_history",
    "logstore_options",
    "logstore_store",
]


class StoreUnderTest:
    """A store in a directory of its own that can be crashed and opened again.

    ``store`` is the handle of the moment: fetch topics from it again after a crash.  `directory`
    must be empty; several places in it are used one after the other.  Everything is closed by
    `close`.  Not for several threads at once.
    """

    def __init__(self, directory: Path, clock: ManualClock, **options: Any) -> None:
        """`options` are those of ``logstore.open``."""
        self.clock = clock
        self.crashes = 0
        self._directory = directory
        self._options = options
        self.store = open_store(self.path, clock=clock, **options)

    def __repr__(self) -> str:
        return f"<StoreUnderTest {self.path} after {self.crashes} crashes>"

    @property
    def path(self) -> Path:
        """Where the store is now; moves with every crash."""
        return self._directory / f"life-{self.crashes}"

    def crash(self) -> Store:
        """Go on with what ``kill -9`` at this moment would leave; the new handle.

        That is everything the operating system was given, synced or not.  What a buffered writer
        or a producer still holds is gone.  Threads that write must be stopped first.
        """
        before, old = self.path, self.store
        self.crashes += 1
        # The files as they are: nothing of the old handle, not even its closing, can touch them.
        shutil.copytree(before, self.path, symlinks=True)
        old.close()
        shutil.rmtree(before)
        self.store = open_store(self.path, clock=self.clock, **self._options)
        return self.store

    def reopen(self) -> Store:
        """Close in order and open again; the new handle."""
        self.store.close()
        self.store = open_store(self.path, clock=self.clock, **self._options)
        return self.store

    def close(self) -> None:
        """Close the handle of the moment."""
        self.store.close()


@pytest.fixture
def logstore_clock() -> ManualClock:
    """A clock that stands still until it is told to go on."""
    return ManualClock()


@pytest.fixture
def logstore_history() -> Recorder:
    """A recorder; `logstore.testing.assert_clean` judges its ``history()``."""
    return Recorder()


@pytest.fixture
def logstore_options() -> Mapping[str, Any]:
    """Options of the store of `logstore_store`; override this fixture to choose others."""
    return {"durability": "os"}


@pytest.fixture
def logstore_store(
    tmp_path: Path, logstore_clock: ManualClock, logstore_options: Mapping[str, Any]
) -> Iterator[StoreUnderTest]:
    """An empty store on `logstore_clock` that can be crashed; closed after the test."""
    under_test = StoreUnderTest(tmp_path / "logstore", logstore_clock, **logstore_options)
    yield under_test
    under_test.close()
