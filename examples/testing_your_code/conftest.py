"""The fixtures of logstore.testing, for the tests in this directory."""

pytest_plugins = ["logstore.testing.fixtures"]
