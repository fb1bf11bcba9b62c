"""``joulemark env``: this machine, and whether it is fit to measure on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from joulemark.cli.arguments import Commands, add_command
from joulemark.cli.console import EXIT_REFUSED, print_json, say
from joulemark.errors import DeviceError

if TYPE_CHECKING:
    from joulemark.device.gpu import GpuState, Inventory


def add_parser(commands: Commands) -> None:
    """Add ``env``."""
    parser = add_command(
        commands,
        "env",
        "GPUs, driver and software here, and what can be measured with them",
        "joulemark env --check && pytest --bench",
        run,
        "0 described, and with --check fit to measure on, 1 not fit, 2 wrong use",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/schema/env.schema.json)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 without a GPU, or when it is busy, throttled, hot, shared or faulty, and say why",
    )


def run(args: argparse.Namespace) -> int:
    """Describe the machine; with ``--check``, refuse one that is not fit."""
    from joulemark.device.gpu import probe_gpus
    from joulemark.environment import gather, preflight
    from joulemark.report import environment_view
    from joulemark.report.escape import printable

    inventory = probe_gpus(os.environ)
    environment = gather(inventory, Path.cwd())
    states = _states(inventory)
    verdict = preflight(inventory, states, os.getpid()) if args.check else None
    if args.json:
        print_json(environment_view.document(inventory, environment, states, verdict))
    else:
        for line in environment_view.lines(inventory, environment, states):
            print(printable(line))
    if verdict is None:
        return 0
    for note in verdict.notes:
        say(f"note: {note}")
    for doubt in verdict.doubts:
        say(f"not checked: {doubt}")
    for refusal in verdict.refusals:
        say(f"refused: {refusal}")
    return EXIT_REFUSED if verdict.refusals else 0


def _states(inventory: Inventory) -> dict[str, GpuState | DeviceError]:
    from joulemark.device.gpu import gpu_state
    from joulemark.device.nvml import Nvml

    states: dict[str, GpuState | DeviceError] = {}
    if not inventory.visible:
        return states
    with Nvml() as nvml:
        for one in inventory.visible:
            try:
                states[one.gpu.uuid] = gpu_state(nvml, one.gpu.uuid)
            except DeviceError as error:
                states[one.gpu.uuid] = error
    return states
