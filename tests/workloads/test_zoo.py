"""The zoo by name, and its models by their published sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from joulemark.errors import ConfigurationError, Unsupported
from joulemark.records import Case
from joulemark.workloads import zoo
from joulemark.workloads.base import Workload

torch = pytest.importorskip("torch")

PARAMETERS = {
    "lenet5": 61_706,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "efficientnet_b0": 5_288_548,
    "convnext_tiny": 28_589_128,
    "drn_26": 21_126_584,
    "darknet_53": 41_609_928,
    "inception_v4": 42_679_816,
    "resnet3d_34": 63_718_736,
    "unet": 31_037_698,
    "deepcam": 40_809_955,
    "vit_b_16": 86_567_656,
    "bert_base": 109_483_778,
    "gpt2_small": 124_439_808,
}


def test_names_and_phases_need_no_torch():
    code = (
        "import sys; from joulemark.workloads import zoo, loader; "
        "[zoo.find(n) and zoo.phases(n) and zoo.takes_images(n) for n in zoo.names()]; loader.check('json:loads'); "
        "assert not {'torch', 'torchvision', 'numpy'} & set(sys.modules), 'heavy modules were imported'"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_model_is_a_workload_of_its_name():
    assert set(zoo.names()) == set(PARAMETERS)
    for name in zoo.names():
        workload = zoo.find(name)
        assert isinstance(workload, Workload)
        assert workload.name == name
        assert workload.phases == zoo.phases(name)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("resnet-50", "resnet50"),
        ("ResNet_18", "resnet18"),
        ("vit_b16", "vit_b_16"),
        ("ViT-B/16", "vit_b_16"),
        ("mobilenetv2", "mobilenet_v2"),
        ("VGG-16", "vgg16"),
        ("LeNet-5", "lenet5"),
        ("bert-base-uncased", "bert_base"),
        ("gpt2", "gpt2_small"),
        ("gpt2-small", "gpt2_small"),
    ],
)
def test_common_spellings_resolve(given, name):
    assert zoo.canonical(given) == name
    assert zoo.find(given).name == name


def test_an_unknown_name_lists_close_matches_and_the_zoo():
    with pytest.raises(ConfigurationError, match="'resnet5O'") as caught:
        zoo.find("resnet5O")
    assert "did you mean resnet50" in caught.value.remedy
    assert all(name in caught.value.remedy for name in zoo.names())
    with pytest.raises(ConfigurationError) as caught:
        zoo.phases("xyzzy")
    assert "did you mean" not in caught.value.remedy


def test_images_and_phases():
    assert [name for name in zoo.names() if not zoo.takes_images(name)] == ["resnet3d_34", "bert_base", "gpt2_small"]
    assert zoo.phases("gpt2") == ("prefill", "decode", "train")
    assert zoo.phases("resnet50") == ("inference", "train")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = zoo.find(name).spec.model()
    assert sum(one.numel() for one in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "phase", "shape", "items", "unit"),
    [
        ("lenet5", "inference", (2, 10), 2, "images"),
        ("resnet18", "inference", (2, 1000), 2, "images"),
        ("resnet50", "inference", (2, 1000), 2, "images"),
        ("vgg16", "inference", (2, 1000), 2, "images"),
        ("mobilenet_v2", "inference", (2, 1000), 2, "images"),
        ("vit_b_16", "inference", (2, 1000), 2, "images"),
        ("bert_base", "inference", (2, 2), 2 * 128, "tokens"),
        ("gpt2_small", "prefill", (2, 50257), 2 * 512, "tokens"),
        ("gpt2_small", "decode", (2, 50257), 2, "tokens"),
    ],
)
def test_a_forward_step_of_every_model(name, phase, shape, items, unit):
    case = Case(name, phase=phase, mode="eager", dtype="bf16", batch_size=2)
    step = zoo.find(name).build(case, "cpu")
    output = step.run()
    assert output.shape == shape
    assert output.dtype == torch.bfloat16
    assert output.isfinite().all()
    assert 1e-3 < output.float().std() < 1e3, "activations neither vanish nor explode"
    assert (step.items, step.unit) == (items, unit)


def test_a_broken_torchvision_is_a_skip_with_its_cause(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(Unsupported, match=r"resnet18 comes from torchvision.*ModuleNotFoundError") as caught:
        zoo.find("resnet18").build(Case("resnet18", phase="inference"), "cpu")
    assert isinstance(caught.value.__cause__, ImportError)
    assert zoo.find("lenet5").build(Case("lenet5", phase="inference"), "cpu").run().shape == (1, 10)
