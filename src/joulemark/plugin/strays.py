"""Functions that take ``bench`` under a name that pytest does not collect."""

from __future__ import annotations

import inspect
from fnmatch import fnmatch

import pytest


def is_stray(collector: pytest.Collector, name: str, obj: object) -> bool:
    """Whether a thing in a module or class is a benchmark that would be lost without a word."""
    if not inspect.isfunction(obj) or not isinstance(collector, (pytest.Module, pytest.Class)):
        return False
    takes = "bench" in inspect.signature(obj).parameters
    return takes and not _is_collected(name, collector.config.getini("python_functions")) and not _is_fixture(obj)


def _is_collected(name: str, patterns: list[str]) -> bool:
    """Whether pytest takes a function of this name: by prefix, or by shell pattern."""
    return any(name.startswith(one) or fnmatch(name, one) for one in patterns)


def _is_fixture(obj: object) -> bool:
    return hasattr(obj, "_pytestfixturefunction") or type(obj).__name__ == "FixtureFunctionDefinition"
