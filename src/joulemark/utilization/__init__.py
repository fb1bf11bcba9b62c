"""How much of a busy GPU works: where a bigger batch stops helping, and what per-kernel counters say.

``read_files`` reads exports of Nsight Compute and returns one strict-JSON document; ``find_plateau`` finds the knee of
a level over batch size.
"""

from joulemark.utilization.counters import SCHEMA, exit_code, read_files
from joulemark.utilization.plateau import Plateau, Point, find_plateau

__all__ = ["SCHEMA", "Plateau", "Point", "exit_code", "find_plateau", "read_files"]
