"""Producers: Producer, AsyncProducer, transactions, deduplication."""
