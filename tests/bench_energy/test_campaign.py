"""The script that spends a given time on a calibration and its workloads, with short commands in place of both."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from bench_energy import measure_workloads

SCRIPT = Path(__file__).parents[1] / "gpu" / "energy_campaign.py"


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("energy_campaign", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "energy_campaign", module)
    spec.loader.exec_module(module)
    for name, value in {"_GRACE_S": 0.5, "_COPY_S": 0.1}.items():
        monkeypatch.setattr(module, name, value)
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    return module


@pytest.fixture
def part(campaign, tmp_path):
    return lambda name, code, most_s=5.0, keep=0.0, least_s=0.3: _part(
        campaign, tmp_path / "work", name, code, (most_s, keep, least_s)
    )


def _part(campaign, work, name, code, times):
    """A part whose command writes a mark per start into its own file, then ends with ``code``."""
    path = work / f"{name}.txt"
    script = f"import sys, time; open({str(path)!r}, 'a').write('x'); print({name!r}, 'said'); {code}"
    return campaign.Part(name, (sys.executable, "-c", script), *times)


def starts(tmp_path, name):
    path = tmp_path / "work" / f"{name}.txt"
    return len(path.read_text()) if path.exists() else 0


def run(campaign, tmp_path, todo, limit_s=20.0):
    return campaign.Campaign(tmp_path / "work", tmp_path / "out", limit_s).run(tuple(todo))


def test_what_is_done_is_not_done_again_even_by_a_later_command(campaign, tmp_path, capsys, part):
    todo = [part("counts", "sys.exit(0)"), part("windows", "sys.exit(0)")]
    assert run(campaign, tmp_path, todo) == 0
    assert run(campaign, tmp_path, todo) == 0
    assert (starts(tmp_path, "counts"), starts(tmp_path, "windows")) == (1, 1)
    assert (tmp_path / "out" / "counts.log").read_text() == "counts said\n"
    assert "complete" in capsys.readouterr().out


def test_unfinished_parts_take_turns_while_there_is_time(campaign, tmp_path, part):
    half = "n = len(open({!r}).read()); sys.exit(0 if n == 2 else 3)"
    first = part("windows", half.format(str(tmp_path / "work" / "windows.txt")))
    assert run(campaign, tmp_path, [first, part("counts", "sys.exit(0)")]) == 0
    assert (starts(tmp_path, "windows"), starts(tmp_path, "counts")) == (2, 1)


def test_a_part_that_dies_is_started_again_and_then_left(campaign, tmp_path, capsys, part):
    assert run(campaign, tmp_path, [part("workloads", "sys.exit(4)")]) == 3
    assert starts(tmp_path, "workloads") == campaign._STARTS
    assert "left: workloads" in capsys.readouterr().out


def test_wrong_use_is_not_tried_again(campaign, tmp_path, part):
    assert run(campaign, tmp_path, [part("workloads", "sys.exit(2)")]) == 3
    assert starts(tmp_path, "workloads") == 1


def test_a_part_that_overruns_is_killed_and_costs_no_other_its_turn(campaign, tmp_path, capsys, part):
    slow, quick = part("slow", "time.sleep(60)", 0.5), part("quick", "sys.exit(0)")
    assert run(campaign, tmp_path, [slow, quick], 6.0) == 3
    assert starts(tmp_path, "quick") == 1
    assert "slow: exit -9" in capsys.readouterr().out


def test_a_share_of_a_turn_is_kept_for_counters(campaign, tmp_path, part):
    seen = part("workloads", "open({!r}, 'w').write(' '.join(sys.argv[1:]))".format(str(tmp_path / "argv")), 8.0, 0.25)
    assert run(campaign, tmp_path, [seen]) == 0
    assert (tmp_path / "argv").read_text() == "--limit 8 --keep 2"


def test_a_turn_too_short_for_a_part_is_left_to_the_others(campaign, tmp_path, part, capsys):
    long, short = part("workloads", "sys.exit(0)", least_s=50.0), part("windows", "sys.exit(0)")
    assert run(campaign, tmp_path, [long, short]) == 3
    assert (starts(tmp_path, "workloads"), starts(tmp_path, "windows")) == (0, 1)
    assert "left: workloads" in capsys.readouterr().out


def test_the_commands_are_those_of_the_product(campaign, tmp_path):
    todo = campaign.parts(tmp_path, 1.8)
    assert [one.name for one in todo] == ["lines", "counts", *["workloads"] * 5, "splits", "windows"]
    assert all("--resume" in one.command for one in todo if "calibrate" in one.command)
    for one in (todo[2], todo[-2]):
        measure_workloads.parser().parse_args([*one.command[2:], "--limit", "100", "--keep", "40"])
    assert all(str(tmp_path) in " ".join(one.command) for one in todo)


def main_of(campaign, monkeypatch, tmp_path, *more):
    monkeypatch.setattr(sys, "argv", ["energy_campaign.py", str(tmp_path / "out"), *more])
    monkeypatch.setattr(campaign, "parts", lambda work, window: (campaign.Part("one", ("true",), 5.0, 0.0, 0.3),))
    return campaign.main()


def test_files_grow_outside_the_checkout(campaign, monkeypatch, tmp_path, capsys):
    assert campaign.ROOT not in campaign.WORK.parents
    with pytest.raises(SystemExit):
        main_of(campaign, monkeypatch, tmp_path, "--work", str(campaign.ROOT / "work"))
    assert "may be replaced" in capsys.readouterr().err


def test_a_new_campaign_clears_the_old_ones_files_and_no_others(campaign, monkeypatch, tmp_path):
    work = tmp_path / "work"
    for name in ("windows.log", "nvidia-h200.json", "done.txt", "mine.txt"):
        (work / name).write_text("old")
    assert main_of(campaign, monkeypatch, tmp_path, "--work", str(work), "--limit", "15") == 0
    assert (work / "mine.txt").exists()
    assert not (work / "nvidia-h200.json").exists()
    (work / "nvidia-h200.json").write_text("new")
    assert main_of(campaign, monkeypatch, tmp_path, "--work", str(work), "--limit", "15", "--resume") == 0
    assert (tmp_path / "out" / "nvidia-h200.json").read_text() == "new"


def test_files_that_are_being_written_are_not_copied(campaign, tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    for folder in (work, out):
        folder.mkdir(exist_ok=True)
    for name in ("nvidia-h200.json", ".nvidia-h200.json.k3x", "energy-measurements.json.part"):
        (work / name).touch()
    (work / ".nvidia-h200.json.gone").symlink_to(work / "it has its name by now")
    campaign.copy(work, out)
    assert [path.name for path in out.iterdir()] == ["nvidia-h200.json"]
