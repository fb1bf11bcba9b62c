"""What a measuring process inherits from its parent: arguments, environment, and the devices under test."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pytest

from joulemark.errors import ConfigurationError
from joulemark.plugin.sweep import Target

TARGETS_VARIABLE = "JOULEMARK_WORKER_TARGETS"


def child_arguments(config: pytest.Config) -> list[str]:
    """The parent's own arguments, with what must not happen twice (reports, early stops) neutralized at the end.

    The plugins behind ``--lf`` and its like are off: the child collects all items and measures those that it is
    asked for.
    """
    given = config.invocation_params.args
    # pytest takes the value of an option that names an existing folder (results, once they are there) for a part of its
    # search for the root: the child is told which root its parent has found.
    extra = ["--maxfail=0", "-Wdefault", f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        extra.append(f"--config-file={config.inipath}")
    # The options of a plugin that is switched off (-p no:terminal) do not exist in the child either.
    for plugin, options in (("terminal", ["-q", "--color=no"]), ("junitxml", ["--junitxml="])):
        extra += options if config.pluginmanager.hasplugin(plugin) else []
    for plugin in ("lfplugin", "nfplugin", "stepwiseplugin"):
        extra += ["-p", f"no:{plugin}"]
    if config.pluginmanager.hasplugin("xdist"):
        extra += ["-n0"]
    return [str(one) for one in given] + extra


def child_environment(
    target: Target, targets: list[Target], pool: Mapping[str, Sequence[str]] | None = None
) -> dict[str, str]:
    """The child sees the GPU under test alone, by UUID, and the parent's list of targets."""
    # A worker of pytest-xdist is this process' parent; the measuring process itself is none.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    return {**inherited, **variables_for(target, targets, pool or {})}


def variables_for(
    target: Target, targets: Sequence[Target], pool: Mapping[str, Sequence[str]], several: bool = False
) -> dict[str, str]:
    """Environment variables that show a measuring process its GPU and describe its parent's devices to it.

    Args:
        target: what it measures on.
        targets, pool, several: see :class:`Inherited`.
    """
    described = {
        "targets": [asdict(one) for one in targets], "pool": pool, "current": asdict(target), "several": several
    }  # fmt: skip
    return {"CUDA_VISIBLE_DEVICES": target.uuid or "", TARGETS_VARIABLE: json.dumps(described)}


@dataclass(frozen=True)
class Inherited:
    """What a measuring process knows of its parent's devices.

    Args:
        targets: the parent's, the one of this process first.
        pool: UUIDs of the GPUs that may work together, by model.
        current: what this process measures on, with the ranks that it is one of.
        several: whether the parent has more targets than it tells: ids of items then name theirs.
    """

    targets: list[Target]
    pool: Mapping[str, Sequence[str]]
    current: Target
    several: bool


def targets_from_parent() -> Inherited | None:
    """In a child: the parent's targets; None in a parent."""
    text = os.environ.get(TARGETS_VARIABLE)
    if text is None:
        return None
    data = json.loads(text)
    targets = [Target.from_json(one) for one in data["targets"]]
    if not targets:
        raise ConfigurationError(
            f"{TARGETS_VARIABLE} names no target", "it is set by joulemark for its measuring processes"
        )
    current = Target.from_json(data["current"])
    current_first = sorted(targets, key=lambda one: one.slug != current.slug)
    return Inherited(current_first, data["pool"], current, data["several"] or len(targets) > 1)
