"""The script that spends a given time on a calibration and its workloads, with short commands in place of both."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "energy_campaign.py"


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("energy_campaign", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "energy_campaign", module)
    spec.loader.exec_module(module)
    for name, value in {"WORK": tmp_path / "work", "_GRACE_S": 0.5, "_LEAST_S": 0.3, "_COPY_S": 0.1}.items():
        monkeypatch.setattr(module, name, value)
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    return module


def part(campaign, name, code, most_s=5.0):
    """A part whose command writes a mark per start into its own file, then ends with ``code``."""
    path = campaign.WORK / f"{name}.txt"
    script = f"import sys, time; open({str(path)!r}, 'a').write('x'); print({name!r}, 'said'); {code}"
    return campaign.Part(name, (sys.executable, "-c", script), most_s)


def starts(campaign, name):
    path = campaign.WORK / f"{name}.txt"
    return len(path.read_text()) if path.exists() else 0


def run(campaign, tmp_path, todo, limit_s=20.0):
    return campaign.Campaign(tmp_path / "out", limit_s).run(tuple(todo))


def test_what_is_done_is_not_done_again_even_by_a_later_command(campaign, tmp_path, capsys):
    todo = [part(campaign, "counts", "sys.exit(0)"), part(campaign, "windows", "sys.exit(0)")]
    assert run(campaign, tmp_path, todo) == 0
    assert run(campaign, tmp_path, todo) == 0
    assert (starts(campaign, "counts"), starts(campaign, "windows")) == (1, 1)
    assert (tmp_path / "out" / "counts.log").read_text() == "counts said\n"
    assert "complete" in capsys.readouterr().out


def test_unfinished_parts_take_turns_while_there_is_time(campaign, tmp_path):
    half = "n = len(open({!r}).read()); sys.exit(0 if n == 2 else 3)"
    first = part(campaign, "windows", half.format(str(campaign.WORK / "windows.txt")))
    assert run(campaign, tmp_path, [first, part(campaign, "counts", "sys.exit(0)")]) == 0
    assert (starts(campaign, "windows"), starts(campaign, "counts")) == (2, 1)


def test_a_part_that_dies_is_started_again_and_then_left(campaign, tmp_path, capsys):
    assert run(campaign, tmp_path, [part(campaign, "workloads", "sys.exit(4)")]) == 3
    assert starts(campaign, "workloads") == 3
    assert "left: workloads" in capsys.readouterr().out


def test_wrong_use_is_not_tried_again(campaign, tmp_path):
    assert run(campaign, tmp_path, [part(campaign, "workloads", "sys.exit(2)")]) == 3
    assert starts(campaign, "workloads") == 1


def test_a_part_that_overruns_is_killed_and_costs_no_other_its_turn(campaign, tmp_path, capsys):
    slow, quick = part(campaign, "slow", "time.sleep(60)", 0.5), part(campaign, "quick", "sys.exit(0)")
    assert run(campaign, tmp_path, [slow, quick], 6.0) == 3
    assert starts(campaign, "quick") == 1
    assert "slow: exit -9" in capsys.readouterr().out


def test_the_commands_are_those_of_the_product(campaign):
    names = [one.name for one in campaign.parts(2.3)]
    assert names == ["windows", "counts", "workloads", "windows"]
    assert all("--resume" in one.command for one in campaign.parts(2.3) if "calibrate" in one.command)
