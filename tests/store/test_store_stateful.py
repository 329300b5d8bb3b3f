"""A store against a dictionary: any acts in any sequence, closed or killed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import logstore
from logstore import Store
from logstore.clock import ManualClock

NAMES = st.sampled_from(["orders", "customers", "a.b", "x-1"])
SETTINGS = st.sampled_from([
    {},
    {"retention.ms": 5},
    {"segment.bytes": 2048},
    {"compression.type": "lz4"},
    {"segment.bytes": None, "cleanup.policy": "compact"},
])  # fmt: skip
BROKER = '{"version":0,"brokerEpoch":9}'


class StoreMachine(RuleBasedStateMachine):
    """`model`: topic -> (settings, values of each partition).  All appends are durable="os"."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="store-"))
        self.path = self.home / "0"
        self.crashes = 0
        self.clock = ManualClock()
        self.model: dict[str, tuple[dict[str, object], list[list[bytes]]]] = {}

    @initialize()
    def open(self) -> None:
        self.store: Store = logstore.open(self.path, durability="os", clock=self.clock)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.home)

    @rule(name=NAMES, partitions=st.integers(1, 4), config=SETTINGS)
    def create(self, name: str, partitions: int, config: dict[str, object]) -> None:
        topic = self.store.create_topic(name, partitions, config=config, exist_ok=True)
        if name not in self.model:
            kept = {key: value for key, value in config.items() if value is not None}
            self.model[name] = (kept, [[] for _ in range(partitions)])
        assert len(topic) == len(self.model[name][1])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 20))
    def append(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        for i in range(count):
            self.clock.advance(1)
            value = b"%d " % self.clock.now_ms * 10
            position = self.store[name].append(value, key=b"%d" % i)
            self.model[name][1][position.partition].append(value)
            assert position.offset == len(self.model[name][1][position.partition]) - 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), config=SETTINGS)
    def alter(self, data: st.DataObject, config: dict[str, object]) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store.alter_topic(name, config)
        merged = {**self.model[name][0], **config}
        kept = {key: value for key, value in merged.items() if value is not None}
        self.model[name] = (kept, self.model[name][1])

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 2))
    def grow(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store[name].add_partitions(count)
        self.model[name][1].extend([] for _ in range(count))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.store.delete_topic(name)
        del self.model[name]

    @rule()
    def sync(self) -> None:
        self.store.sync()
        assert all(p.durable_offset == p.end_offset for t in self.store.values() for p in t)

    @rule(broker=st.booleans())
    def reopen(self, broker: bool) -> None:
        self.store.close()
        if broker:  # one that opened, changed nothing and closed
            (self.path / ".kafka_cleanshutdown").write_text(BROKER)
        self.open()
        assert self.store.recovery.clean and not self.store.recovery.failed

    @rule(marker_lost=st.booleans())
    def crash(self, marker_lost: bool) -> None:
        """A copy of the open directory is what a kill leaves; the original ends in order."""
        self.crashes += 1
        target = self.home / str(self.crashes)
        shutil.copytree(self.path, target)
        self.store.close()
        shutil.rmtree(self.path)
        self.path = target
        for file in target.glob("*-checkpoint") if marker_lost else ():
            file.unlink()
        self.open()
        assert not self.store.recovery.failed
        for report in self.store.recovery.partitions.values():
            assert not report.damage and not report.torn

    @invariant()
    def the_store_is_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert sorted(self.store) == sorted(self.model)
        for name, (config, partitions) in self.model.items():
            topic = self.store[name]
            assert topic.config.changed() == config
            assert [[r.value for r in partition] for partition in topic] == partitions
        with logstore.open(self.path, readonly=True) as reader:
            ends = {name: [p.end_offset for p in topic] for name, topic in reader.items()}
        assert ends == {name: [len(p) for p in ps] for name, (_, ps) in self.model.items()}
        directories = {entry.name for entry in self.path.iterdir() if entry.is_dir()}
        assert directories == {
            f"{name}-{n}" for name, (_, ps) in self.model.items() for n in range(len(ps))
        }


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=15, stateful_step_count=12)
