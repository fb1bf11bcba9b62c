"""Counters of each kernel without replay: PM samples and the kernel timeline of one unserialized run, on one clock.

::

    recording   what both instruments saw of some steps, as files
    clock       the samples' clock laid over the timeline's, by beacons at both ends of the run
    timeline    which kernel ran when, in which step, in which place of it
    units       kernels that share a rate: long ones each their own, short ones together
    solve       the rates, by non-negative least squares, and their intervals
    check       whether counts and timeline fit as the clocks are mapped
    windows     the windows of a recording that can be attributed
    figures     rates as amounts of classes, kernels, operators and modules
    roofline    classes under the measured peaks
    document    all of it, as one document
    feeds       what other analyses take of it

``attribute(folder)`` goes all the way. It works on stored recordings and needs neither torch nor a GPU.
"""

from joulemark.attribution.document import SCHEMA, attribute

__all__ = ["SCHEMA", "attribute"]
