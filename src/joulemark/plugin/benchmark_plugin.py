"""pytest-benchmark beside ``--bench``: which of its options are off, and what its own file says of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from joulemark.plugin import distributed
from joulemark.plugin.targets import shown

if TYPE_CHECKING:
    from joulemark.plugin.options import BenchOptions
    from joulemark.plugin.session import BenchSession


def adapt(config: pytest.Config, options: BenchOptions) -> None:
    """Our tables hold the same figures: its own appear with its own comparison. In a child and under -n it is off."""
    if not config.pluginmanager.hasplugin("benchmark"):
        return
    config.option.benchmark_only = False  # --bench keeps benchmarks only, and by their own fixture
    if options.worker is not None or distributed.is_worker(config) or distributed.is_controller(config):
        config.option.benchmark_disable, config.option.benchmark_enable = True, False
        config.option.benchmark_skip = False
        config.option.benchmark_compare = config.option.benchmark_compare_fail = None
    if not config.option.benchmark_compare:
        config.option.benchmark_quiet = True


class MachineInfo:
    """Tells pytest-benchmark of a session's GPUs."""

    def __init__(self, session: BenchSession) -> None:
        self.session = session

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, config: pytest.Config, machine_info: dict[str, Any]) -> None:
        """GPUs and driver for pytest-benchmark's own file, as they are known before anything was measured.

        It compares this with the stored one from the start: what differs between two runs has no place in it.
        """
        inventory = self.session.inventory
        if inventory is None:
            return
        from joulemark.environment import gpu_facts

        gpus = [{**gpu_facts(gpu), "uuid": shown(gpu.uuid, self.session.options)} for gpu in inventory.gpus]
        driver, cuda_driver = inventory.driver, inventory.cuda_driver
        machine_info["joulemark"] = {"gpus": gpus, "driver": driver, "cuda_driver": cuda_driver}
