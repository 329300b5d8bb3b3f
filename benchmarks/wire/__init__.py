"""The Kafka listener and a real broker, and the clients that the W bars measure them with."""
