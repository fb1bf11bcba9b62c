import pytest

from joulemark.report.share_table import Share, share_text, table_of


def test_shares_stand_side_by_side_the_largest_part_first():
    shares = [
        Share("resnet50", "l2", 0.1, (0.08, 0.12), "nvidia-h200", "580.159.04", "b"),
        Share("resnet50", "hbm", 0.5, (0.45, 0.55), "nvidia-h200", "580.159.04", "b"),
        Share("resnet50", "hbm", 0.6, None, "nvidia-h200", "580.65.06", "c"),
        Share("lenet5", "static", None, None, "nvidia-a100", "580.65.06", "a"),
    ]
    table = table_of(shares, "where the energy goes")
    assert table.columns == ("workload", "gpu", "driver", "run", "hbm", "l2", "static")
    assert table.rows == (
        ("lenet5", "nvidia-a100", "580.65.06", "a", "n/a", "n/a", "n/a"),
        ("resnet50", "nvidia-h200", "580.65.06", "c", "60.0%", "n/a", "n/a"),
        ("resnet50", "nvidia-h200", "580.159.04", "b", "50.0% [45.0, 55.0]", "10.0% [8.0, 12.0]", "n/a"),
    )
    assert table.numeric == {4, 5, 6}
    assert table.notes == ("shares with 95% intervals",)


def test_a_part_that_stands_twice_is_a_mistake():
    with pytest.raises(ValueError, match="'hbm' stands twice for 'lenet5'"):
        table_of([Share("lenet5", "hbm", 0.5), Share("lenet5", "hbm", 0.4)], "")


def test_nothing_is_an_empty_table():
    assert table_of([], "none").rows == ()
    assert share_text(None) == share_text(Share("a", "b", None)) == "n/a"
