"""The seam between coordinators and the replicas of their logs."""
