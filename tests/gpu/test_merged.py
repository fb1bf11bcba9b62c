"""What of merging only a GPU can show: rates, paths of the library, variants of the whole, replays, the cache."""

from __future__ import annotations

import copy
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from torch import nn  # noqa: E402

from joulemark.merged import cache, merge, whole  # noqa: E402
from joulemark.merged.bricks import Parameters, channel_norm, run_plain  # noqa: E402
from joulemark.merged.compiling import compiled  # noqa: E402
from joulemark.merged.forks import Forked  # noqa: E402
from joulemark.merged.graph import trace  # noqa: E402
from joulemark.merged.joining import Joined  # noqa: E402
from joulemark.merged.norms import ChannelNorm  # noqa: E402
from joulemark.merged.paths import Executed, library_paths  # noqa: E402
from joulemark.merged.pooling import Pooling  # noqa: E402
from joulemark.merged.questions import relative_error  # noqa: E402
from joulemark.merged.rates import measure_rates  # noqa: E402
from joulemark.merged.replay import Chosen, Replayed, for_capture  # noqa: E402
from joulemark.merged.seams import FORMATS  # noqa: E402
from joulemark.merged.sequence import Conv, Sequence  # noqa: E402
from joulemark.merged.stopwatch import race, race_replays  # noqa: E402
from joulemark.merged.upsampling import Upsampling  # noqa: E402
from joulemark.merged_bench.subjects import condition, images  # noqa: E402
from joulemark.workloads.networks import InceptionV4, UNet  # noqa: E402
from joulemark.workloads.precision import set_fp32  # noqa: E402

# Importing the compiler warns of torch's own deprecated calls (torch 2.11).
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")

DEVICE = torch.device("cuda", torch.cuda.current_device())
LIMITS = {"bf16": 1e-2, "fp16": 5e-3, "tf32": 2e-3, "fp32": 1e-5}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(tmp_path_factory.mktemp("merged")))
        yield
    set_fp32(tf32=False)


def test_rates_are_those_of_a_gpu():
    rates = measure_rates(DEVICE)
    assert 1e11 < rates.dram_bytes_per_s < 2e13
    assert rates.l2_bytes_per_s > rates.dram_bytes_per_s
    assert rates.flop_per_s["bf16"] > rates.flop_per_s["fp32"] > 1e12
    assert rates.flop_per_s["tf32"] > rates.flop_per_s["fp32"]
    assert 1e-7 < rates.launch_s < 2e-5
    assert 1e-7 < rates.flag_s < 2e-5


def layer(inputs, outputs, kernel=3, stride=1, groups=1, d=2, **more):
    return Conv(inputs, outputs, (kernel,) * d, (stride,) * d, (kernel // 2,) * d, (1,) * d, groups, **more)


LAYERS = {
    "dense": layer(24, 40, activation="relu"),
    "residual": layer(32, 32, activation="relu", residual=0),
    "pointwise": layer(64, 96, 1, activation="relu"),
    "linear": layer(64, 96, 1),
    "depthwise": layer(72, 72, 5, 2, 72, activation="silu"),
    "leaky": layer(32, 64, 3, 2, activation="leaky"),
    "volume": layer(16, 16, d=3, activation="relu"),
    "stem": layer(3, 32, 3, 2, activation="silu"),
    "wide": layer(64, 200, 1, activation="silu"),
    "narrow": layer(72, 24, 1, activation="leaky"),
    "large taps": layer(40, 40, 7, groups=40, activation="none"),
    "taps and norm": layer(96, 96, 7, groups=96, norm=1e-6),
    "wide taps and norm": layer(768, 768, 7, groups=768, norm=1e-6),
    "odd taps and norm": layer(72, 72, 5, 2, groups=72, activation="silu", norm=1e-2),
    "few taps and norm": layer(5, 5, 3, groups=5, norm=1e-6),
    "stem and norm": layer(3, 96, 4, 4, norm=1e-6),
    "dense and norm": layer(24, 40, activation="relu", norm=1e-6),
    "behind leaky": layer(32, 32, activation="leaky", residual=0, adds_behind=True),
    "behind relu": layer(32, 32, activation="relu", residual=0, adds_behind=True),
    "pointwise behind": layer(64, 64, 1, activation="silu", residual=0, adds_behind=True),
    "depthwise behind": layer(72, 72, 5, groups=72, activation="silu", residual=0, adds_behind=True),
    "taps and norm behind": layer(96, 96, 7, groups=96, activation="gelu", norm=1e-6, residual=0, adds_behind=True),
    "few channels behind": layer(4, 4, activation="relu", residual=0, adds_behind=True),
}


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("adds", [False, True])
def test_a_gated_layer_by_every_path(form, adds):
    """The gate is multiplied where the kernel reads its input; other paths multiply before."""
    one, dtype = layer(96, 24, 1), DTYPES[form]
    torch.manual_seed(5)
    x = torch.randn(3, 96, 19, 23, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
    gate = torch.rand(3, 96, 1, 1, device=DEVICE).to(dtype)
    added = torch.randn(3, 24, 19, 23, device=DEVICE).to(dtype) if adds else None
    weight, bias = torch.randn(24, 96, 1, 1, device=DEVICE).to(dtype) / 8, torch.randn(24, device=DEVICE).to(dtype)
    wide = [Parameters(weight.double(), bias.double())]
    expected = run_plain(Sequence((one,)), wide, (x * gate).double(), None if added is None else added.double())
    set_fp32(tf32=form == "tf32")
    paths = library_paths(one, adds, DEVICE, form, True, 3, (19, 23))
    assert any(path.startswith("tiles") for path in paths)
    for path in paths:
        out = Executed(Sequence((one,)), [Parameters(weight, bias)], path, adds).run(x, added, gate)
        assert relative_error(out, expected) < LIMITS[form], path
        assert out.is_contiguous(memory_format=torch.channels_last), path


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("hard", [False, True])
def test_excitation_gives_what_its_operators_give(form, hard):
    from joulemark.merged.squeeze import Excitation, in_operators

    dtype = DTYPES[form]
    torch.manual_seed(6)
    for batch, channels, squeezed, size in (
        (3, 96, 4, (57, 33)),
        (1, 1152, 48, (7, 7)),
        (70, 40, 10, (20, 20)),
        (2, 203, 70, (67, 41)),
    ):
        x = torch.randn(batch, channels, *size, device=DEVICE).to(dtype).contiguous(memory_format=torch.channels_last)
        x += 1
        first, second = (
            nn.Conv2d(channels, squeezed, 1).to(DEVICE, dtype),
            nn.Conv2d(squeezed, channels, 1).to(DEVICE, dtype),
        )
        with torch.no_grad():
            gate = Excitation(first, "silu", second, hard)(x)
            weights = (first.weight.flatten(1), first.bias, second.weight.flatten(1).t(), second.bias)
            wide = [one.double() for one in weights]
            expected = in_operators(x.double(), *wide, "silu", hard)
        assert gate.shape == (batch, channels, 1, 1)
        assert relative_error(gate, expected) < LIMITS[form]


@pytest.mark.parametrize("form", LIMITS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_path_of_the_library_gives_what_the_layer_gives(name, form):
    """CuDNN has no fused kernel for some formats and says so; the planner then leaves that path."""
    one, dtype = LAYERS[name], DTYPES[form]
    d = len(one.kernel)
    torch.manual_seed(3)
    x = torch.randn(3, one.in_channels, *(19, 23, 9)[:d], device=DEVICE).to(dtype)
    weight = torch.randn(one.out_channels, one.in_channels // one.groups, *one.kernel, device=DEVICE).to(dtype) / 8
    bias = torch.randn(one.out_channels, device=DEVICE).to(dtype)
    affine = None if one.norm is None else torch.randn(2, one.out_channels, device=DEVICE).to(dtype)
    sequence = Sequence((one,))
    wide = Parameters(weight.double(), bias.double(), None if affine is None else affine.double())
    expected = run_plain(sequence, [wide], x.double())
    set_fp32(tf32=form == "tf32")
    worked = []
    for path in library_paths(one, False, DEVICE, form, batch=3, size=sequence.sizes(tuple(x.shape[2:]))[-1]):
        module = Executed(sequence, [Parameters(weight, bias, affine)], path, False)
        try:
            out = module.run(x, None)
        except RuntimeError as error:
            out, said = None, str(error)
        if out is None:
            assert path == "fused", f"{path}: {said}"
            continue
        assert relative_error(out, expected) < LIMITS[form], path
        assert out.is_contiguous(memory_format=torch.channels_last_3d if d == 3 else torch.channels_last), path
        worked.append(path)
    assert "library" in worked


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
def test_a_norm_alone_gives_what_torch_gives(form):
    torch.manual_seed(7)
    for channels, size in ((96, (56, 57)), (768, (7, 7)), (40, (9, 5, 3)), (1000, (1, 1))):
        affine = torch.randn(2, channels, device=DEVICE).to(DTYPES[form])
        x = (torch.randn(3, channels, *size, device=DEVICE) * 2 + 1).to(DTYPES[form])
        norm = ChannelNorm(affine, 1e-6)
        assert norm.prove() is None
        assert norm.own
        assert relative_error(norm(x), channel_norm(x.double(), affine.double(), 1e-6)) < LIMITS[form]


def beside(like, before):
    """A tensor with room for another among its channels, and that place."""
    shape = (like.shape[0], before + like.shape[1] + 8, *like.shape[2:])
    room = torch.empty(shape, dtype=like.dtype, device=DEVICE, memory_format=FORMATS[like.dim()])
    return room.narrow(1, before, like.shape[1])


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
def test_transposed_convolutions_without_overlap_give_what_torch_gives_wherever_they_write(form):
    tiles_for = pytest.importorskip("joulemark.merged.spread").tiles_for
    dtype = DTYPES[form]
    set_fp32(tf32=form == "tf32")
    torch.manual_seed(8)
    for inputs, outputs, window, size in (
        (128, 64, (2, 2), (57, 33)),
        (1024, 512, (2, 2), (7, 5)),
        (40, 9, (3, 2), (1, 19)),
        (24, 16, (1, 2, 2), (3, 5, 7)),
    ):
        x = torch.randn(3, inputs, *size, device=DEVICE).to(dtype)
        weight = (torch.randn(inputs, outputs, *window, device=DEVICE) / inputs**0.5).to(dtype)
        module = Upsampling(weight, torch.randn(outputs, device=DEVICE).to(dtype), "relu")
        wide = copy.deepcopy(module).double().in_operators(x.double())
        for tile in tiles_for(3 * 57 * 33, outputs * 4):
            module.tile, module.alone = tile, True
            assert relative_error(module(x), wide) < LIMITS[form], (outputs, tile)
            for before in (16, 3):
                place = beside(wide.to(dtype), before)
                assert module(x, place) is place
                assert relative_error(place, wide) < LIMITS[form], (outputs, tile, before)


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
def test_poolings_and_copies_write_beside_others(form):
    torch.manual_seed(9)
    for channels, size in ((64, (57, 33)), (7, (5, 6)), (16, (3, 5, 7))):
        x = torch.randn(3, channels, *size, device=DEVICE).to(DTYPES[form])
        for kernel, stride, padding in ((3, 2, 1), (2, 2, 0), (3, 3, 0)):
            module = Pooling(True, *((one,) * len(size) for one in (kernel, stride, padding)))
            expected = module.in_operators(x)
            place, kept = beside(expected, 8), beside(x, 16)
            assert module.keeps
            assert torch.equal(module(x, place, kept), expected)
            assert torch.equal(place, expected)
            assert torch.equal(kept, x)
        room = torch.empty(3, 2 * channels, *size, device=DEVICE, dtype=x.dtype, memory_format=FORMATS[x.dim()])
        assert torch.equal(Joined((channels, channels))(room, x, x + 1), torch.cat([x, x + 1], 1))


@pytest.mark.parametrize("form", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("strategy", ["auto", "kernels"])
def test_a_decoder_is_right_whatever_writes_its_concatenations(form, strategy):
    """``kernels``: by all that is right, however fast."""
    set_fp32(tf32=form == "tf32")
    model = condition(UNet(width=16).to(DEVICE), images(4, (3, 64, 64), "cuda")).requires_grad_(False)
    wide = copy.deepcopy(model).double()
    model, x = model.to(DTYPES[form]), images(2, (3, 64, 96), "cuda").to(DTYPES[form])
    with torch.no_grad():
        merged = merge(model, x, strategy, budget_s=30)
        said = merged.explain()
        assert said.count("upsampling") == said.count("concatenation (") == 4, said
        if strategy == "kernels":
            assert said.count("2 of 2 parts written in place") == 4, said
        for given in (x, x[:1], images(1, (3, 53, 67), "cuda").to(x.dtype)):
            assert relative_error(merged(given), wide(given.double())) < 2 * LIMITS[form]
        graph, out = captured(merged, x)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, wide(x.double())) < 2 * LIMITS[form]


class Small(nn.Module):
    """Something of everything: an inverted residual, a chain, a gate, linear layers and a norm, branches."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.inverted = nn.Sequential(
            nn.Conv2d(16, 96, 1), nn.ReLU6(), nn.Conv2d(96, 96, 3, 1, 1, groups=96), nn.ReLU6(), nn.Conv2d(96, 16, 1)
        )
        self.chain = nn.Sequential(*(part for _ in range(3) for part in (nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())))
        self.squeeze, self.excite, self.project = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 1)
        self.taps, self.norm = nn.Conv2d(16, 16, 7, 1, 3, groups=16), nn.LayerNorm(16)
        self.wide, self.thin = nn.Linear(16, 64), nn.Linear(64, 16)
        self.a, self.b, self.side = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 64, 3, 2, 1), nn.Conv2d(16, 64, 1, 2)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.stem(x)
        x = self.chain(self.inverted(x) + x)
        gate = torch.sigmoid(self.excite(nn.functional.silu(self.squeeze(nn.functional.adaptive_avg_pool2d(x, 1)))))
        x = self.project(x * gate) + x
        y = self.norm(self.taps(x).permute(0, 2, 3, 1))
        x = x + self.thin(nn.functional.silu(self.wide(y))).permute(0, 3, 1, 2)
        x = torch.relu(self.b(torch.relu(self.a(x))) + self.side(x))
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def small(form, batch=8, size=96):
    set_fp32(tf32=form == "tf32")
    torch.manual_seed(4)
    model = Small().eval().to(DEVICE, DTYPES[form]).requires_grad_(False)
    x = torch.randn(batch, 3, size, size, device=DEVICE).to(DTYPES[form])
    wide = Small().eval().to(DEVICE).requires_grad_(False)
    wide.load_state_dict({name: one.float() for name, one in model.state_dict().items()})
    return model, x, wide.double()


@pytest.mark.parametrize("form", LIMITS)
def test_a_merged_model_is_right_at_first_and_from_the_disk(form):
    model, x, wide = small(form)
    with torch.no_grad():
        merged = merge(model, x, budget_s=40)
        assert not merged.explain().startswith("Small: plain"), merged.explain()
        expected = wide(x.double())
        assert relative_error(merged(x), expected) < 2 * LIMITS[form]
        assert relative_error(merged(x[:3]), expected[:3]) < 2 * LIMITS[form]
        begin = time.perf_counter()
        again = merge(model, x, budget_s=40)
        if "compiled" not in f"{again.variant} {again.captured}":
            assert time.perf_counter() - begin < 5
        assert again.cached
        assert relative_error(again(x), expected) < 2 * LIMITS[form]
    assert merged.times[merged.variant] <= 1.011 * min(merged.times.values())


def test_no_call_sees_what_another_one_left():
    model, x, _ = small("bf16", batch=1)
    with torch.no_grad():
        replayed = Replayed(model, (x,))
        first = replayed(x)
        kept = first.clone()
        other = replayed(-x)
        assert torch.equal(first, kept)
        assert not torch.equal(other, first)
        torch.testing.assert_close(first, model(x), rtol=2e-2, atol=2e-2)


def test_graphs_of_one_pool_take_the_memory_of_one():
    wide = nn.Sequential(nn.Upsample(scale_factor=8), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    wide = wide.eval().to(DEVICE, torch.bfloat16)
    x = torch.randn(8, 16, 32, 32, device=DEVICE, dtype=torch.bfloat16)
    pool, held = torch.cuda.graph_pool_handle(), []
    torch.cuda.empty_cache()
    reserved = [torch.cuda.memory_reserved()]
    for _ in range(2):
        held.append(Replayed(wide, (x,), pool))
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] - reserved[1] < (reserved[1] - reserved[0]) / 2


def test_a_merged_model_can_be_captured_and_moved():
    model, x, wide = small("bf16", batch=2)
    with torch.no_grad():
        merged = merge(model, x, budget_s=40)
        expected = wide(x.double())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            merged(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = merged(x)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, expected) < 2e-2
        moved = merged.to(DEVICE)
        assert relative_error(moved(x), expected) < 2e-2


def captured(module, x):
    """A graph of the user's around a call of a module, and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x)
    return graph, out


@pytest.mark.parametrize("called", ["folded", "launches", "folded graph", None])
def test_who_captures_a_merged_model_gets_what_is_fastest_on_the_device(monkeypatch, called):
    """Whatever is fastest in calls; ``None``: as it is measured."""
    race_calls = whole.race_calls

    def faster(calls, device):
        times = race_calls(calls, device)
        return {name: 0.0 if name == called else seconds for name, seconds in times.items()}

    monkeypatch.setattr(whole, "race_calls", faster)
    monkeypatch.setenv(cache.VARIABLE, f"{cache.folder()}-{called}")
    model, x, wide = small("bf16", batch=1)
    with torch.no_grad():
        merged = merge(model, x, budget_s=15)
        assert merged.failed is None, merged.explain()
        best = merged.device_times[merged.captured]
        assert best <= 1.011 * min(merged.device_times.values())
        if called in merged.times:
            assert merged.variant == called
        if merged.variant not in (merged.captured, merged.captured.removesuffix("graph").strip() or "launches"):
            assert isinstance(merged.inner, Chosen)
        replayed = {name: captured(one, x) for name, one in {"merged": merged, "plain": model}.items()}
        found = race_replays({name: graph.replay for name, (graph, _) in replayed.items()}, DEVICE)
        assert found["merged"] < 1.15 * best + 2e-6, merged.explain()
        assert found["merged"] < found["plain"]
        for out in (replayed["merged"][1], merged(x)):
            assert relative_error(out, wide(x.double())) < 2e-2
        again = merge(model, x, budget_s=15)
        assert again.cached
        assert (again.variant, again.captured) == (merged.variant, merged.captured)
        graph, out = captured(again, x)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, wide(x.double())) < 2e-2


class Inception(nn.Module):
    """Blocks of branches of several lengths, one with a pooling, one that forks again, one of inverted residuals."""

    def __init__(self, blocks=3, width=32):
        super().__init__()
        self.first = nn.Conv2d(3, 4 * width, 3, 2, 1)
        self.blocks = nn.ModuleList(nn.ModuleDict(self.block(width)) for _ in range(blocks))

    def block(self, width):
        def conv(inputs, kernel):
            padding = tuple(one // 2 for one in kernel)
            return nn.Sequential(nn.Conv2d(inputs, width, kernel, 1, padding), nn.ReLU(inplace=True))

        hidden = nn.Conv2d(4 * width, 8 * width, 1), nn.Conv2d(8 * width, 8 * width, 3, 1, 1, groups=8 * width)
        return {
            "pooled": nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(4 * width, (1, 1))),
            "long": nn.Sequential(
                conv(4 * width, (1, 1)), conv(width, (7, 1)), conv(width, (1, 7)), conv(width, (3, 3))
            ),
            "stem": conv(4 * width, (1, 1)),
            "row": conv(width, (1, 3)),
            "column": conv(width, (3, 1)),
            "inverted": nn.Sequential(hidden[0], nn.ReLU6(), hidden[1], nn.ReLU6(), nn.Conv2d(8 * width, width, 1)),
        }

    def forward(self, x):
        x = torch.relu(self.first(x))
        for one in self.blocks:
            stem = one["stem"](x)
            forked = one["row"](stem) + one["column"](stem)
            x = torch.cat([one["pooled"](x), one["long"](x), forked, one["inverted"](x)], 1)
        return x


def replays_give_what_the_graph_gives(forked, x, replays):
    """The relative errors of replays for changing inputs, of a capture that calls the module twice."""
    assert forked.schedule.streams > 1
    given, errors = x.clone(), []

    class Twice(nn.Module):
        def forward(self, x):
            return forked(x), forked(x.flip(-1))

    graph, outs = captured(Twice(), given)
    for _ in range(replays):
        given.normal_()
        graph.replay()
        for out, one in zip(outs, (given, given.flip(-1)), strict=True):
            errors.append(relative_error(out, forked.inner(one)))
    return errors


@pytest.mark.parametrize("strategy", ["auto", "kernels"])
@pytest.mark.parametrize("size", [15, 70])
def test_branches_beside_each_other_give_what_they_give_one_by_one(strategy, size):
    """``kernels``: with scratch, early launches and clusters of our own among them."""
    set_fp32(tf32=False)
    torch.manual_seed(7)
    model = Inception().eval().to(DEVICE, torch.bfloat16).requires_grad_(False)
    x = torch.randn(2, 3, size, size, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        if strategy == "kernels":
            inner = merge(model, x, "kernels").inner
        else:
            merged = merge(model, x, budget_s=15)
            assert "branches graph" in merged.device_times, merged.explain()
            inner = trace(model, (x,))
        errors = replays_give_what_the_graph_gives(Forked(inner, measure_rates(DEVICE), "bf16"), x, 50)
    assert max(errors) < LIMITS["bf16"]


def test_the_branches_of_inception_v4_give_what_they_give_one_by_one():
    torch.manual_seed(8)
    model = condition(InceptionV4().to(DEVICE), images(4, (3, 299, 299), "cuda"))
    model, x = model.bfloat16().requires_grad_(False), images(2, (3, 299, 299), "cuda").bfloat16()
    with torch.no_grad():
        forked = Forked(trace(model, (x,)), measure_rates(DEVICE), "bf16")
        assert forked.schedule.regions == 19
        errors = replays_give_what_the_graph_gives(forked, x, 50)
        assert max(errors) < LIMITS["bf16"]
        replayed = {"branches": Replayed(forked, (x,)), "one by one": Replayed(forked.inner, (x,))}
        times = race_replays({name: one.replay for name, one in replayed.items()}, DEVICE)
    assert times["branches"] < 1.1 * times["one by one"], times


class Several(nn.Module):
    """So many kernels of a few microseconds, or products of so many rows and columns."""

    def __init__(self, kernels, rows):
        super().__init__()
        self.kernels, self.rows = kernels, rows

    def forward(self, x):
        for _ in range(self.kernels):
            x = x @ x if self.rows > 100 else x * 1.01
        return x


@pytest.mark.parametrize(("kernels", "rows"), [(6, 16), (2, 4096)])
def test_a_replay_is_timed_without_the_host(kernels, rows):
    """As calls that were captured one behind the other take it, and what lies between two graphs."""
    x = torch.randn(rows, rows, device=DEVICE) / rows**0.5
    module = Several(kernels, rows)
    with torch.no_grad():
        expected = race({"calls": lambda: module(x)}, DEVICE)["calls"]
        replayed = Replayed(module, (x,))
        found = race_replays({"replays": replayed.replay}, DEVICE)["replays"]
    assert 0.8 * expected < found < 1.2 * expected + 6e-6


def test_a_copy_of_a_merged_model_works():
    model, x, wide = small("bf16", batch=2)
    with torch.no_grad():
        merged = merge(model, x, budget_s=15)
        if "compiled" in f"{merged.variant} {merged.captured}":
            pytest.skip("what torch compiles is torch's to copy")
        assert relative_error(copy.deepcopy(merged)(x), wide(x.double())) < 2e-2


def test_an_input_on_the_cpu_is_in_no_graph():
    class Scaled(nn.Module):
        def forward(self, x, factor):
            return x * factor

    with pytest.raises(TypeError, match="on the CPU"):
        Replayed(Scaled(), (torch.ones(2, device=DEVICE), torch.tensor(2.0)))


def test_a_compiler_goes_around_segments():
    model, x, wide = small("bf16", batch=2)
    with torch.no_grad():
        merged = merge(model, x, budget_s=15)
        out = compiled(for_capture(merged.inner))(x)
        assert relative_error(out, wide(x.double())) < 2e-2


def test_a_race_knows_the_slower():
    large, small_one = (torch.randn(n, n, device=DEVICE) for n in (2048, 512))
    times = race({"large": lambda: large @ large, "small": lambda: small_one @ small_one}, DEVICE)
    assert times["large"] > 4 * times["small"] > 0
