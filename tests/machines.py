"""What state machines about one partition share: a directory of its own, reopening, a crash."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine

from logstore import Partition
from logstore.testing import check_invariants


def fast_directory() -> str | None:
    """Memory, where there is some: the histories here do not depend on what a disk does."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class PartitionMachine(RuleBasedStateMachine):
    """A subclass sets `log` to `open()` at the end of its __init__."""

    log: Partition

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="logstore-machine-", dir=fast_directory()))
        self.incarnation = 0

    @property
    def path(self) -> Path:
        return self.root / f"copy{self.incarnation}" / "orders-0"

    def open(self) -> Partition:
        raise NotImplementedError

    def teardown(self) -> None:
        try:
            if not self.log.closed:  # a rule that failed in between may have left it so
                check_invariants(self.log)
        finally:
            self.log.close()
            shutil.rmtree(self.root)

    def open_again(self) -> None:
        self.log.close()
        self.log = self.open()

    def open_killed(self, junk: bytes = b"") -> None:
        """Open what a killed process leaves: the files as they are, nothing closed.

        `junk` is added to the last segment, as a write that was interrupted does.
        """
        before = self.path
        self.incarnation += 1
        shutil.copytree(before, self.path)
        with max(self.path.glob("*.log")).open("ab") as file:
            file.write(junk)
        self.log.close()
        shutil.rmtree(before.parent)
        self.log = self.open()
