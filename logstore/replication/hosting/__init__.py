"""The replicas of one node on real logs: carries the actions of the machines out."""
