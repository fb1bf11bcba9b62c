"""Steps of a model: one forward pass, or one training iteration, as a case asks for it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from joulemark.errors import ConfigurationError, Unsupported
from joulemark.records import Case
from joulemark.workloads import inputs, modes, parallel, precision
from joulemark.workloads.base import PhaseMarks, Step
from joulemark.workloads.inputs import Arrange, Batch, Feed
from joulemark.workloads.spec import ModelSpec, PhaseView, as_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

LAYOUTS = ("contiguous", "channels_last")


def seed_of(text: str) -> int:
    """A seed that only depends on the text, 0 ≤ seed < 2**63 (Python's own hash changes from process to process)."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9; a small rate, so that long windows do not end on a model that has learnt its batches."""
    import torch

    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW of a small rate, as the fused kernel: its step count stays on the device, so a CUDA graph can hold it."""
    import torch

    listed = list(parameters)
    on_cuda = all(one.is_cuda for one in listed)
    return torch.optim.AdamW(listed, lr=1e-5, fused=True, capturable=on_cuda)


@dataclass(frozen=True)
class TorchWorkload:
    """A model that is measured as its spec says.

    Phases ``inference``, ``prefill`` and ``decode`` are one forward pass without gradients. ``train`` is one iteration:
    gradients to None, forward, loss, backward, optimizer. See :mod:`joulemark.workloads.precision` for the dtypes,
    :mod:`~joulemark.workloads.modes` for the modes, :mod:`~joulemark.workloads.inputs` for the inputs.
    """

    spec: ModelSpec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def phases(self) -> tuple[str, ...]:
        return self.spec.phases

    def build(self, case: Case, device: str) -> Step:
        """The step of a case; weights and data follow from the case's label alone.

        What a case leaves open is the spec's first phase, eager, fp32, contiguous, device, batch size 1.

        Raises:
            Unsupported: the case makes no sense for this model or device.
            ConfigurationError: an axis has an unknown value.
        """
        return _Builder(self.spec, case, device).build()


class _Builder:
    """Builds the step of one case."""

    def __init__(self, spec: ModelSpec, case: Case, device: str) -> None:
        self.spec, self.device = spec, device
        self.phase = case.phase or spec.phases[0]
        self.mode = case.mode or "eager"
        self.dtype = case.dtype or "fp32"
        self.batch_size = case.batch_size or 1
        self.source = case.input or "device"
        self.layout = case.layout or "contiguous"
        self.world_size = case.world_size
        self.rank = 0
        self.seed = seed_of(case.label)
        self.view: PhaseView | None = spec.views.get(self.phase)
        self.training = self.phase == "train"

    def build(self) -> Step:
        import torch

        self._check()
        if self.world_size > 1:
            self.rank = parallel.join(self.device).rank
        precision.set_fp32(tf32=self.dtype == "tf32")
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            model = self.spec.model()
        arrange = Arrange(precision.weights_dtype(self.dtype, self.training), self.layout == "channels_last")
        _arrange_model(model.to(self.device), arrange)
        model.train(self.training)
        rotate = self.mode != "graph"
        # Every rank trains on batches of its own.
        seed = seed_of(f"{self.seed} rank {self.rank}") if self.rank else self.seed
        feed = inputs.feed_for(self.source, self._make, self.batch_size, seed, self.device, arrange, rotate)
        try:
            example = feed()
            self._check_batch(example)
            return self._training(model, feed, example) if self.training else self._forward(model, feed, example)
        except BaseException:
            feed.close()
            raise

    def _check(self) -> None:
        name = self.spec.name
        if self.phase not in self.spec.phases:
            raise Unsupported(f"{name} has no phase {self.phase!r}", f"it has {', '.join(self.spec.phases)}")
        if self.world_size != 1 and (not self.training or self.mode == "graph"):
            what = "training" if not self.training else "eager or compiled steps"
            raise Unsupported(f"{name} on {self.world_size} devices: only {what} can be data-parallel")
        if self.layout not in LAYOUTS:
            raise ConfigurationError(f"the layout {self.layout!r} is not known", f"it takes {', '.join(LAYOUTS)}")
        precision.check(self.dtype, self.device)
        modes.check(self.mode, self.phase, self.device)

    def _check_batch(self, batch: Batch) -> None:
        inputs.warn_of_zeros(self.spec.name, batch)
        images = any(tensor.is_floating_point() and tensor.dim() == 4 for tensor in batch)
        if self.layout == "channels_last" and not images:
            raise Unsupported(f"channels_last is a layout of images, and {self.spec.name} takes none", "use contiguous")

    def _make(self, batch_size: int, generator: torch.Generator, device: str) -> Batch:
        """Inputs, then the targets where a loss needs them."""
        draw = self.spec.inputs if self.view is None else self.view.inputs
        batch = as_tensors(draw(batch_size, generator, device))
        if self.training and self.spec.targets is not None:
            batch += as_tensors(self.spec.targets(batch_size, generator, device))
        return tuple(tensor.to(device) for tensor in batch)

    @property
    def _items(self) -> int:
        per_sample = self.spec.items_per_sample if self.view is None else self.view.items_per_sample
        return self.batch_size * per_sample

    def _forward(self, model: nn.Module, feed: Feed, example: Batch) -> Step:
        import torch

        module = model if self.view is None else self.view.module(model, self.batch_size)
        module.eval().requires_grad_(False)
        call: Callable[..., Any] = module
        if self.mode == "compile":
            call = modes.compiled(module)
        elif self.mode == "jit":
            with torch.no_grad():
                call = modes.traced(module, example)
        elif self.mode == "merged":
            call = modes.merged(module, example)

        def forward(batch: Batch) -> object:
            with torch.no_grad():
                return call(*batch)

        return self._step(forward, feed, example, capturable=True)

    def _training(self, model: nn.Module, feed: Feed, example: Batch) -> Step:
        trained = [one for one in model.parameters() if one.requires_grad]
        if not trained:
            raise Unsupported(f"{self.spec.name} has no parameter to train", "measure its inference")
        if self.world_size > 1:
            model = parallel.replicated(model, self.device)
        optimizer = (self.spec.optimizer or adamw)(trained)
        _start(optimizer)
        scaler = precision.scaler(self.dtype, self.device)
        capturable = scaler is None and _capturable(optimizer) and self.world_size == 1
        if self.mode == "graph" and not capturable:
            why = "GradScaler reads its scale on the host" if scaler else "its optimizer is not capturable"
            raise Unsupported(
                f"a training step under a CUDA graph is not possible here: {why}", "use bf16 and AdamW or SGD"
            )
        objective = self._objective(model, len(example))
        if self.mode == "compile":
            objective = modes.compiled(objective)
        marks = PhaseMarks()
        iterate = _iteration(objective, optimizer, scaler, lambda: precision.autocast(self.dtype, self.device), marks)
        return self._step(iterate, feed, example, capturable, marks)

    def _objective(self, model: nn.Module, tensors: int) -> Callable[..., torch.Tensor]:
        """Inputs and targets to a scalar loss."""
        if self.spec.loss is None:
            warnings.warn(
                f"{self.spec.name} brings no loss: its training step minimizes the mean square of the output",
                stacklevel=2,
            )
            return lambda *batch: mean_square(model(*batch))
        loss, targets = self.spec.loss, self.spec.targets
        count = tensors if targets is None else tensors - self._count_targets()
        return lambda *batch: loss(model(*batch[:count]), *batch[count:])

    def _count_targets(self) -> int:
        import torch

        assert self.spec.targets is not None
        return len(as_tensors(self.spec.targets(1, torch.Generator(), "cpu")))

    def _step(
        self,
        body: Callable[[Batch], object],
        feed: Feed,
        example: Batch,
        capturable: bool,
        marks: PhaseMarks | None = None,
    ) -> Step:
        """The step around its body: a fresh batch each time, or a replay over the same addresses."""
        if self.mode != "graph":

            def run() -> object:
                if marks is not None:
                    marks("input")
                return body(feed())

            resident = self.source == "device" and self.mode == "eager"
            can = resident and capturable
            return Step(run, self._items, self.spec.unit, capturable=can, close=feed.close, phases=marks)
        static = example
        replay = modes.captured(lambda: body(static), self.device)

        def refill() -> None:
            feed.fill(static)
            replay()

        return Step(refill, self._items, self.spec.unit, close=feed.close)


def _arrange_model(model: nn.Module, arrange: Arrange) -> None:
    import torch

    if arrange.dtype is not None:
        model.to(arrange.dtype)
    if arrange.channels_last:
        model.to(memory_format=torch.channels_last)


def _iteration(
    objective: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    autocast: Callable[[], Any],
    marks: PhaseMarks,
) -> Callable[[Batch], object]:
    """One training iteration on a batch; gives the loss, on the device."""

    def iterate(batch: Batch) -> object:
        optimizer.zero_grad(set_to_none=True)
        marks("forward")
        with autocast():
            loss = objective(*batch)
        marks("backward")
        if scaler is None:
            loss.backward()
            marks("optimizer")
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            marks("optimizer")
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return iterate


def mean_square(output: Any) -> torch.Tensor:
    """The mean square of the first floating-point tensor of an output (a tensor, sequence, mapping or dataclass)."""
    tensor = _first_floating(output)
    if tensor is None:
        raise Unsupported(f"no floating-point tensor is in the model's output ({type(output).__name__})", "give a loss")
    return tensor.float().square().mean()


def _first_floating(output: Any) -> torch.Tensor | None:
    import torch

    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        parts: Iterable[Any] = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    else:
        parts = vars(output).values() if hasattr(output, "__dict__") else ()
    found = (_first_floating(part) for part in parts)
    return next((tensor for tensor in found if tensor is not None), None)


def _capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a CUDA graph can hold the optimizer's step. SGD has no such flag: it keeps no state on the host."""
    import torch

    if isinstance(optimizer, torch.optim.SGD):
        return True
    return all(group.get("capturable", False) for group in optimizer.param_groups)


def _start(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that may be captured say now, once, that it is not being captured: here that is no news.

    No gradient exists yet, so nothing is updated.
    """
    if not any(group.get("capturable") for group in optimizer.param_groups):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True.*")
        optimizer.step()
