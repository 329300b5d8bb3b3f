"""Groups, committed offsets and transactions of a store; no client code."""
