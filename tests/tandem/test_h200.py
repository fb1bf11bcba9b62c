"""The tandem of three models that is committed: what it is held to, and what its page says of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from joulemark.report import tandem_view

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "results" / "nvidia-h200" / "tandem.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "tandem.md").read_text(encoding="utf-8").splitlines()
MODELS = {"resnet50": "ResNet-50", "bert_base": "encoder", "lenet5": "LeNet-5"}
MODES = ("eager", "compile", "graph")
SERIES = {(one["workload"], one["mode"]): one for one in FOUND["series"] if one["input"] == "device"}


def exposed_table():
    """Exposed overhead of a step and its share, batches in turns; LeNet-5 has batch sizes of its own."""
    yield from head("batch", "ResNet-50", "encoder", "batch", "LeNet-5")
    for big, encoder, small in zip(*(batches_in_turns(model) for model in MODELS), strict=True):
        in_ms = (f"{1e3 * one['exposed_s']:.2f} ms, {percent(one['share'])}" for one in (big, encoder))
        in_us = f"{1e6 * small['exposed_s']:.0f} µs, {percent(small['share'])}"
        yield line(big["batch_size"], *in_ms, small["batch_size"], in_us)


def figures_table():
    yield from head("", *MODELS.values(), "held to")
    for mode in MODES:
        yield line(f"crossover, {mode}", *(SERIES[model, mode]["crossover"]["text"] for model in MODELS), "")
    title = "eager, largest exposed share from twice the crossover on; in turns"
    yield line(
        title, *(f"{percent(beyond(model))}; {percent(beyond_in_turns(model))}" for model in MODELS), "below 5 %"
    )
    yield line("issue time per operator in turns, furthest batch", *map(furthest, MODELS), "±10 %")
    ratios = (percent(under_graph(model)) for model in MODELS)
    yield line("exposed overhead under graph over eager's, batch 1", *ratios, "at most 20 %")


def head(*titles):
    return line(*titles), "|" + " --- |" * len(titles)


def line(*cells):
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in map(str, cells))


def percent(share, sign=""):
    return f"{100 * share:{sign}.1f} %"


def batches_in_turns(model):
    return SERIES[model, "eager"]["exposed_in_turns"]["batches"]


def beyond(model):
    """Largest exposed share from twice the crossover on."""
    return SERIES[model, "eager"]["exposed_from_twice_the_crossover"]["largest_share"]


def beyond_in_turns(model):
    from_batch = SERIES[model, "eager"]["exposed_from_twice_the_crossover"]["from_batch"]
    return max(one["share"] for one in batches_in_turns(model) if one["batch_size"] >= from_batch)


def furthest(model):
    even = SERIES[model, "eager"]["host_issue_per_operator_in_turns"]
    low, high = (f"{100 * end:+.1f}" for end in even["interval"])
    return f"{percent(even['largest_deviation'], '+')} [{low}, {high}] (batch {even['batch']})"


def under_graph(model):
    (found,) = (one for one in FOUND["against_eager"] if (one["workload"], one["mode"]) == (model, "graph"))
    assert found["batch_size"] == 1
    return found["ratio"]


@pytest.mark.parametrize("table", [exposed_table, figures_table])
def test_the_page_shows_the_tables_of_what_is_committed(table):
    told = list(table())
    assert told[0] in PAGE
    assert told == PAGE[PAGE.index(told[0]) :][: len(told)]


def test_the_command_of_the_page_names_the_runs_that_the_document_is_made_of():
    (text,) = (text for text in PAGE if text.endswith("--out results/nvidia-h200/tandem.json"))
    command = shlex.split(text)
    named = command[2 : command.index("--out")]
    assert sorted(path.name for one in named for path in ROOT.glob(one)) == [run["file"] for run in FOUND["runs"]]


def test_the_first_table_names_the_runs():
    text = "\n".join(next(iter(tandem_view.tables(FOUND))).notes)
    assert all(run["file"] in text for run in FOUND["runs"])


@pytest.mark.parametrize("model", MODELS)
def test_three_models_keep_what_they_are_held_to(model):
    assert all(len(SERIES[model, mode]["rows"]) == 8 for mode in MODES)
    assert max(beyond(model), beyond_in_turns(model)) < 0.05
    assert SERIES[model, "eager"]["host_issue_per_operator_in_turns"]["even"]
    assert under_graph(model) <= 0.2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_every_profile_has_its_distortion_and_all_its_kernels(model, mode):
    for one in SERIES[model, mode]["rows"]:
        assert one["metrics"]["profiler_distortion"]["value"] is not None
        assert one["kernels_reconciled"]


def test_exposed_overhead_rises_between_three_pairs_of_batches():
    told = {
        model: [
            (*one["batch_sizes"], one["where"], one["share_rises"])
            for one in SERIES[model, "eager"]["exposed_in_turns"]["rises"]
        ]
        for model in MODELS
    }
    assert told == {
        "resnet50": [(128, 256, "at the floor", False)],
        "bert_base": [],
        "lenet5": [(1, 64, "below the crossover", False), (16384, 32768, "at the floor", True)],
    }
