"""What the pages say can be typed, can be typed; what they link to is there."""

from __future__ import annotations

import glob
import re
import shlex
from pathlib import Path

import pytest

from joulemark.cli import _parser, main
from joulemark.plugin import options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCH_OPTIONS = {"--bench", "--bench-report", *(f"--bench-{name}" for name in (*options._HELP, *options._FLAGS))}


def commands(page):
    """The commands in a page's blocks, without prompt, variables, comment and what ``…`` stands for."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in (text for language, text in blocks if language in ("", "sh")):
        for line in block.splitlines():
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*((?:joulemark|pytest --bench|python \S+\.py)\b.*)", line)
            if found:
                yield [word for word in shlex.split(found.group(1), comments=True) if "…" not in word]


COMMANDS = [(page.name, command) for page in PAGES for command in commands(page)]


def test_there_are_commands_of_each_kind():
    assert {command[0] for _, command in COMMANDS} == {"joulemark", "pytest", "python"}
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda one: one if isinstance(one, str) else one[0])
def test_a_documented_command_is_one(page, command):
    if command[0] == "joulemark":
        assert _parser().parse_args(command[1:]).run
    elif command[0] == "python":
        assert (ROOT / command[1]).is_file()
    else:
        given = {word.partition("=")[0] for word in command if word.startswith("--bench")}
        assert given <= BENCH_OPTIONS
        assert all((ROOT / word).exists() for word in command if word.startswith("bench_"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for path, _, anchor in (one.partition("#") for one in targets if not re.match(r"https?:", one)):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def anchors(page):
    """What GitHub makes of headings: lower case, without punctuation, blanks as hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


STORED = [
    command
    for name in ("regressions.md", "history.md")
    for command in commands(ROOT / "docs" / name)
    if command[:2] in (["joulemark", "compare"], ["joulemark", "history"])
    or (command[:2] == ["joulemark", "aa"] and "--processes" not in command)
]


@pytest.mark.parametrize("command", STORED, ids=" ".join)
def test_a_documented_command_on_stored_runs_runs(command, tmp_path, monkeypatch, capsys):
    """On the committed runs of an H200, in a folder where they stand as in the page."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "results").symlink_to(ROOT / "results")
    pair = sorted((ROOT / "results/nvidia-h200").glob("sweep-*.jsonl"))[:2]
    for name, stored in zip(("old.jsonl", "new.jsonl"), pair, strict=True):
        (tmp_path / name).symlink_to(stored)
    monkeypatch.chdir(tmp_path)
    words = [path for word in command[1:] for path in (sorted(glob.glob(word)) if "*" in word else [word])]
    assert main(words) in ((0, 3) if command[1] == "compare" else (0,))
    assert capsys.readouterr().out
    for word in words:
        if word.endswith(".html"):
            assert (tmp_path / word).read_text(encoding="utf-8").startswith("<!doctype html>")
