"""Counters of each kernel without replay: PM samples and the kernel timeline of one unserialized run, on one clock.

::

    recording   what both instruments saw of some steps, as files
    clock       the samples' clock laid over the timeline's, by beacons at both ends of the run
    timeline    which kernel ran when, in which step, in which place of it
    units       kernels that share a rate: long ones each their own, short ones together
    solve       the rates, by non-negative least squares, and their intervals
    dealing     what each sample counted, dealt out to the kernels in it
    check       whether counts and timeline fit as the clocks are mapped
    windows     the windows of a recording that can be attributed
    figures     rates as amounts of classes, kernels, operators and modules
    roofline    classes under the measured peaks
    document    all of it, as one document
    feeds       what other analyses take of it

``attribute(folder)`` goes all the way. It works on stored recordings and needs neither torch nor a GPU.
"""

from __future__ import annotations

from pathlib import Path

from joulemark.attribution.stored import SCHEMA
from joulemark.records import Json

__all__ = ["SCHEMA", "attribute"]


def attribute(folder: Path) -> dict[str, Json]:
    """The document of a recording, see :func:`joulemark.attribution.document.attribute`.

    Raises:
        UnreadableInput: a file of it cannot be read, or its clocks cannot be mapped.
    """
    from joulemark.attribution import document  # its statistics take a while to load; reports of documents need none

    return document.attribute(folder)
