"""Instruments, one per file; each says its tier and, when it is off, why."""
