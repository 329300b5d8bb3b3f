"""Opening a partition after a crash: torn tails, plans, failed fsyncs."""
