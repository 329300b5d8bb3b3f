"""Batches that were encoded elsewhere: a client's, a coordinator's, or copies of a leader's."""
