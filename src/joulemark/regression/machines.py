"""The machine of a run as a key: what makes two runs comparable, and what is shown because it differs (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from joulemark.records import Environment, Json, Run

SOFTWARE = ("driver", "cuda", "cudnn", "torch", "triton", "torchvision", "python", "joulemark", "commit")
"""What is compared: its versions are the axes of interest, the driver's first."""

SETTINGS = ("vbios", "power_limit_w", "max_sm_clock_hz", "ecc", "mig", "persistence")
"""How a GPU is set up; a difference changes what its model can do."""


def machine_of(run: Run) -> dict[str, Json]:
    """What is known of the software and of the GPUs that a run measured on; what is not known is left out.

    Hosts, host names, UUIDs and momentary clocks are no part of it: two nodes of one kind are one machine.
    """
    found: dict[str, list[Json]] = {}
    measured = {record.gpu_uuid for record in run.records if record.gpu_uuid}
    for environment in run.environments.values():
        for name, value in (*_software(environment), *_settings(environment, measured)):
            if value is not None and value not in found.setdefault(name, []):
                found[name].append(value)
    return {name: _one_or_all(found[name]) for name in (*SOFTWARE, *SETTINGS) if found.get(name)}


def differences(base: Run, new: Run) -> dict[str, tuple[Json, Json]]:
    """Fact → (base, new), where the two differ; a fact that a side does not know is None there."""
    old, current = machine_of(base), machine_of(new)
    names = [name for name in (*SOFTWARE, *SETTINGS) if old.get(name) != current.get(name)]
    return {name: (old.get(name), current.get(name)) for name in names}


def set_up_differently(found: Mapping[str, tuple[Json, Json]]) -> str | None:
    """A line where both sides know how their GPUs are set up and that differs; None where it does not."""
    known = [
        f"{name} {old} -> {current}"
        for name, (old, current) in found.items()
        if name in SETTINGS and name != "vbios" and old is not None and current is not None
    ]
    return f"the GPUs are set up differently ({', '.join(known)}): the verdicts are about that too" if known else None


def _software(environment: Environment) -> Iterable[tuple[str, Json]]:
    facts = environment.facts
    packages = facts.get("packages")
    git = facts.get("git")
    for name in SOFTWARE:
        if isinstance(packages, Mapping) and name in packages:
            yield name, packages[name]
        elif name == "commit":
            yield name, _commit(git) if isinstance(git, Mapping) else None
        else:
            yield name, facts.get(name)


def _commit(git: Mapping[str, Json]) -> Json:
    commit = git.get("hash")
    return f"{commit} (dirty)" if commit and git.get("dirty") else commit


def _settings(environment: Environment, measured: set[str]) -> Iterable[tuple[str, Json]]:
    listed = environment.facts.get("gpus")
    gpus = [gpu for gpu in listed if isinstance(gpu, Mapping)] if isinstance(listed, list) else []
    for gpu in [gpu for gpu in gpus if gpu.get("uuid") in measured] or gpus:
        for name in SETTINGS:
            yield name, gpu.get(name)


def _one_or_all(values: list[Json]) -> Json:
    return values[0] if len(values) == 1 else ", ".join(sorted(map(str, values)))
