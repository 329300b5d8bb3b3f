"""The verbs of the `logstore` command, one module each."""
