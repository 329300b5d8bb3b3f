"""Delayed delivery: tickets, the agenda of due records, and the scheduler that delivers them."""
