"""Question 1 over batch sizes: from which batch on the kernels hide the framework, and what that costs in memory.

``tandem_document`` turns stored sweeps into one strict-JSON document; ``find_crossover`` finds the crossover batch.
"""

from joulemark.tandem.crossover import Crossover, Point, find_crossover
from joulemark.tandem.document import SCHEMA, crossover_of, exit_code, idle_by_cause, tandem_document
from joulemark.tandem.in_turns import FEW

__all__ = [
    "FEW",
    "SCHEMA",
    "Crossover",
    "Point",
    "crossover_of",
    "exit_code",
    "find_crossover",
    "idle_by_cause",
    "tandem_document",
]
