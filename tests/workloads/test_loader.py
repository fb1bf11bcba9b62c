"""Users' own models: every shape of factory, and every way to get it wrong."""

from __future__ import annotations

import re
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from joulemark.errors import ConfigurationError, Unsupported  # noqa: E402
from joulemark.records import Case  # noqa: E402
from joulemark.workloads import loader  # noqa: E402
from joulemark.workloads.base import Workload  # noqa: E402

MODULE = """
import torch
from torch import nn
from joulemark.errors import Unsupported
from joulemark.workloads.base import Step
from joulemark.workloads.spec import ModelSpec
from joulemark.workloads.steps import TorchWorkload

calls = []


class Net(nn.Linear):
    def __init__(self):
        calls.append(len(calls))
        super().__init__(6, 4)


class Complete(Net):
    def example_inputs(self, batch_size):
        return torch.randn(batch_size, 6)


class Own:
    name = "whatever"
    phases = ("inference", "decode")

    def build(self, case, device):
        return Step(lambda: (case.phase, device), items=3)


def draw(batch_size, generator, device):
    return torch.randn(batch_size, 6, generator=generator, device=device)


def spec():
    return ModelSpec("mine", Net, draw, items_per_sample=6, unit="values")


def pair():
    return Net(), lambda batch_size: torch.randn(batch_size, 6)


def examples():
    return Net(), (torch.arange(1.0, 13.0).reshape(2, 6),)


def example():
    return Net(), torch.randn(1, 6)


def workload():
    return Own()


def torch_workload():
    return TorchWorkload(spec())


def bare():
    return Net()


def own_class():
    return Own


def number():
    return 42


def three():
    return Net(), 1, 2


def no_samples():
    return Net(), torch.randn(())


def bad_inputs():
    return Net(), "images"


def bad_draw():
    return Net(), lambda batch_size: {"x": 1}


def raises():
    raise ValueError("no checkpoint at /nowhere")


def skips():
    raise Unsupported("needs a bigger machine")


def out_of_memory():
    raise torch.OutOfMemoryError("too large")


constant = 3
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    """A project with a package ``mine_pkg`` in the working directory, which is not on ``sys.path``."""
    package = tmp_path / "mine_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "zoo.py").write_text(MODULE)
    (package / "broken.py").write_text("import a_package_that_nobody_has\n\ndef pair(): pass\n")
    (package / "failing.py").write_text("raise RuntimeError('half written')\n\ndef pair(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    yield tmp_path
    for name in [one for one in sys.modules if one.split(".")[0] in ("mine_pkg", "elsewhere")]:
        del sys.modules[name]


def case(name, **axes) -> Case:
    return Case(name, **({"phase": "inference", "batch_size": 5} | axes))


@pytest.mark.parametrize(
    ("factory", "unit"),
    [
        ("spec", "values"),
        ("torch_workload", "values"),
        ("pair", "samples"),
        ("examples", "samples"),
        ("example", "samples"),
        ("Complete", "samples"),
    ],
)
def test_each_shape_of_factory_gives_a_workload(factory, unit):
    name = f"mine_pkg.zoo:{factory}"
    workload = loader.load(name)
    assert isinstance(workload, Workload)
    assert workload.name == name
    assert workload.phases == ("inference", "train")
    step = workload.build(case(name), "cpu")
    assert step.run().shape == (5, 4)
    assert step.unit == unit
    assert step.items == (30 if unit == "values" else 5)


def test_a_pair_trains_without_a_loss_and_says_so():
    workload = loader.load("mine_pkg.zoo:pair")
    with pytest.warns(UserWarning, match="brings no loss"):
        step = workload.build(case("mine_pkg.zoo:pair", phase="train"), "cpu")
    assert float(step.run()) > 0


@pytest.mark.parametrize("factory", ["pair", "examples", "Complete"])
def test_own_inputs_come_through_a_data_loader_too(factory):
    name = f"mine_pkg.zoo:{factory}"
    step = loader.load(name).build(case(name, input="loader"), "cpu")
    assert step.run().shape == (5, 4)
    step.close()


def test_a_workload_of_ones_own_keeps_its_phases_and_gets_the_name():
    workload = loader.load("mine_pkg.zoo:workload")
    assert workload.name == "mine_pkg.zoo:workload"
    assert workload.phases == ("inference", "decode")
    step = workload.build(case("x", phase="decode"), "cpu")
    assert (step.run(), step.items) == (("decode", "cpu"), 3)


def test_example_inputs_are_repeated_up_to_the_batch():
    workload = loader.load("mine_pkg.zoo:examples")
    (drawn,) = workload.spec.inputs(5, torch.Generator(), "cpu")
    torch.testing.assert_close(drawn[:, 0], torch.tensor([1.0, 7.0, 1.0, 7.0, 1.0]))
    assert drawn.is_contiguous()


def test_every_case_gets_a_fresh_model_of_the_same_weights():
    name = "mine_pkg.zoo:pair"
    workload = loader.load(name)
    calls = sys.modules["mine_pkg.zoo"].calls
    assert len(calls) == 1
    first, second = (workload.spec.model() for _ in range(2))
    assert len(calls) == 2
    assert first is not second
    torch.testing.assert_close(first.weight, second.weight, rtol=0, atol=0)
    assert torch.equal(loader.load(name).spec.model().weight, first.weight)


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        ("resnet50", "'resnet50' names no factory", "pkg.mod:factory"),
        ("mine_pkg/zoo.py:pair", "'mine_pkg/zoo.py:pair' is not", "pkg.mod:factory"),
        ("mine_pkg.zoo:", "is not a module and a function", "pkg.mod:factory"),
        (":pair", "is not a module and a function", "pkg.mod:factory"),
        ("mine_pkg.zoo::pair", "is not a module and a function", "pkg.mod:factory"),
        ("nobody_has_this:f", "there is no module 'nobody_has_this'", "PYTHONPATH"),
        ("mine_pkg.zooo:pair", "there is no module 'mine_pkg.zooo'", "sys.path"),
        ("mine_pkg.zoo.deeper:pair", "there is no module 'mine_pkg.zoo.deeper'", "sys.path"),
        ("mine_pkg.zoo:pairs", "mine_pkg.zoo has no attribute 'pairs'", "did you mean pair"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(name, message, remedy):
    for look in (loader.check, loader.load):
        with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
            look(name)
        assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine_pkg.zoo:constant", "is a int, not a function"),
        ("mine_pkg.zoo:raises", "the factory raised ValueError: no checkpoint at /nowhere"),
        ("mine_pkg.zoo:number", "the factory returned a int"),
        ("mine_pkg.zoo:three", "the factory returned a tuple of (Net, int, int)"),
        ("mine_pkg.zoo:own_class", "the factory returned the class Own"),
        ("mine_pkg.zoo:bare", "Net has no method example_inputs(batch_size)"),
        ("mine_pkg.zoo:no_samples", "an example input has no samples (shapes [()])"),
        ("mine_pkg.zoo:bad_inputs", "inputs must be a tensor or a tuple of tensors, not str"),
        ("mine_pkg.broken:pair", "importing mine_pkg.broken raised ModuleNotFoundError"),
        ("mine_pkg.failing:pair", "importing mine_pkg.failing raised RuntimeError: half written"),
    ],
)
def test_a_factory_that_does_not_work_says_why(name, message):
    loader.check(name)
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        loader.load(name)
    assert name in caught.value.what
    assert caught.value.remedy


def test_the_users_own_exception_is_chained():
    with pytest.raises(ConfigurationError) as caught:
        loader.load("mine_pkg.zoo:raises")
    assert isinstance(caught.value.__cause__, ValueError)


def test_inputs_of_the_wrong_type_are_found_when_they_are_drawn():
    workload = loader.load("mine_pkg.zoo:bad_draw")
    with pytest.raises(ConfigurationError, match="a tuple of tensors, not dict"):
        workload.build(case("mine_pkg.zoo:bad_draw"), "cpu")


def test_a_skip_and_an_out_of_memory_pass_as_they_are():
    with pytest.raises(Unsupported, match="bigger machine"):
        loader.load("mine_pkg.zoo:skips")
    with pytest.raises(torch.OutOfMemoryError):
        loader.load("mine_pkg.zoo:out_of_memory")


def test_checking_imports_nothing(mine):
    loader.check("mine_pkg.zoo:pair")
    assert not [one for one in sys.modules if one.startswith("mine_pkg")]
    assert str(mine) in sys.path


def test_the_projects_root_is_searched_too(mine, tmp_path_factory, monkeypatch):
    root = tmp_path_factory.mktemp("project")
    (root / "elsewhere.py").write_text(
        textwrap.dedent("""
        import torch

        def factory():
            return torch.nn.Linear(3, 2), lambda batch_size: torch.randn(batch_size, 3)
        """)
    )
    with pytest.raises(ConfigurationError, match="no module 'elsewhere'"):
        loader.check("elsewhere:factory")
    loader.check("elsewhere:factory", root)
    assert loader.load("elsewhere:factory", root).build(case("e"), "cpu").run().shape == (5, 2)


def test_a_package_that_makes_up_its_submodules_is_found_by_importing_it(mine):
    (mine / "mine_pkg" / "__init__.py").write_text(
        "import sys, types\nfrom pathlib import Path\n__path__.append(str(Path(__file__).parent / 'hidden'))\n"
    )
    (mine / "mine_pkg" / "hidden").mkdir()
    (mine / "mine_pkg" / "hidden" / "inner.py").write_text("def factory(): return 1\n")
    loader.check("mine_pkg.inner:factory")
    with pytest.raises(ConfigurationError, match="returned a int"):
        loader.load("mine_pkg.inner:factory")


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import *",
        "def __getattr__(name): return print",
        "globals().update(factory=print)",
        "import sys\nsetattr(sys.modules[__name__], 'factory', print)",
        "def late():\n    global factory\n    factory = print\nlate()",
    ],
)
def test_names_that_do_not_stand_in_a_modules_text_are_left_to_importing_it(mine, text):
    (mine / "mine_pkg" / "made.py").write_text(text)
    loader.check("mine_pkg.made:factory")


@pytest.mark.parametrize(
    "text",
    [
        "async def factory(): pass",
        "class factory: pass",
        "import os.path as factory",
        "import factory.inner",
        "from os import path as factory",
        "first, (factory, *rest) = 1, (2, 3)",
        "factory: object = print",
        "(factory := print)",
        "with open(__file__) as factory: pass",
        "for factory in (print,): pass",
        "try:\n    import nothing\nexcept ImportError:\n    factory = print",
        "if True:\n    pass\nelse:\n    factory = print",
        "match 1:\n    case [*factory]: pass",
        "match 1:\n    case {**factory}: pass",
        "match 1:\n    case factory: pass",
    ],
)
def test_whatever_binds_a_name_in_a_modules_text_is_seen(mine, text):
    (mine / "mine_pkg" / "made.py").write_text(text)
    loader.check("mine_pkg.made:factory")
    with pytest.raises(ConfigurationError, match=r"has no attribute 'factories': did you mean factory"):
        loader.check("mine_pkg.made:factories")
    assert "mine_pkg.made" not in sys.modules


def test_names_of_functions_and_classes_are_not_the_modules(mine):
    (mine / "mine_pkg" / "made.py").write_text(
        "def outer():\n    inner = 1\n\nclass Outer:\n    def method(self): pass\n"
    )
    for name in ("inner", "method"):
        with pytest.raises(ConfigurationError, match=f"has no attribute '{name}'"):
            loader.check(f"mine_pkg.made:{name}")
    loader.check("mine_pkg.made:Outer.method")


def test_a_text_that_is_no_python_is_refused_unimported(mine):
    (mine / "mine_pkg" / "made.py").write_text("def factory(:\n")
    with pytest.raises(ConfigurationError, match=r"importing mine_pkg\.made raised SyntaxError"):
        loader.check("mine_pkg.made:factory")


def test_a_submodule_may_hold_the_factory(mine):
    loader.check("mine_pkg:zoo.pair")
    with pytest.raises(ConfigurationError, match="mine_pkg has no attribute 'zooo'"):
        loader.check("mine_pkg:zooo.pair")
