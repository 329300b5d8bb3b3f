"""Replication: one partition in several logs, on several nodes.

Machines without I/O decide (package `machines`); `node` carries their actions
out on a store; the metadata tree is ZooKeeper's, or an embedded one.
"""
