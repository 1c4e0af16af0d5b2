"""What a user of the simulator can get wrong, said in one line."""

from __future__ import annotations


class SimulationInputError(ValueError):
    """A trace, workload, model time or assertion that cannot be used: file and line if any, what, what is allowed."""
