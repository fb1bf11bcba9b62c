"""What NVML's clock-event reasons mean: names, and which of them hold a GPU below its clocks (read only)."""

from __future__ import annotations

_BITS = (
    (0x001, "idle"),
    (0x002, "application_clocks"),
    (0x004, "power_cap"),
    (0x008, "hw_slowdown"),
    (0x010, "sync_boost"),
    (0x020, "thermal"),
    (0x040, "thermal"),
    (0x080, "power_brake"),
    (0x100, "display_clocks"),
)
"""``nvmlClocksEventReason*`` of nvml.h; software (0x20) and hardware (0x40) thermal slowdown share one name."""

HINDERING = frozenset({"power_cap", "thermal", "hw_slowdown", "power_brake", "sync_boost"})
"""Reasons under which a GPU that has work runs slower than it otherwise would."""


def reason_names(mask: int) -> frozenset[str]:
    """Names of the active clock-event reasons.

    Args:
        mask: NVML's bit mask; a bit that this version does not know becomes ``unknown_0x…``.
    """
    names = {name for bit, name in _BITS if mask & bit}
    rest = mask
    for bit, _ in _BITS:
        rest &= ~bit
    if rest:
        names.add(f"unknown_{rest:#x}")
    return frozenset(names)


def reason_mask(names: frozenset[str]) -> int:
    """The bit mask of reason names, for a simulated GPU; ``thermal`` is its software form.

    Raises:
        ValueError: a name that NVML has no bit for.
    """
    bits = {name: bit for bit, name in reversed(_BITS)}
    unknown = sorted(names - bits.keys())
    if unknown:
        raise ValueError(f"no clock-event reason is called {unknown[0]!r}; there are {', '.join(sorted(bits))}")
    mask = 0
    for name in names:
        mask |= bits[name]
    return mask
