"""Kernels that keep one unit or memory level of a GPU busy, and what is known of them without a GPU."""
