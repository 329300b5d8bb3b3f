"""Checks that read every file and report problems; they never write."""
