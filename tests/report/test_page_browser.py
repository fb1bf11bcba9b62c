"""The HTML report in a real browser: it draws, sorts and filters, asks for nothing, and fits a phone."""

from __future__ import annotations

import pytest

from joulemark.report import documents, page, render
from joulemark.report.evidence import gather
from tests.report import chromium
from tests.report.many import many_records
from tests.report.test_page import H200, HOSTILE, sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.executable() is None, reason="no Chromium is installed (apt-get install chromium)"),
]
LIMIT = 3_000_000
"""Bytes of the committed results' page."""
ROWS = "[...document.querySelectorAll('#table tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
SMALL = """[...document.querySelectorAll('.plot svg')].filter(svg => {
  const box = svg.getBoundingClientRect(); return !(box.width > 100 && box.height > 60); }).length"""
TYPE = """(async () => { const box = document.getElementById('search'); box.value = %r;
  box.dispatchEvent(new Event('input')); await new Promise(done => setTimeout(done, 300)); })()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with chromium.browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    runs, found, _ = documents.read_all([H200])
    path = tmp_path_factory.mktemp("page") / "h200.html"
    path.write_text(page.render(gather(runs, found)), encoding="utf-8")
    return path


@pytest.fixture
def opened(tab, committed):
    tab.errors.clear()
    tab.requests.clear()
    tab.open(committed)
    return tab


def test_the_page_of_the_committed_results_is_whole_and_asks_for_nothing(opened, committed):
    assert committed.stat().st_size <= LIMIT
    assert opened.run("document.querySelectorAll('.plot svg').length") > 40
    assert opened.run(SMALL) == 0
    opened.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.errors == []
    assert opened.requests == [committed.resolve().as_uri()]


@pytest.mark.parametrize("dark", [False, True])
def test_the_four_answers_stand_in_the_first_screen(opened, committed, dark):
    for width, height in ((1280, 800), (390, 844)):
        opened.dark(dark)
        opened.open(committed, width, height)
        card = opened.run(
            "(() => { const card = document.querySelector('.card'); return {text: card.innerText, "
            "bottom: card.getBoundingClientRect().bottom, wide: document.documentElement.scrollWidth}; })()"
        )
        assert card["text"].startswith("resnet50 train")
        assert card["bottom"] <= height
        assert card["wide"] <= width
        assert card["text"].count("?") == 4
        assert "From batch" in card["text"]


def test_text_can_be_read_on_its_ground_in_both_schemes(opened, committed):
    """Contrast of verdicts, text and captions against their card, by WCAG's formula: at least 4.5."""
    measure = """(() => {
      const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b; };
      const ground = light(getComputedStyle(document.querySelector('.card')).backgroundColor);
      return [...document.querySelectorAll('.verdict, .answer p, figcaption, .plot text, .tier')].map(one => {
        const style = getComputedStyle(one), ink = light(one.closest('svg') ? style.fill : style.color);
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05); }).reduce((a, b) => Math.min(a, b));
    })()"""
    for dark in (False, True):
        opened.dark(dark)
        opened.open(committed)
        assert opened.run(measure) >= 4.5


def test_the_table_sorts_by_number_and_keeps_what_is_missing_last(opened):
    titles = opened.run("[...document.querySelectorAll('#table th button')].map(one => one.textContent)")
    column = titles.index("energy/item")
    click = f"document.querySelectorAll('#table th button')[{column}].click()"
    cells = f"{ROWS}.map(row => row[{column}])"
    scale = {"J": 1, "mJ": 1e-3, "µJ": 1e-6}

    def joules(texts):
        return [float(number) * scale[unit] for number, unit, *_ in (text.split() for text in texts if text != "n/a")]

    opened.run(click)
    rising = joules(opened.run(cells))
    assert len(rising) == 60
    assert rising == sorted(rising)
    assert opened.run(f"document.querySelectorAll('#table th')[{column}].getAttribute('aria-sort')") == "ascending"
    opened.run(click)
    falling = joules(opened.run(cells))
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > rising[0]
    opened.run("for (let i = 0; i < 5; i++) document.getElementById('more').click()")
    texts = opened.run(cells)
    first_missing = texts.index("n/a")
    assert set(texts[first_missing:]) == {"n/a"}


def test_the_table_filters_by_words_and_by_menus(opened):
    everything = opened.run("document.getElementById('count').textContent")
    opened.run(TYPE % "resnet50 TRAIN fp32")
    rows = opened.run(ROWS)
    assert len(rows) == 8
    assert all({"resnet50", "train", "fp32"} <= set(row) for row in rows)
    opened.run(TYPE % "no such thing")
    assert opened.run(ROWS) == []
    opened.run(TYPE % "")
    assert opened.run("document.getElementById('count').textContent") == everything
    opened.run("""(() => { const menu = [...document.querySelectorAll('#menus select')].find(one =>
      one.getAttribute('aria-label') === 'mode'); menu.selectedIndex = [...menu.options].findIndex(one =>
      one.text === 'graph'); menu.dispatchEvent(new Event('change')); })()""")
    assert all("graph" in row for row in opened.run(ROWS))
    assert "of" in opened.run("document.getElementById('count').textContent")


def test_a_row_tells_its_findings_and_closes_again(opened):
    opened.run(TYPE % "flagged")
    opened.run("document.querySelector('#table tbody tr').click()")
    assert len(opened.run("document.querySelector('.details').textContent")) > 20
    opened.run("document.querySelector('#table tbody tr').click()")
    assert opened.run("document.querySelector('.details')") is None


def test_one_workload_can_be_looked_at_alone(opened):
    opened.run(
        "(() => { const only = document.getElementById('only'); only.value = 'vgg16-train'; "
        "only.dispatchEvent(new Event('change')); })()"
    )
    shown = opened.run("[...document.querySelectorAll('[data-workload]')].filter(one => one.offsetParent)"
                       ".map(one => one.dataset.workload)")  # fmt: skip
    assert set(shown) == {"vgg16-train"}
    assert len(shown) > 5


def test_hostile_names_do_nothing_in_a_browser(tab, make_record, make_run, tmp_path):
    records = [one for name in HOSTILE for one in sweep(make_record, workload=name, params={"tag": name})]
    path = tmp_path / "hostile.html"
    path.write_text(render([make_run(*records)], "html"), encoding="utf-8")
    tab.errors.clear()
    tab.requests.clear()
    for width in (1280, 390):
        tab.open(path, width, 800)
        assert tab.run("document.title").startswith("joulemark")
        assert tab.run("document.querySelectorAll('img').length") == 0
        assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.errors == []
    assert set(tab.requests) == {path.resolve().as_uri()}


def test_ten_thousand_records_stay_usable(tab, tmp_path):
    path = tmp_path / "many.html"
    path.write_text(render([many_records(10_000)], "html"), encoding="utf-8")
    tab.errors.clear()
    tab.open(path)
    spent = """(() => { const begin = performance.now(); %s; return performance.now() - begin; })()"""
    assert tab.run("document.getElementById('count').textContent") == "10000 of 10000 records"
    assert tab.run("document.querySelectorAll('*').length") < 30_000
    sort = "[...document.querySelectorAll('#table th button')].find(one => one.textContent === 'device time').click()"
    choose = """const menu = document.querySelector('#menus select'); menu.selectedIndex = 1;
      menu.dispatchEvent(new Event('change'))"""
    assert tab.run(spent % sort) < 2000
    assert tab.run(spent % choose) < 1000
    assert tab.errors == []
