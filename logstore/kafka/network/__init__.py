"""Sockets: accepting, reading frames, sending answers, within limits."""
