"""Runs over time: an index of stored runs, and the changes of their levels."""
