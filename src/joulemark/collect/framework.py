"""What the framework itself says about its devices, asked in a short process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_ASK = """
import json, torch
found = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        found.append(None if uuid is None else str(uuid))
print("joulemark-uuids " + json.dumps(found))
"""


def framework_uuids(environ: Mapping[str, str], timeout_s: float = 120.0) -> list[str] | None:
    """UUIDs of torch's CUDA devices in the order of its ordinals.

    A process of its own keeps CUDA out of this one and sees exactly ``environ``.

    Args:
        environ: the environment of the process that will measure.
        timeout_s: seconds after which the process is given up.

    Returns:
        One ``GPU-…`` or ``MIG-…`` per device, none where torch sees no device; None when torch is not
        installed, does not know UUIDs, or does not answer.
    """
    command = [sys.executable, "-P", "-c", _ASK]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = re.search(r"^joulemark-uuids (.*)$", done.stdout, re.MULTILINE)
    if done.returncode != 0 or answer is None:
        return None
    uuids = json.loads(answer.group(1))
    return None if None in uuids else [_prefixed(uuid) for uuid in uuids]


def device_uuid(device: str) -> str | None:
    """UUID of a torch device in this process, which the caller means to measure on anyway.

    Args:
        device: torch's name, as ``cuda:0``.

    Returns:
        ``GPU-…``, or None for a device without one (a CPU, an old torch).
    """
    if not device.startswith("cuda"):
        return None
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else _prefixed(str(uuid))


def _prefixed(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
