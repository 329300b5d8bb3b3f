"""Consumers: Consumer, AsyncConsumer, assignors, group membership."""
