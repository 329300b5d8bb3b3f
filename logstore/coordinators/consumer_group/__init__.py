"""Groups of the consumer protocol (KIP-848), and `room`: one group of either protocol."""
