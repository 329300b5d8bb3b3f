"""SinkOptions: the options of ``write`` and ``writeStream``, parsed and checked once."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyspark_logstore.commits import SinkError

__all__ = ["SinkOptions", "store_path"]

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
PARTITIONERS = ("key", "roundRobin")
# Java's own, as people have them in their jobs.
JAVA_PARTITIONERS = {
    "org.apache.kafka.clients.producer.internals.defaultpartitioner": "key",
    "org.apache.kafka.clients.producer.uniformstickypartitioner": "key",
    "org.apache.kafka.clients.producer.roundrobinpartitioner": "roundRobin",
}
# Given by Spark itself or of no meaning here.
IGNORED = frozenset({"checkpointlocation", "queryname", "outputmode", "failondataloss"})
PROTECTED = frozenset({"kafka.key.serializer", "kafka.value.serializer"})
ALIASES = {
    "kafka.partitioner.class": "partitioner",
    "kafka.compression.type": "compression",
    "kafka.batch.size": "batchBytes",
}


def store_path(text: str) -> Path:
    """The directory that a path or a file: URI names."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text)
    if match:
        if match[1].lower() != "file":
            raise SinkError(
                f"path {text!r}: a store is a directory that every task can see, such as a shared "
                f"mount; {match[1]}: is no file system for it"
            )
        text = re.sub(r"^file:(//[^/]*(?=/))?", "", text, flags=re.IGNORECASE)
    if not text:
        raise SinkError("the option path is empty: give the directory of a store")
    return Path(os.path.abspath(text))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """Options of both sinks.  A field's comment is its consequence."""

    path: str
    # All rows go there; without it, every row names its topic.
    topic: str | None = None
    # false: a column `headers` is left out.
    includeHeaders: bool = True
    # key: by the key's hash, as Kafka's Java client; roundRobin; or module:function of your own.
    partitioner: str = "key"
    # keep: a column `timestamp` gives the records' times; now: the time of writing does.
    timestamps: str = "keep"
    # The name under which batches are remembered.  Default: the query's id.
    txnAppId: str | None = None
    # Batch writes only, with txnAppId: its number; written once, however often it is tried.
    txnVersion: int | None = None
    # fsync: survives a power cut; os: survives killed processes.
    durability: str = "fsync"
    # Make topics that are missing, with this many partitions.
    createTopic: bool = True
    partitions: int = 1
    compression: str | None = None
    batchBytes: int = 1 << 18
    # Seconds to wait for another writer of the store.
    lockTimeout: float = 60.0
    # Seconds after which prepared files that no plan names are deleted.
    orphanAge: float = 86_400.0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """From what Spark hands over: any case, all text."""
        known = {field.name.lower(): field for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for given, text in options.items():
            name = given.lower()
            if name in IGNORED:
                continue
            if name in PROTECTED:
                raise SinkError(f"{given} cannot be set: keys and values are written as they are")
            if name == "kafka.bootstrap.servers":
                raise SinkError(
                    "kafka.bootstrap.servers: this sink writes to a store's directory: use "
                    "option('path', ...), or Spark's own format('kafka') to write to brokers"
                )
            if name.startswith("kafka.") and name not in ALIASES:
                continue  # settings of a Java producer have no meaning here
            field = known.get(ALIASES.get(name, name).lower())
            if field is None:
                names = [f.name for f in dataclasses.fields(cls)]
                near = difflib.get_close_matches(name, [n.lower() for n in names], n=1)
                hint = (
                    f"did you mean {known[near[0]].name!r}?"
                    if near
                    else f"known are {', '.join(sorted(names))}"
                )
                raise SinkError(f"unknown option {given!r} of the logstore sink; {hint}")
            # Spark gives names in lower case; an error shows them as documented.
            shown = name if name in ALIASES else field.name
            values[field.name] = _parsed(field, shown, text)
        if "path" not in values:
            raise SinkError("the option path is missing: give the directory of a store")
        return cls(**values)

    def __post_init__(self) -> None:
        store_path(self.path)
        self._one_of("durability", self.durability, ("fsync", "os"))
        self._one_of("timestamps", self.timestamps, ("keep", "now"))
        if self.compression is not None:
            self._one_of("compression", self.compression, COMPRESSIONS)
        for name in ("partitions", "batchBytes"):
            if getattr(self, name) < 1:
                raise SinkError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("lockTimeout", "orphanAge"):
            if not getattr(self, name) >= 0:
                raise SinkError(f"{name} must be seconds from 0 on, not {getattr(self, name)}")
        if self.txnVersion is not None and (self.txnVersion < 0 or self.txnAppId is None):
            raise SinkError("txnVersion must be 0 or more, and needs txnAppId beside it")
        self.partitioner_function()

    @staticmethod
    def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
        if value not in choices:
            raise SinkError(f"{name} must be one of {', '.join(choices)}, not {value!r}")

    @property
    def root(self) -> Path:
        return store_path(self.path)

    @property
    def kind_of_partitioner(self) -> str:
        return JAVA_PARTITIONERS.get(self.partitioner.lower(), self.partitioner)

    def partitioner_function(self) -> Callable[[bytes | None, bytes | None, int], int] | None:
        """The user's own function; None for those known here by name."""
        kind = self.kind_of_partitioner
        if kind in PARTITIONERS:
            return None
        module, colon, function = kind.partition(":")
        if not colon:
            raise SinkError(
                f"partitioner must be one of {', '.join(PARTITIONERS)} or module:function, not "
                f"{self.partitioner!r}"
            )
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise SinkError(
                f"the partitioner {kind!r} cannot be imported ({error}): tasks need it, too; ship "
                f"it with spark.sparkContext.addPyFile"
            ) from error
        if not callable(found):
            raise SinkError(f"the partitioner {kind!r} is not a function")
        return found  # type: ignore[no-any-return]


def _parsed(field: dataclasses.Field[Any], shown: str, text: str) -> Any:
    kind = str(field.type)
    try:
        if kind.startswith("bool"):
            return {"true": True, "false": False}[text.strip().lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "int": "a whole number"}.get(kind.split()[0], "a number")
        raise SinkError(f"{shown} must be {wanted}, not {text!r}") from None
    return text
