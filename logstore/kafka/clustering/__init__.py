"""The listener of a node of a cluster: which node leads what, and requests between nodes.

`topology` answers for a store alone, `clustered` for a node; `peers` sends the requests of a node
to the others over Kafka's protocol; `replica_fetch` serves them.
"""
