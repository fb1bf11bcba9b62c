"""joulemark: where a GPU's time and joules go, measured by ``pytest --bench``."""

__version__ = "0.1.0"
