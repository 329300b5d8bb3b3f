"""The Kafka listener: Kafka's protocol in front of a store."""
