"""Merged execution: sequences of layers brick by brick, so that intermediates need not travel to memory.

It imports nothing of the harness: it is a subject of measurement.
"""

from joulemark.merged.executor import MergedSequence, merge
from joulemark.merged.merged_model import Decision, MergedModel
from joulemark.merged.partition import recompute_factor
from joulemark.merged.sequence import Conv, Sequence

__all__ = ["Conv", "Decision", "MergedModel", "MergedSequence", "Sequence", "merge", "recompute_factor"]
