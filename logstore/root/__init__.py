"""The files in a store's root: catalogue, clean shutdown, checkpoints, producer ids."""
