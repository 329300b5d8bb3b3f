"""What each request means: one module for each noun of the protocol."""
