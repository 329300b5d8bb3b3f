"""Kafka's bytes: batches, validation, index entries, wire types, codecs."""
