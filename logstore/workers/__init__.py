"""Workers: many records of a partition at once, in order for each key, with exact progress."""
