"""GPUs by UUID, their sensors and clocks (read only)."""
