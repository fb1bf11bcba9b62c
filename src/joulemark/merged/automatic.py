"""``merge(strategy="auto")``: plan the segments, build variants of the whole, keep the fastest."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from joulemark.merged import cache
from joulemark.merged.biases import move_biases
from joulemark.merged.branches import WORTH
from joulemark.merged.compiling import Compiled, start_compiler
from joulemark.merged.cost import Rates
from joulemark.merged.families import Family, known_families
from joulemark.merged.fitting import without_needless_paddings
from joulemark.merged.forks import Forked
from joulemark.merged.graph import copied, twin
from joulemark.merged.joining import Concatenation, flatten_concatenations, join
from joulemark.merged.kernels import KernelError
from joulemark.merged.layer_norms import as_channel_norms
from joulemark.merged.linears import as_convolutions
from joulemark.merged.meaning import says_all, words_of
from joulemark.merged.memory import free_bytes, give_back, says_out_of_memory
from joulemark.merged.merged_model import Decision, MergedModel, nothing_in, traced_or_reason, untraced
from joulemark.merged.paths import cudnn_tuning, format_of, products_round, trials_until
from joulemark.merged.plan import Planner
from joulemark.merged.pooling import replace_poolings
from joulemark.merged.programs import Program
from joulemark.merged.rates import RatesError, learn, rates_of
from joulemark.merged.replay import Replayed, for_both, for_capture
from joulemark.merged.rewrite import fused_by_cudnn, rewrite
from joulemark.merged.seams import keep_channels_last, weights_channels_last
from joulemark.merged.setting import DEPTH, Setting
from joulemark.merged.spent import Spent
from joulemark.merged.squeeze import replace_excitations
from joulemark.merged.trials import Choice
from joulemark.merged.trying import told
from joulemark.merged.upsampling import Upsampled, replace_upsamplings
from joulemark.merged.whole import Referee, Verdict

_FOR_SEGMENTS = 0.62
"""Share of the budget after which no further segment is measured; compilers take the rest."""
_FOR_TUNING_S = 180.0
"""A budget from which torch's compiler may tune convolutions too: minutes, for a gain that is seldom one here."""
_FOR_COMPILING = 0.95
"""Share of the budget in which a compiler that begins has to end as expected: it cannot be interrupted."""
_COMPILING_S = {"default": 0.12, "max-autotune-no-cudagraphs": 0.6}
"""What a compiler takes for a call in a graph, by mode: guesses, for the first one of a model alone."""
_FOR_JOINING = 0.05
"""Share of the budget that concatenations may take in any case."""
_TRIALS_S = 1.2
"""For which cuDNN may try all of its plans when a plan from the disk is built; a large model has more to try."""
_MOST_WEIGHTS = 16
"""Of a model's whose outputs are known to be right; the latest."""
_MORE_MEMORY = 1.1
"""From so many times on free memory counts as more: a guess, what other processes hold varies."""
_UNTRIED = "no time for some layers or ranges: a larger budget_s may merge more"
_STARTING = 30
"""As many calls more its start takes."""
_GRAPHS = ("graph", "folded graph", "fused graph")
_FORKED = ("branches graph", "folded branches graph", "fused branches graph")
_COMPILED = ("compiled", "compiled graph", "folded compiled", "folded compiled graph")
_TUNED = ("compiled tuned", "compiled tuned graph", "folded compiled tuned", "folded compiled tuned graph")
_VARIANTS = ("launches", "folded", *_GRAPHS, *_FORKED, *_COMPILED, *_TUNED)


@dataclass(frozen=True)
class _Kept:
    """A plan on the disk.

    ``cut_s``: the budget that cut it short; ``short_bytes``: the free memory that was too little for something in it;
    None where they were not. ``right_for``: the weights, by a hash of their values, with which its output was right.
    """

    choices: list[Choice]
    left: dict[str, str]
    variant: str
    captured: str | None
    times: dict[str, float]
    device_times: dict[str, float]
    cut_s: float | None
    short_bytes: int | None
    right_for: list[str]


def merge_automatically(
    model: nn.Module,
    inputs: tuple[Any, ...],
    rates: Rates | None,
    families: tuple[Family, ...] | None,
    measure: bool | None,
    budget_s: float,
    forced: bool = False,
    depth: int = DEPTH,
) -> MergedModel:
    """See :func:`joulemark.merged.merge`."""
    begin, spent = time.monotonic(), Spent()
    x = _numbers_of(inputs)
    measured = measure if measure is not None else x is not None and x.is_cuda  # and so kept on the disk
    # What is copied in inference mode could not be changed, nor trained on, outside of it.
    with torch.inference_mode(False), torch.no_grad():
        try:
            # As the model's own output is made later: cuDNN has plans for its layers by then.
            with spent.on("tracing"), cudnn_tuning(False):
                graph = traced_or_reason(model, inputs, on_disk=measured)
            if isinstance(graph, str):
                return untraced(model, graph)
            with spent.on("rates"):
                setting = _setting(x, rates, families, measured, begin + _FOR_SEGMENTS * budget_s, depth)
            if not setting.families and not setting.measured:
                return _unplanned(model, graph)
            with cudnn_tuning(not forced):  # where no time counts, each shape's trials are waste
                merged = _Automatic(model, graph, inputs, setting, begin, budget_s, forced, spent).merged()
        except Exception as error:  # whatever a device or a compiler says: the model itself still works
            why = f"merging it failed: {told(error)}"
            warnings.warn(f"{type(model).__name__} is not merged: {why}", stacklevel=3)
            return untraced(model, why)
    merged.took_s = time.monotonic() - begin
    return merged


def _numbers_of(inputs: tuple[Any, ...]) -> Tensor | None:
    """The input whose device and format count."""
    return next((one for one in _tensors(inputs) if one.is_floating_point()), None)


def _setting(
    x: Tensor | None,
    rates: Rates | None,
    families: tuple[Family, ...] | None,
    measured: bool,
    deadline: float,
    depth: int,
) -> Setting:
    device = torch.device("cpu") if x is None else x.device
    on_gpu = device.type == "cuda"
    if families is None:
        families = known_families() if on_gpu else ()
    if rates is None and on_gpu and families:
        index = torch.cuda.current_device() if device.index is None else device.index
        try:
            rates = rates_of(torch.device("cuda", index))
        except (RatesError, KernelError) as error:  # nothing is predicted then; what is measured decides
            warnings.warn(f"merged without a performance model: {error}", stacklevel=4)
    form = None if x is None else format_of(x)
    return Setting(device, form, rates, families, measured, deadline, depth)


def _unplanned(model: nn.Module, graph: fx.GraphModule) -> MergedModel:
    why = "no kernel for this device; its own operators are the best path"
    choices, left = Planner(Setting(torch.device("cpu"), None, None, (), False)).plan(graph)
    decisions = [Decision(one.name, "plain", why) for one in choices]
    decisions += [Decision(name, "plain", reason) for name, reason in left.items()]
    return MergedModel(graph, decisions or [nothing_in(model)])


class _Automatic:
    """One model on its way to the fastest variant."""

    def __init__(
        self,
        model: nn.Module,
        graph: fx.GraphModule,
        inputs: tuple[Any, ...],
        setting: Setting,
        begin: float,
        budget_s: float,
        forced: bool = False,
        spent: Spent | None = None,
    ) -> None:
        self.forced, self.spent = forced, Spent() if spent is None else spent
        self.model, self.setting = model, setting
        with self.spent.on("rewriting"):
            self.graph, self.inputs = weights_channels_last(graph), _cloned(inputs)
            self._rewrite()
        self.begin, self.budget_s = begin, budget_s
        self.compiling_s = dict(_COMPILING_S)
        self.refused: list[Decision] = []
        self.compiled: dict[str, Compiled] = {}
        with self.spent.on("disk"):
            self.key = self._key(inputs)
            self.kept: _Kept | None = self._kept() if setting.measured else None
            self.weights = _hash_of(self.model) if setting.measured else None
        self.cut = self.of_values = self.short = self.stays = False
        self.free_bytes = 0
        self.untried: str | None = None

    def _rewrite(self) -> None:
        """The graph as kernels of ours want it, whatever they will be, and what became of each part."""
        on = self.spent.on
        self.rewritten = copied(self.graph)
        flatten_concatenations(self.rewritten)
        without_needless_paddings(self.rewritten)
        as_convolutions(self.rewritten)
        with on("norms"):
            self.norms = as_channel_norms(self.rewritten)
        with on("excitations"):
            self.excitations = replace_excitations(self.rewritten)
        with on("poolings"):
            self.poolings = self._pooled()
        with on("layouts"), cudnn_tuning(False):
            keep_channels_last(weights_channels_last(self.rewritten), self.inputs, on_disk=self.setting.measured)
        move_biases(self.rewritten)
        with on("upsampling"):
            on_gpu = self.setting.device.type == "cuda"
            self.upsamplings = replace_upsamplings(self.rewritten, self.setting) if on_gpu else []

    def _key(self, inputs: tuple[Any, ...]) -> str:
        """What a plan depends on."""
        setting = self.setting
        kernels = [one.name for one in setting.families]
        shapes = pytree.tree_map_only(Tensor, lambda one: (tuple(one.shape), one.dtype, one.stride()), inputs)
        where = cache.device_key(setting.device)
        gpu = None if setting.rates is None else setting.rates.gpu
        model = cache.model_key(self.model), cache.graph_key(self.graph)
        what = (*model, shapes, setting.form, kernels, gpu, setting.depth)
        kind = setting.device.type
        narrowed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cache.key_of("plan", cache.code_key(), where, narrowed, *what)

    def _pooled(self) -> dict[str, str]:
        """What became of the model's poolings; nothing where there is no kernel for them."""
        if self.setting.device.type != "cuda":
            return {}
        x = _numbers_of(self.inputs)
        assert x is not None
        return replace_poolings(self.rewritten, x.device, x.dtype)

    def _kept(self) -> _Kept | None:
        """The plan on the disk; None without one, or where time or memory were too short for it and are more now."""
        kept: _Kept | None = cache.read("plan", self.key, _Kept)
        if kept is None or not {kept.variant, kept.captured} <= {*_VARIANTS, None}:
            return None
        if kept.cut_s is not None and self.budget_s > kept.cut_s:
            return None
        short = kept.short_bytes
        return None if short is not None and free_bytes(self.setting.device) > _MORE_MEMORY * short else kept

    def merged(self) -> MergedModel:
        """The model, from what the disk keeps of it where that still holds."""
        made = self._from_disk(self.kept)
        if made is None and self.stays:
            with self.spent.on("disk"):
                self.key += "-short"  # beside it, for all who have as little memory
                beside = self._kept()
            made = self._from_disk(beside)
        if made is not None:
            return made
        if self.setting.measured:
            with self.spent.on("memory"):
                self.free_bytes = free_bytes(self.setting.device)
        planner = Planner(self.setting, forced=self.forced, spent=self.spent)
        with self.spent.on("cuts"):
            choices, left = planner.plan(self.rewritten)
        if self.forced:
            with self.spent.on("proving"):
                while refused := planner.prove(self.rewritten, choices):
                    self.refused += [
                        Decision(one.name, "refused", why, one.edge, one.path) for one, why in refused.items()
                    ]
                    choices, left = planner.plan(self.rewritten)
            return self._finish(choices, left, None)
        if planner.ranges.cut:
            self.cut, self.untried = True, _UNTRIED
        if self.setting.rates is not None and self.setting.device.type == "cuda":
            with self.spent.on("learning"):
                learn(planner.ranges.points(), self.setting.rates, self.setting.device)
        self.of_values = planner.ranges.of_values
        problems = (one.problem for trials in planner.ranges.found.values() for one in trials)
        self.short = any(says_out_of_memory(one) for one in problems if one is not None)
        return self._finish(choices, left, None)

    def _from_disk(self, kept: _Kept | None) -> MergedModel | None:
        """The model by a plan from the disk, tried again where memory ran out; None without one that holds today.

        One that lacks nothing but memory stays on the disk for who has more.
        """
        if kept is None:
            return None
        for _ in range(2):
            try:
                return self._finish(kept.choices, kept.left, kept)
            except (AssertionError, KeyError, RuntimeError, ValueError) as error:  # of another meaning, or CUDA refuses
                short = says_out_of_memory(str(error))
            if not short:
                break
            self.stays = True
            with self.spent.on("memory"):  # behind the error, which holds what was built
                give_back(self.setting.device)
        return None

    def _finish(self, choices: List[Choice], left: dict[str, str], kept: _Kept | None) -> MergedModel:
        self.choices = choices
        with self.spent.on("rewriting"):
            rewritten, decisions = self._as_chosen(choices, left)
        with self.spent.on("expected output"):
            referee = self._referee(checked=kept is not None and self.weights in kept.right_for)
        if kept is not None:
            return self._as_kept(kept, rewritten, referee, decisions)
        self._variants(referee, rewritten)
        if self.untried is not None:
            referee.problems["every range"] = self.untried
        with self.spent.on("judging"):
            verdict = referee.judge()
        # A key knows no values of weights: what these decided is of no use to another model.
        if self.setting.measured and not self.of_values and not referee.of_values:
            with self.spent.on("disk"):
                self._keep(choices, left, verdict, referee)
            with self.spent.on("program"):
                self._keep_programs(verdict, referee)
        return self._merged_as(verdict, referee, decisions)

    def _as_kept(
        self, kept: _Kept, rewritten: fx.GraphModule, referee: Referee, decisions: list[Decision]
    ) -> MergedModel:
        """The variants of a plan from the disk, and no other; cuDNN gets some time to try its plans for them.

        Raises:
            torch.OutOfMemoryError: for want of memory.
            KeyError: one of them does not work.
        """
        verdict = Verdict(kept.variant, kept.captured)
        with trials_until(time.monotonic() + _TRIALS_S):
            for name in dict.fromkeys(one for one in (verdict.calls, verdict.captured) if one is not None):
                self._build(referee, name, rewritten)
        if referee.short:
            raise torch.OutOfMemoryError(f"out of memory: {', '.join(sorted(referee.short))}")
        referee.times, referee.device_times, referee.problems = kept.times, kept.device_times, {}
        made = self._merged_as(verdict, referee, decisions, cached=True)
        with self.spent.on("program"):
            self._keep_programs(verdict, referee)
        if referee.expected is not None and self.weights is not None and not referee.of_values:
            self._know(self.weights, kept)
        return made

    def _know(self, weights: str, kept: _Kept) -> None:
        """Keep that a plan is right for weights, where no other process has kept another plan meanwhile."""
        newest: _Kept | None = cache.read("plan", self.key, _Kept)
        if newest is None or weights in newest.right_for or replace(newest, right_for=kept.right_for) != kept:
            return
        known = [*newest.right_for[1 - _MOST_WEIGHTS :], weights]
        cache.write("plan", self.key, asdict(replace(newest, right_for=known)))

    def _keep(self, choices: List[Choice], left: dict[str, str], verdict: Verdict, referee: Referee) -> None:
        """Put the plan on the disk, with what time or memory were too short for it."""
        entry = _Kept(
            list(choices),
            left,
            verdict.calls,
            verdict.captured,
            referee.times,
            referee.device_times,
            cut_s=self.budget_s if self.cut else None,
            short_bytes=self.free_bytes if self.short or referee.short else None,
            right_for=[] if self.weights is None else [self.weights],
        )
        cache.write("plan", self.key, asdict(entry))

    def _keep_programs(self, verdict: Verdict, referee: Referee) -> None:
        """Put what torch's compiler made of the chosen variants on the disk, where a process can run it without one."""
        chosen = {one.removesuffix(" graph") for one in (verdict.calls, verdict.captured) if one is not None}
        made = chosen & set(self.compiled)
        if not made or not says_all(self.graph):
            return
        for name in made:
            right = referee.known(name) is self.compiled[name]
            program = self.compiled[name].program(*self.inputs) if right else None
            if program is not None:
                cache.write("program", self._program_key(name), asdict(program))

    def _program_key(self, name: str) -> str:
        """What a compiled variant depends on."""
        what = (self.key, name, self.choices, self._words, str(self.setting.device))
        settings = torch.are_deterministic_algorithms_enabled(), products_round(), torch.get_default_dtype()
        return cache.key_of("program", *what, *settings)

    @cached_property
    def _words(self) -> list[object]:
        return words_of(self.graph)

    def _as_chosen(self, choices: List[Choice], left: dict[str, str]) -> tuple[fx.GraphModule, list[Decision]]:
        """The graph with what was chosen in it, and what became of each part."""
        decisions = [_decision(one) for one in choices]
        decisions += [Decision(name, "excitation", why) for name, why in self.excitations.items()]
        decisions += [Decision(name, "pooling", why) for name, why in self.poolings.items()]
        decisions += [_of_upsampling(one) for one in self.upsamplings]
        decisions += [Decision(name, "norm", why) for name, why in self.norms.taken.items()]
        decisions += [Decision(name, "plain", why) for name, why in {**left, **self.norms.left}.items()] + self.refused
        rewritten = twin(self.rewritten)  # a plan from the disk that fails leaves this one to be rewritten
        rewrite(rewritten, choices, self.setting)
        with self.spent.on("joining"):
            decisions += [_of_concatenation(one) for one in self._joined(rewritten)]
        return rewritten, decisions

    def _joined(self, rewritten: fx.GraphModule) -> list[Concatenation]:
        """What became of concatenations whose parts may be written in place, which have some time of their own."""
        if self.setting.device.type != "cuda":
            return []
        deadline = max(self.setting.deadline, time.monotonic() + _FOR_JOINING * self.budget_s)
        return join(rewritten, replace(self.setting, deadline=deadline))

    def _referee(self, checked: bool = False) -> Referee:
        """One that knows the model's own output, so that folding is refereed too; what trains gives another each time.

        A copy of the model runs: a call may change what the model keeps. None does where outputs were checked before.
        """
        if checked:
            return Referee(self.setting, self.inputs, None, spent=self.spent)
        plain = self.graph if any(one.training for one in self.model.modules()) else self.model
        with cudnn_tuning(False):
            expected = copy.deepcopy(plain)(*_cloned(self.inputs))
        held = [one for one in (*plain.parameters(), *plain.buffers()) if one.is_floating_point()]
        narrowest = format_of(min(held, key=lambda one: one.dtype.itemsize)) if held else None
        widened = partial(_in_wider_numbers, plain, self.inputs)
        return Referee(self.setting, self.inputs, expected, widened, narrowest, spent=self.spent)

    def _merged_as(
        self, verdict: Verdict, referee: Referee, decisions: List[Decision], cached: bool = False
    ) -> MergedModel:
        """The variants that were chosen, and no other, as one module."""
        inner = referee.module(verdict.calls)
        if verdict.captured is not None:
            inner = for_both(inner, for_capture(referee.module(verdict.captured)), self.inputs)
        return MergedModel(
            inner,
            [*_of_the_whole(verdict), *_of_branches(verdict, inner), *(decisions or [nothing_in(self.model)])],
            verdict.calls,
            referee.times,
            referee.problems,
            cached=cached,
            tuned=not self.forced,
            captured=verdict.captured,
            device_times=referee.device_times,
            spent_s=self.spent.seconds,
        )

    def _variants(self, referee: Referee, rewritten: nn.Module) -> None:
        """Build what is to be measured: cheap ones always, compiled ones while there is time."""
        self._build(referee, "launches", rewritten)
        if not self.setting.measured:
            return
        self._build(referee, "folded", rewritten)
        if self.setting.device.type != "cuda":
            return
        for name in _GRAPHS:
            self._build(referee, name, rewritten)
        rival = "folded" if referee.known("fused graph") is None else "fused"
        for name in ("branches graph", f"{rival} branches graph"):
            self._build(referee, name, rewritten)
        for name in (*_COMPILED, *(_TUNED if self.budget_s >= _FOR_TUNING_S else ())):
            if name.endswith("graph"):
                self._build(referee, name, rewritten)
            elif (why := self._why_not_compile(name, rewritten)) is not None:
                self.cut = True
                referee.problems[name] = why
            else:
                begin = time.monotonic()
                self._build(referee, name, rewritten)
                self._learn_compiling(name, rewritten, time.monotonic() - begin)

    def _why_not_compile(self, name: str, rewritten: nn.Module) -> str | None:
        """Why a compiler does not begin, since it is not expected to end in time; None where it may."""
        expected_s = self.compiling_s[_mode(name)] * self._calls(name, rewritten)
        left_s = _FOR_COMPILING * self.budget_s - (time.monotonic() - self.begin)
        if expected_s <= left_s:
            return None
        return (
            f"no time: compiling is expected to take {expected_s:.0f} s, and of budget_s={self.budget_s:g} "
            f"{max(left_s, 0.0):.0f} s are left"
        )

    def _learn_compiling(self, name: str, rewritten: nn.Module, took_s: float) -> None:
        """What follows in this mode is expected to take as long for each call."""
        self.compiling_s[_mode(name)] = took_s / self._calls(name, rewritten)

    def _calls(self, name: str, rewritten: nn.Module) -> int:
        """Calls in the graph of a variant, and what starting a compiler counts for."""
        inner = self.graph if name.startswith("folded") else rewritten
        assert isinstance(inner, fx.GraphModule)
        return _STARTING + sum(1 for node in inner.graph.nodes if node.op.startswith("call"))

    def _build(self, referee: Referee, name: str, rewritten: nn.Module) -> None:
        """One variant by its name, whose seconds are those until it could be called; its first call has its own."""
        with self.spent.on(name):
            if name.startswith("fused"):
                self._build_fused(referee, name)
            else:
                self._build_of_ours(referee, name, rewritten)

    def _build_of_ours(self, referee: Referee, name: str, rewritten: nn.Module) -> None:
        """A graph is captured of the variant without it."""
        inner = self.graph if name.startswith("folded") else rewritten
        if name in _FORKED:
            self._build_forked(referee, name, inner)
            return
        plain = name.removesuffix("graph").strip() or "launches"
        build: Callable[[], nn.Module]
        if name in ("launches", "folded"):
            referee.try_(name, lambda: inner)
        elif name.endswith("graph"):
            known = referee.known(plain)
            if known is None and "compiled" in plain and plain not in referee.problems:
                with self.spent.on(plain):
                    known = referee.try_(plain, lambda: self._compiled(inner, plain))
            base = inner if known is None and "compiled" not in plain else known
            if base is None:
                referee.problems[name] = referee.problems.get(plain, f"{plain} does not work")
                return
            build = lambda: Replayed(base, self.inputs, referee.pool)  # noqa: E731
            referee.try_(name, build)
        else:
            referee.try_(name, lambda: self._compiled(inner, name))

    def _compiled(self, inner: nn.Module, name: str) -> nn.Module:
        """A module under torch's compiler, compiled for the example before it is called, or run by its program.

        What a program gives is compared as any variant's output is; one that fails is of no more use than none.
        """
        made = Compiled(inner, _mode(name))
        with self.spent.on("program"):
            program: Program | None = cache.read("program", self._program_key(name), Program)
            if program is not None and made.runs(program, *self.inputs) and self._works(made, name):
                return made
        made = self.compiled[name] = Compiled(inner, _mode(name))
        with self.spent.on("compiler's start"):
            start_compiler()
        made.ready_for(*self.inputs)
        return made

    def _works(self, made: Compiled, name: str) -> bool:
        """Whether a program does in its first call: the driver may refuse what another process has kept."""
        try:
            with self.spent.on(f"first call of {name}"):
                made(*self.inputs)
        except Exception:  # whatever a device says
            return False
        return True

    def _build_fused(self, referee: Referee, name: str) -> None:
        """Every convolution that ends in a ReLU by cuDNN's fused kernels: the rival that needs no compiler."""
        graph = self._fused
        if graph is None:
            referee.problems[name] = "no convolution ends in a ReLU"
        elif name in _FORKED:
            self._build_forked(referee, name, graph)
        else:
            referee.try_(name, lambda: Replayed(graph, self.inputs, referee.pool))

    @cached_property
    def _fused(self) -> fx.GraphModule | None:
        graph = twin(self.graph)
        choices = fused_by_cudnn(graph)
        if not any(one.path == "fused" for one in choices):
            return None
        rewrite(graph, choices, self.setting)
        return graph

    def _build_forked(self, referee: Referee, name: str, graph: nn.Module) -> None:
        """A graph whose branches run beside each other; none where that would hardly save time."""
        assert isinstance(graph, fx.GraphModule)
        forked = Forked(graph, self.setting.rates, self.setting.form)
        if forked.schedule.gain >= WORTH:
            referee.try_(name, lambda: Replayed(forked, self.inputs, referee.forked_pool))


def _hash_of(model: nn.Module) -> str | None:
    """Of the values of a model's weights; None where they cannot be read."""
    try:
        return cache.values_key(model)
    except (RuntimeError, KeyError):  # formats without bits of their own, or no memory for it
        return None


def _tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(inputs) if isinstance(one, Tensor)]


def _cloned(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs that may be changed."""
    cloned: tuple[Any, ...] = pytree.tree_map_only(Tensor, torch.clone, inputs)
    return cloned


def _in_wider_numbers(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    """A model's output in fp32, in fp64 where it has fp32 itself."""
    wide = torch.float32 if any(one.dtype.itemsize == 2 for one in model.parameters()) else torch.float64
    with cudnn_tuning(False):
        given = pytree.tree_map_only(
            Tensor, lambda one: one.to(wide) if one.is_floating_point() else one, _cloned(inputs)
        )
        return copy.deepcopy(model).to(wide)(*given)


def _mode(name: str) -> str:
    return "max-autotune-no-cudagraphs" if "tuned" in name else "default"


def _of_the_whole(verdict: Verdict) -> list[Decision]:
    """That a rival was faster than what is merged, where it was: in calls, in what others capture, or in both."""
    faster: dict[str, str] = {}
    for how, variant in (("called", verdict.calls), ("captured", verdict.captured)):
        if variant is not None and variant.startswith(("folded", "fused")):
            faster[how] = variant
    told = "measured faster as {!r} than with what follows merged"
    if len(faster) == 1 and verdict.captured is not None:
        return [Decision(f"the whole model, {how}", "plain", told.format(one)) for how, one in faster.items()]
    return [Decision("the whole model", "plain", told.format(one)) for one in list(faster.values())[:1]]


def _of_branches(verdict: Verdict, chosen: nn.Module) -> list[Decision]:
    """How many branches run beside each other, where some do."""
    forked = next((one for one in chosen.modules() if isinstance(one, Forked)), None)
    if forked is None:
        return []
    name = "the whole model" if verdict.calls == verdict.captured else "the whole model, captured"
    return [Decision(name, "branches", str(forked.schedule))]


def _decision(one: Choice) -> Decision:
    return Decision(one.name, one.how, one.why, one.edge, one.path, one.predicted_s, one.measured_s, one.apart_s)


def _of_upsampling(one: Upsampled) -> Decision:
    times = one.settled.times
    return Decision(one.name, "upsampling", one.settled.why, None, one.path, None, times.get(one.settled.best))


def _of_concatenation(one: Concatenation) -> Decision:
    why, time_s = f"{one.how}; {one.settled.why}", one.settled.times.get(one.settled.best)
    return Decision(one.name, "concatenation", why, None, None, None, time_s)
