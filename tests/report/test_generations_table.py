from joulemark.report.generations_table import generations_table
from joulemark.report.tables import tables_of_run


def of_model(make_record, gpu, throughput, energy=None, **more):
    figures = {"throughput_per_s": throughput, "energy_per_item_j": energy}
    return make_record(gpu=gpu, figures={name: one for name, one in figures.items() if one is not None}, **more)


def rows_of(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_models_stand_against_the_first_with_bounds_combined(make_record, make_run):
    records = [
        of_model(make_record, "nvidia-a100", 1000.0, 0.2),
        of_model(make_record, "nvidia-h200", 2500.0, 0.1),
        of_model(make_record, "nvidia-l40s", 800.0),
        of_model(make_record, "nvidia-h200", 9.0, batch=64),
    ]
    table = tables_of_run(make_run(*records))[-1]
    first, second, third = rows_of(table)
    assert [row["gpu"] for row in (first, second, third)] == ["nvidia-a100", "nvidia-h200", "nvidia-l40s"]
    assert (first["speed / nvidia-a100"], first["energy / nvidia-a100"]) == ("1", "1")
    # 2500 ±1 % over 1000 ±1 %: 2475 / 1010 to 2525 / 990.
    assert second["speed / nvidia-a100"] == "2.5 [2.45, 2.55]"
    assert second["energy / nvidia-a100"] == "0.5 [0.49, 0.51]"
    assert third["speed / nvidia-a100"].startswith("0.8 ")
    assert (third["energy/item"], third["energy / nvidia-a100"]) == ("n/a", "n/a")


def test_a_case_that_the_first_model_lacks_has_no_ratio(make_record):
    records = [
        of_model(make_record, "a", 1.0),
        of_model(make_record, "b", 2.0),
        of_model(make_record, "b", 3.0, batch=64),
        of_model(make_record, "c", 4.0, batch=64),
    ]
    assert [row["speed / a"] for row in rows_of(generations_table(records))][2:] == ["n/a", "n/a"]


def test_one_model_or_no_figure_makes_no_table(make_record):
    assert generations_table([of_model(make_record, "a", 1.0), of_model(make_record, "a", 2.0, batch=64)]) is None
    failed = [of_model(make_record, gpu, 1.0, outcome="failed", reason="x") for gpu in ("a", "b")]
    assert generations_table(failed) is None
