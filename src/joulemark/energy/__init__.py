"""Which part of the chip spends the joules: microbenchmarks, their calibration of one GPU, and the model made of it.

A calibration (:mod:`joulemark.energy.calibration`) holds the energy per operation or byte of each unit and level of one
GPU, each with its interval. With counts of a workload, it predicts power (:mod:`joulemark.energy.model`) and splits
measured energy (:mod:`joulemark.energy.split`). Only :mod:`joulemark.energy.microbench` needs CUDA.
"""
