"""The files of one partition: segments, side files, state, producers, retention."""
