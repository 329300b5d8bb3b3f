"""One open partition: reading, appending, truncating, durability."""
