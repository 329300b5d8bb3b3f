"""Kafka's messages as bytes: the schemas, the codec that is generated from them, frames."""
