"""Topics in one directory: Store, Topic and the root's checkpoints."""
