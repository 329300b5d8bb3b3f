"""The machines of replication: they decide, and have no I/O, no clock and no thread.

From the bottom: `leader_and_isr`, `assignment` and `image` are values of the metadata tree;
`in_sync`, `leader`, `follower` and `fetcher` are one partition; `replica` gives it its role;
`decisions` and `controller` are the cluster; `registration` is the life of one node.
"""
