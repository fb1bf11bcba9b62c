"""Question 1 from a profiler trace: when the GPU works, when it waits and for what.

``analyse_files`` reads Kineto Chrome traces and returns one strict-JSON document, ``diff`` compares two of them.
"""

from joulemark.trace.analyse import SCHEMA, analyse_files, exit_code
from joulemark.trace.diff import DIFF_SCHEMA, diff

__all__ = ["DIFF_SCHEMA", "SCHEMA", "analyse_files", "diff", "exit_code"]
