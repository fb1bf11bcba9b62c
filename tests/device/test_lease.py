"""Leases of GPUs: one session at a time, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from joulemark.device.gpu import Gpu
from joulemark.device.lease import FOLDER_VARIABLE, Claim, LeaseFolder, claim_of, join_lease
from joulemark.errors import ConfigurationError, DeviceError, GpuLeased

ONE = Claim("GPU-1", "NVIDIA H200", ("GPU-1",))
TWO = Claim("GPU-2", "NVIDIA H200", ("GPU-2",))

HOLD = """
import sys, time
from pathlib import Path
from joulemark.device.lease import Claim, LeaseFolder
lease = LeaseFolder(Path(sys.argv[1])).acquire([Claim(k, "NVIDIA H200", (k,)) for k in sys.argv[2:]], 0, print)
print(lease.pass_on(sys.argv[2])["JOULEMARK_WORKER_LEASE"], flush=True)
time.sleep(600)
"""

JOIN = """
import os, sys, time
from joulemark.device.lease import join_lease
join_lease(os.environ)
print("joined", flush=True)
time.sleep(600)
"""


def start(script, *args, **environment):
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def folder(tmp_path):
    return LeaseFolder(tmp_path / "leases")


def quiet(line):
    raise AssertionError(f"nobody waits here: {line}")


def test_another_session_is_refused_with_the_holders_name_and_its_death_frees_the_gpu(folder):
    other, _ = start(HOLD, str(folder.path), "GPU-1")
    try:
        began = time.time()
        with pytest.raises(GpuLeased) as refused:
            folder.acquire([ONE], 0, quiet)
        said = str(refused.value)
        holder = folder.holder("GPU-1")
        assert holder is not None
        assert holder.pid == other.pid
        assert abs(holder.started_utc - began) < 60
        assert f"NVIDIA H200 (GPU-1) is held by {holder.user} (pid {other.pid}, since 20" in said
        assert "--bench-lease wait" in said
        folder.acquire([TWO], 0, quiet).close()
    finally:
        end(other)
    folder.acquire([ONE], 0, quiet).close()
    assert folder.holder("GPU-1") is None


def test_waiting_tells_whom_it_waits_for_and_ends_with_the_holder(folder):
    first = folder.acquire([ONE], 0, quiet)
    said: list[str] = []
    threading.Timer(0.7, first.close).start()
    begin = time.monotonic()
    second = folder.acquire([ONE], 60, said.append)
    assert 0.6 < time.monotonic() - begin < 30
    assert len(said) == 1
    assert f"pid {os.getpid()}" in said[0]
    second.close()


def test_the_limit_of_waiting(folder):
    with_one = folder.acquire([ONE], 0, quiet)
    with pytest.raises(GpuLeased, match=r"waited 1 s"):
        folder.acquire([ONE], 1, lambda line: None)
    with_one.close()


def test_several_gpus_are_leased_all_at_once_or_not_at_all(folder):
    held = folder.acquire([TWO], 0, quiet)
    with pytest.raises(GpuLeased, match="GPU-2"):
        folder.acquire([ONE, TWO], 0, quiet)
    folder.acquire([ONE], 0, quiet).close()
    held.close()
    both = folder.acquire([ONE, TWO], 0, quiet)
    assert both.claims == (ONE, TWO)
    both.close()


def test_some_of_the_free_ones(folder):
    held = folder.acquire([ONE], 0, quiet)
    three = Claim("GPU-3", "NVIDIA H200", ("GPU-3",))

    def any_one(free, wanted):
        return free[:1] or None

    some = folder.acquire([ONE, TWO, three], 0, quiet, any_one)
    assert some.claims == (TWO,)
    folder.acquire([three], 0, quiet).close()
    some.close()
    held.close()


def test_two_sessions_that_want_the_same_gpus_in_another_order_both_get_them(folder):
    done: list[str] = []

    def session(name, claims):
        for _ in range(5):
            lease = folder.acquire(claims, 60, lambda line: None)
            time.sleep(0.02)
            lease.close()
        done.append(name)

    threads = [
        threading.Thread(target=session, args=("there", [ONE, TWO])),
        threading.Thread(target=session, args=("back", [TWO, ONE])),
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert sorted(done) == ["back", "there"]


def test_a_measuring_process_that_outlives_its_session_keeps_the_gpu(folder):
    session, handed = start(HOLD, str(folder.path), "GPU-1")
    child, said = start(JOIN, JOULEMARK_WORKER_LEASE=handed)
    try:
        assert said == "joined"
        os.kill(session.pid, signal.SIGKILL)
        session.wait()
        with pytest.raises(GpuLeased, match=f"pid {session.pid}"):
            folder.acquire([ONE], 0, quiet)
    finally:
        end(child)
        end(session)
    folder.acquire([ONE], 0, quiet).close()


def test_a_measuring_process_that_comes_too_late_does_not_measure(folder):
    session, handed = start(HOLD, str(folder.path), "GPU-1")
    end(session)
    lease = folder.acquire([ONE], 0, quiet)
    with pytest.raises(DeviceError, match="has ended with the session"):
        join_lease({"JOULEMARK_WORKER_LEASE": handed})
    lease.close()
    assert join_lease({}) == []


def test_several_measuring_processes_of_one_session(folder):
    lease = folder.acquire([ONE], 0, quiet)
    files = [*join_lease(lease.pass_on("GPU-1")), *join_lease(lease.pass_on("GPU-1"))]
    assert len(files) == 2
    for one in files:
        os.close(one)
    lease.close()


def test_who_measures_power_on_a_mig_instance_needs_the_board():
    board = Gpu("GPU-1", "NVIDIA H200", mig=True)
    instances = [Gpu(f"MIG-{n}", "NVIDIA H200 MIG 1g", parent_uuid="GPU-1") for n in (1, 2)]
    other = Gpu("GPU-2", "NVIDIA H200")
    gpus = [board, *instances, other]
    assert claim_of(other, gpus, power=True).keys == ("GPU-2",)
    assert claim_of(instances[0], gpus, power=False).keys == ("MIG-1",)
    assert set(claim_of(instances[0], gpus, power=True).keys) == {"GPU-1", "MIG-1", "MIG-2"}
    assert set(claim_of(board, gpus, power=False).keys) == {"GPU-1", "MIG-1", "MIG-2"}


def test_instances_of_one_board(folder):
    timing = [Claim(f"MIG-{n}", "1g", (f"MIG-{n}",)) for n in (1, 2)]
    power = [Claim(f"MIG-{n}", "1g", ("GPU-1", "MIG-1", "MIG-2")) for n in (1, 2)]
    first = folder.acquire([timing[0]], 0, quiet)
    folder.acquire([timing[1]], 0, quiet).close()
    with pytest.raises(GpuLeased):
        folder.acquire([power[1]], 0, quiet)
    first.close()
    folder.acquire(power, 0, quiet).close()  # one session measures on one after the other


def test_the_folder_is_for_all_users_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "of" / "all"))
    mask = os.umask(0o077)
    try:
        lease = LeaseFolder().acquire([ONE], 0, quiet)
    finally:
        os.umask(mask)
    assert lease.folder == tmp_path / "of" / "all"
    assert stat.S_IMODE(lease.folder.stat().st_mode) == 0o777
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in lease.folder.iterdir()}
    assert set(modes) == {"arbiter.lock", "GPU-1.lock", "GPU-1.users", "GPU-1.json"}
    assert set(modes.values()) == {0o666}
    assert set(json.loads((lease.folder / "GPU-1.json").read_text())) == {"user", "pid", "started_utc", "token"}
    lease.close()


def test_a_folder_that_exists_keeps_its_permissions(tmp_path):
    (tmp_path / "group").mkdir(mode=0o750)
    LeaseFolder(tmp_path / "group").acquire([ONE], 0, quiet).close()
    assert stat.S_IMODE((tmp_path / "group").stat().st_mode) == 0o750


@pytest.mark.parametrize("name", ["GPU-1.lock", "GPU-1.json", "arbiter.lock"])
def test_a_link_in_the_folder_leads_nowhere(folder, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.path.mkdir()
    (folder.path / name).symlink_to(victim)
    with pytest.raises(ConfigurationError, match="--bench-lease-dir"):
        folder.acquire([ONE], 0, quiet)
    assert victim.read_text() == "precious"


def test_a_folder_that_cannot_be_used_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file.*--bench-lease-dir, JOULEMARK_LEASE_DIR.*--bench-lease off"):
        LeaseFolder(tmp_path / "file").acquire([ONE], 0, quiet)


def test_a_name_that_cannot_be_read_is_no_obstacle(folder):
    held = folder.acquire([ONE], 0, quiet)
    (folder.path / "GPU-1.json").write_text("{")
    with pytest.raises(GpuLeased, match="a process that left no name"):
        folder.acquire([ONE], 0, quiet)
    held.close()


def test_the_measuring_process_of_several_ranks_shares_the_lease_of_all_their_gpus(folder):
    leases = folder.acquire([ONE, TWO], 0, quiet)
    files = join_lease(leases.pass_on("GPU-1", "GPU-2"))
    leases.close()
    try:
        for one in (ONE, TWO):
            with pytest.raises(GpuLeased):
                folder.acquire([one], 0, quiet)
    finally:
        for fd in files:
            os.close(fd)
