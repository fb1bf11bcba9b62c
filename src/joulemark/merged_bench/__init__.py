"""Measures merged execution against its rivals: blocks and whole networks, all rivals of a subject in one process."""
