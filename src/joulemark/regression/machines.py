"""The machine of a run as a key: what makes two runs comparable, and what is shown because it differs (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from joulemark.records import Environment, Json, Run

SOFTWARE = ("driver", "cuda", "cudnn", "torch", "triton", "torchvision", "python", "joulemark", "commit")
"""What is compared: its versions are the axes of interest, the driver's first."""

SETTINGS = ("vbios", "power_limit_w", "max_sm_clock_hz", "ecc", "mig", "persistence")
"""How a GPU is set up; a difference changes what its model can do."""


def facts_of(environment: Environment, measured: Collection[str] = ()) -> dict[str, list[Json]]:
    """What may move a figure: name → values, of which GPUs may have several; what is not known is left out.

    Args:
        environment: of a run.
        measured: UUIDs of the GPUs that were measured on; of all where none of them is listed.
    """
    facts = environment.facts
    packages, host, git = (_mapping(facts.get(name)) for name in ("packages", "host", "git"))
    gpus = [gpu for gpu in environment.gpus if str(gpu.get("uuid")) in measured] or environment.gpus
    plain = {name: facts.get(name) for name in SOFTWARE}
    plain |= {name: version for name, version in packages.items() if version is not None}
    plain |= {"commit": _commit(git), "host": host.get("name")}
    found = {name: [value] for name, value in plain.items()}
    found |= {name: [gpu.get(name) for gpu in gpus] for name in SETTINGS}
    distinct = {name: _distinct(values) for name, values in found.items()}
    return {name: values for name, values in distinct.items() if values}


def machine_of(run: Run) -> dict[str, Json]:
    """What is known of the software and of the GPUs that a run measured on; what is not known is left out.

    Hosts, host names, UUIDs and momentary clocks are no part of it: two nodes of one kind are one machine.
    """
    measured = {record.gpu_uuid for record in run.records if record.gpu_uuid}
    each = [facts_of(environment, measured) for environment in run.environments.values()]
    found = {name: _distinct([value for one in each for value in one.get(name, ())]) for name in (*SOFTWARE, *SETTINGS)}
    return {name: one_or_all(values) for name, values in found.items() if values}


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


def one_or_all(values: list[Json]) -> Json:
    """The value, or all of them as text."""
    return values[0] if len(values) == 1 else ", ".join(sorted(map(str, values)))


def _distinct(values: list[Json]) -> list[Json]:
    out: list[Json] = []
    for value in values:
        if value is not None and value not in out:
            out.append(value)
    return out


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _commit(git: Mapping[str, Json]) -> str | None:
    commit = git.get("hash")
    if commit is None:
        return None
    return f"{commit} (dirty)" if git.get("dirty") else str(commit)
