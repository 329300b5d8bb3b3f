"""simulation: the shipped machines of replication in a simulated cluster, with faults.

``simulate(seed)`` runs one cluster in virtual time and checks its invariants.  One seed is one run
on every machine.
"""

from __future__ import annotations

from logstore.testing.simulation.run import Run, SimulationFailure, run_range, simulate
from logstore.testing.simulation.settings import Settings

__all__ = ["Run", "Settings", "SimulationFailure", "run_range", "simulate"]
