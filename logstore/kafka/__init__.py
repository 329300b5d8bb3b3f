"""The Kafka listener: Kafka's protocol in front of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logstore.kafka.config import KafkaConfig
    from logstore.kafka.server import KafkaServer

__all__ = ["KafkaConfig", "KafkaServer"]


def __getattr__(name: str) -> object:
    """Import the two public names when they are first used."""
    if name == "KafkaServer":
        from logstore.kafka.server import KafkaServer

        return KafkaServer
    if name == "KafkaConfig":
        from logstore.kafka.config import KafkaConfig

        return KafkaConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
