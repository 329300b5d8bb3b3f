"""ControlServer: a listener for operators, with an event loop, threads and limits of its own.

Operators can list, describe, reset and delete through it while the listener of the data is at its
limits.  Produce and Fetch are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from logstore.kafka.config import KafkaConfig
from logstore.kafka.server import KafkaServer
from logstore.store.store import Store

__all__ = ["ControlServer"]

CONNECTIONS_MAX = 32
THREADS = 2


class ControlServer(KafkaServer):
    """Serves every API except Produce and Fetch.  A store may have one next to its KafkaServer."""

    def __init__(
        self,
        store: Store,
        listen: str,
        *,
        config: KafkaConfig | Mapping[str, Any] | None = None,
    ) -> None:
        own = dataclasses.replace(
            KafkaConfig.of(config),
            max_connections=CONNECTIONS_MAX,
            num_io_threads=THREADS,
            advertised_listeners="",  # its clients stay here
        )
        super().__init__(store, f"CONTROL://{listen.rpartition('://')[2]}", config=own)
        for api in ("Produce", "Fetch"):
            self.faults.fail(
                api, "INVALID_REQUEST", times=None, text="the control listener serves no records"
            )
