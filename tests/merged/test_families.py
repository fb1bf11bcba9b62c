"""What families offer for the sequences that networks have; names tell kernels apart."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from functools import lru_cache

import pytest
import torch

from joulemark.merged import cache
from joulemark.merged.bricks import Parameters
from joulemark.merged.families import Problem, known_families, limits_of, offers
from joulemark.merged.kernels import Description, KernelError
from joulemark.merged.kernels.device_limits import Device
from joulemark.merged.sequence import Conv, Sequence
from tests.merged.fakes import RATES


def conv(inputs, outputs, kernel=3, stride=1, groups=1, d=2, **more):
    return Conv(inputs, outputs, (kernel,) * d, (stride,) * d, (kernel // 2,) * d, (1,) * d, groups, **more)


SEQUENCES = {
    "chain": (
        Sequence((conv(16, 16, activation="relu"),) * 3),
        (224, 224),
        {"chain", "stream", "stream_warpgroup", "memoized", "wide"},
    ),
    "volume": (
        Sequence((conv(16, 16, d=3, activation="relu"),) * 2),
        (64, 64, 64),
        {"chain", "planes", "planes_warpgroup"},
    ),
    "DarkNet's second block": (
        Sequence((conv(32, 64, activation="leaky", adds_behind=True),)),
        (112, 112),
        {"chain", "memoized", "stream"},
    ),
    "bottleneck that adds behind": (
        Sequence(
            (
                conv(256, 64, 1, activation="relu"),
                conv(64, 64, activation="relu"),
                conv(64, 256, 1, activation="relu", residual=0, adds_behind=True),
            )
        ),
        (56, 56),
        set(),
    ),
    "inverted residual that adds behind": (
        Sequence(
            (
                conv(24, 144, 1, activation="relu6"),
                conv(144, 144, groups=144, activation="relu6"),
                conv(144, 24, 1, activation="relu", residual=0, adds_behind=True),
            )
        ),
        (56, 56),
        set(),
    ),
    "inverted": (
        Sequence(
            (
                conv(24, 144, 1, activation="relu6"),
                conv(144, 144, stride=2, groups=144, activation="relu6"),
                conv(144, 32, 1),
            )
        ),
        (56, 56),
        {"inverted_residual", "inverted_residual_warpgroup"},
    ),
    "front of an inverted residual": (
        Sequence(
            (conv(40, 240, 1, activation="silu"), conv(240, 240, 5, stride=2, groups=240, activation="silu")),
        ),
        (28, 28),
        {"expand_depthwise"},
    ),
    "bottleneck": (
        Sequence(
            (
                conv(256, 64, 1, activation="relu"),
                conv(64, 64, activation="relu"),
                conv(64, 256, 1, activation="relu", residual=0),
            )
        ),
        (56, 56),
        {"bottleneck", "bottleneck_warpgroup"},
    ),
    "projected bottleneck": (
        Sequence(
            (
                conv(64, 64, 1, activation="relu"),
                conv(64, 64, activation="relu"),
                replace(conv(128, 256, 1, activation="relu"), joined=0),
            )
        ),
        (56, 56),
        {"bottleneck_warpgroup"},
    ),
    "joined without a halo": (
        Sequence((conv(16, 16, activation="relu"), replace(conv(32, 16, 1, activation="relu"), joined=0))),
        (56, 56),
        set(),
    ),
    "two wide layers": (
        Sequence((conv(64, 64, activation="relu"),) * 2),
        (56, 56),
        {"chain", "memoized", "stream", "wide"},
    ),
    "first layer": (
        Sequence((conv(3, 64, 7, stride=2, activation="relu"),)),
        (224, 224),
        {"stem_warpgroup"},
    ),
    "first layer of patches": (Sequence((conv(3, 96, 4, stride=4),)), (224, 224), set()),
    "first layer of volumes": (
        Sequence((Conv(3, 64, (7, 7, 7), (1, 2, 2), (3, 3, 3), (1, 1, 1), activation="relu"),)),
        (16, 112, 112),
        {"stem_warpgroup"},
    ),
    "too wide": (Sequence((conv(512, 512), conv(512, 512))), (14, 14), set()),
}


BATCH = 64


@lru_cache
def offered(name):
    """What families offer for a sequence; ranking takes tenths of a second."""
    sequence, size, _ = SEQUENCES[name]
    return offers(known_families(), Problem(Description(sequence, "bf16"), size, BATCH, Device()))


@pytest.mark.parametrize("name", SEQUENCES)
def test_who_offers_what(name):
    sequence, _, families = SEQUENCES[name]
    found = offered(name)
    assert {one.candidate.family for one in found} == families
    assert len({one.path for one in found}) == len(found)
    for one in found:
        assert one.candidate.shared <= Device().block_shared
        assert len(one.candidate.edge) == sequence.dimensions


def random_parameters(sequence):
    made = []
    for layer in sequence.layers:
        shape = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel)
        made.append(Parameters(0.1 * torch.randn(shape), torch.randn(layer.out_channels)))
    return made


@pytest.mark.parametrize("family", [one.name for one in known_families()])
def test_a_kernel_that_is_pickled_does_the_same(family):
    named = next(name for name, (_, _, families) in SEQUENCES.items() if family in families)
    sequence, size, _ = SEQUENCES[named]
    kernels = [one.kernel for one in offered(named) if one.candidate.family == family]
    parameters = random_parameters(sequence)
    for kernel in kernels:
        other = pickle.loads(pickle.dumps(kernel))
        assert other is not kernel
        assert other.text == kernel.text
        functions = {"pack", "scratch", "counts"}
        for one in fields(kernel):
            ours, theirs = getattr(kernel, one.name), getattr(other, one.name)
            assert (ours is None) == (theirs is None)
            assert one.name in functions or ours == theirs
        assert torch.equal(other.pack(parameters), kernel.pack(parameters))
        if kernel.scratch is not None:
            assert other.scratch(BATCH, size) == kernel.scratch(BATCH, size)
        if kernel.counts is not None:
            assert other.counts(size, BATCH, Device()) == kernel.counts(size, BATCH, Device())


def test_weights_that_fp16_loses_are_refused_by_a_pickled_kernel_too():
    kernels = [one.kernel for one in offered("inverted") if one.candidate.family == "inverted_residual_warpgroup"]
    kernel = next(one for one in kernels if one.plan["halves"])
    parameters = [replace(one, weight=1e6 * one.weight) for one in random_parameters(SEQUENCES["inverted"][0])]
    for one in (kernel, pickle.loads(pickle.dumps(kernel))):
        with pytest.raises(KernelError, match=f"{kernel.name} does not suit these weights"):
            one.pack(parameters)


def test_a_ranking_from_the_disk_is_of_the_texts_of_all_kernels(tmp_path, monkeypatch):
    """Families share what they are worked out by: one that no longer fits would be lost without a word."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    sequence, size, _ = SEQUENCES["volume"]
    problem = Problem(Description(sequence, "bf16"), size, 1, Device())
    chain = [one for one in known_families() if one.name == "chain"]
    ranked = [one.path for one in offers(chain, problem)]
    (kept,) = tmp_path.iterdir()
    kept.write_text("[]")
    assert offers(chain, problem) == []
    monkeypatch.setattr(cache, "code_key", lambda part="": f"other texts of {part}")
    assert [one.path for one in offers(chain, problem)] == ranked


def test_limits_are_those_of_the_rates():
    assert limits_of(None) == Device()
    assert limits_of(RATES).multiprocessors == RATES.multiprocessors
