"""Rows of a comparison are told apart, also where there is little room."""

from joulemark.report.names import without_common_parts


def test_parts_that_all_keys_hold_are_said_once():
    keys = [
        "resnet50-train-bf16-b8-nvidia-h200",
        "resnet50-train-bf16-b64-nvidia-h200",
        "vgg16-train-bf16-b8-nvidia-h200",
    ]
    names, common = without_common_parts(keys)
    assert list(names.values()) == ["resnet50-b8", "resnet50-b64", "vgg16-b8"]
    assert common == "train-bf16-nvidia-h200"


def test_keys_that_would_become_equal_or_empty_stay_whole():
    assert without_common_parts(["a-b", "b-a"]) == ({"a-b": "a-b", "b-a": "b-a"}, "")
    assert without_common_parts(["a", "a-b"]) == ({"a": "a", "a-b": "a-b"}, "")
    assert without_common_parts(["a-b"]) == ({"a-b": "a-b"}, "")
