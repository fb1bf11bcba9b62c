import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from joulemark.errors import ConfigurationError
from joulemark.history.runs import Figures, PastRun, Source
from joulemark.history.trend import trend_of
from joulemark.records import Case
from joulemark.report import history_html, markdown, terminal
from joulemark.report.history_view import document, meaning, notes_of, problems_of, tables_of
from joulemark.report.jsonout import dumps
from tests.history.simulated import DRIVERS, drivers_by_run, levels

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/history.schema.json").read_text())
HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[31mred",
    "a|b`c`",
    '"><svg onload=x>',
    "\u202egnp",
    "{{ 7*7 }}",
    "lone \ud800",
]


@pytest.fixture
def make_trend():
    def make(
        rows=4, runs=60, updates=(30,), shifts=((30, 1.06, 1.0),), metric="device_time_s", name=None, drivers=None
    ):
        times = levels(np.random.default_rng(1), rows, runs, shifts)
        past = [
            PastRun(f"{name or 'run'}-{at}.jsonl", f"{at:032x}", 1.7e9 + at * 86400, driver, {"driver": driver})
            for at, driver in enumerate(drivers or drivers_by_run(runs, updates))
        ]
        cases = tuple(Case(name or f"model{row}", batch_size=2**row) for row in range(rows))
        return trend_of(Figures(metric, tuple(past), cases, times))

    return make


@pytest.mark.parametrize(
    "changes", [{}, {"shifts": ()}, {"runs": 4, "updates": (), "shifts": ()}, {"runs": 1, "updates": (2,)}]
)
def test_the_document_is_as_its_schema_says(make_trend, changes):
    sources = [Source("a.jsonl"), Source("b.jsonl", "b.jsonl is empty"), Source("c.jsonl", None, ("line 3: cut off",))]
    found = json.loads(dumps(document(make_trend(**changes), sources)), parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert [one["error"] for one in found["files"]] == [None, "b.jsonl is empty", None]


def test_the_gpu_of_most_cases_is_said_once(make_trend):
    trend = make_trend()
    gpus = ("nvidia-h200", "nvidia-h200", "nvidia-a100", "nvidia-h200")
    cases = [replace(case, gpu_model=gpu) for case, gpu in zip(trend.figures.cases, gpus, strict=True)]
    levels = tables_of(replace(trend, figures=replace(trend.figures, cases=tuple(cases))))[0]
    assert levels.title.endswith("nvidia-h200 unless another is named")
    assert sorted(row[0] for row in levels.rows) == ["model0-b1", "model1-b2", "model2-b4-nvidia-a100", "model3-b8"]


def test_the_document_tells_all_of_a_change(make_trend):
    (change,) = document(make_trend(), [])["changes"]
    assert (change["run"], change["path"], change["meaning"]) == (30, "run-30.jsonl", "worse")
    assert change["driver"] == {"before": DRIVERS[0], "after": DRIVERS[1]}
    assert change["ratio"]["interval"][0] < 1.06 < change["ratio"]["interval"][1]
    assert len(change["rows"]) == 4


@pytest.mark.parametrize(
    ("metric", "ratio", "says"),
    [
        ("device_time_s", 0.9, "better"),
        ("throughput_per_s", 0.9, "worse"),
        ("power_w", 0.9, "down"),
        ("power_w", 1.1, "up"),
    ],
)
def test_better_and_worse_are_the_metrics_own(make_trend, metric, ratio, says):
    trend = make_trend(metric=metric, shifts=((30, ratio, 1.0),))
    assert meaning(trend, trend.changes[0]) == says


def test_tables_show_levels_changes_and_rows(make_trend):
    text = terminal.render(tables_of(make_trend()), 160)
    assert re.search(rf"{DRIVERS[0]} \(30 runs\).*{DRIVERS[1]} \(30 runs\).*{DRIVERS[1]} / previous", text)
    assert re.search(
        rf"1 +run-30\.jsonl +2023-12-14 22:13 +{DRIVERS[0]} +{DRIVERS[1]} +4 of 4 +1\.06\d \[.*worse", text
    )
    assert "chance of at most 0.01" in text
    assert "change 1: rows that changed most" in text


def test_few_runs_are_said_to_be_few(make_trend):
    trend = make_trend(runs=5, updates=(3,), shifts=())
    text = terminal.render(tables_of(trend), 160)
    assert f"5 runs: it takes {trend.runs_needed} to show a change" in text
    assert "no changes of device time" in text


def test_cases_that_few_runs_hold_are_counted(make_trend):
    whole = make_trend(shifts=()).figures
    values = whole.values.copy()
    values[0, 10:] = values[1, :50] = np.nan
    trend = trend_of(replace(whole, values=values))
    assert trend.runs_needed == 11
    said = "2 of 4 cases are in fewer than 11 runs: what changes in one of them alone cannot be shown"
    assert said in notes_of(trend)
    assert not any("fewer than" in note for note in notes_of(trend_of(whole)))


def test_problems_name_their_files():
    sources = [Source("a.jsonl"), Source("b.jsonl", "b.jsonl is empty"), Source("c.jsonl", None, ("line 3: cut off",))]
    assert problems_of(sources) == ["left out: b.jsonl is empty", "c.jsonl: line 3: cut off"]


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]


@pytest.mark.parametrize("name", HOSTILE)
def test_text_from_outside_is_text(make_trend, name):
    trend = make_trend(rows=1, name=name, drivers=[name] * 30 + ["1"] * 30)
    sources = [Source(name, name), Source(name, None, (name,))]
    page = history_html.render(trend, sources)
    parsed = Elements()
    parsed.feed(page)
    assert not {"script", "img", "a", "iframe", "object"} & set(parsed.tags)
    assert not [one for one in parsed.attributes if one.startswith("on")]
    assert parsed.tags.count("svg") == 1
    assert "49" not in re.findall(r"<h1>.*?</h1>|<figcaption>.*?</figcaption>", page)[1]
    for text in (page, markdown.render(tables_of(trend)), terminal.render(tables_of(trend), 120)):
        assert not any(char in text for char in "\x1b\u202e\ud800")
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(dumps(document(trend, sources))))


def test_the_page_stands_alone_and_draws_every_run(make_trend):
    page = history_html.render(make_trend(rows=3), [])
    assert not re.search(r"(src|href)=|url\(|@import", page)
    paths = re.findall(r'class="dots" d="([^"]+)"', page)
    assert len(paths) == 4  # all together, and each row
    assert all(path.count("h0") == 60 for path in paths)
    assert page.count('<line class="change"') == 4
    assert page.count('<line class="driver"') == 2 * 4
    assert DRIVERS[0] in page
    numbers = [float(one) for path in paths for one in re.findall(r"[\d.]+", path.replace("h0", ""))]
    assert max(numbers) <= 960
    assert min(numbers) >= 0


def test_dots_beyond_the_axis_are_counted(make_trend):
    trend = make_trend(rows=1, runs=200, updates=(), shifts=())
    trend.figures.values[0] = np.linspace(1, 1.01, 200)
    trend.figures.values[0, 7] = 50
    charts = history_html.charts_of(trend)
    assert [chart.beyond for chart in charts] == [1]


@pytest.mark.parametrize("name", ["page", "page.md", "folder.html"])
def test_only_a_page_is_written(tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigurationError, match=r"no name of an HTML file.*: use a name that ends in \.html"):
        history_html.check_path(tmp_path / name)


def test_without_jinja2_the_page_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"needs jinja2.*pip install joulemark\[html\]"):
        history_html.check_path(tmp_path / "page.html")


def test_rows_that_say_something_stand_before_those_that_do_not(make_trend):
    """A row is measured under both drivers, another one twice under the newer one, a third once."""
    trend = make_trend(rows=3, runs=4, updates=(2,), shifts=())
    times = trend.figures.values.copy()
    times[0, :3] = np.nan
    times[1, :2] = np.nan
    table = tables_of(trend_of(replace(trend.figures, values=times)))[0]
    assert [row[0].split("-")[0] for row in table.rows] == ["model2", "model1", "model0"]


@pytest.mark.parametrize(("count", "says"), [(1, "1 figure ("), (2, "2 figures (")])
def test_flagged_figures_and_copies_are_counted_in_words(make_trend, count, says):
    trend = make_trend(runs=4, updates=(), shifts=())
    notes = notes_of(replace(trend, figures=replace(trend.figures, flagged=count, copies=count)))
    assert any(one.startswith(f"flagged in their runs, and counted here: {says}") for one in notes)
    assert f"in several files, and counted once: {count} run{'s' * (count > 1)}" in notes
