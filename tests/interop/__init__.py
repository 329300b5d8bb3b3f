"""Apache Kafka itself as the judge of what logstore reads and writes."""
