"""Models written for the zoo from torch.nn: LeNet-5, a BERT-base-sized encoder, a GPT-2-small-sized decoder.

Imports torch: only the zoo's builders import this module.
"""

# mypy: disallow-subclassing-any=False
# (types of torch are not followed, so that checks are the same with and without it)

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LeNet5(nn.Sequential):
    """LeCun et al., *Gradient-based learning applied to document recognition* (1998), with a plain linear output.

    Input (B, 1, 32, 32), output (B, 10); 61,706 parameters.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
        )  # fmt: skip


def settle_batch_norms(model: nn.Module, images: Tensor) -> None:
    """Give batch norms the statistics of a batch, as training would.

    With the statistics of an untrained network activations shrink from layer to layer, in FP16 to zero, and zeros are
    faster and take less energy than data.
    """
    norms = [one for one in model.modules() if isinstance(one, (nn.BatchNorm2d, nn.BatchNorm3d))]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


@dataclass(frozen=True)
class TransformerSize:
    """The size of a transformer.

    Args:
        vocabulary: number of tokens.
        positions: longest sequence.
        width: of the residual stream; the feed-forward layers are four times as wide.
        layers, heads: number of blocks, and of attention heads in each.
        dropout: in training.
    """

    vocabulary: int
    positions: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1


BERT_BASE = TransformerSize(vocabulary=30522, positions=512)
GPT2_SMALL = TransformerSize(vocabulary=50257, positions=1024)


class Attention(nn.Module):
    """Multi-head self-attention by ``scaled_dot_product_attention``."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.head_width = size.width // size.heads
        self.dropout = size.dropout
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, causal: bool, cache: Tensor | None = None, position: int = 0) -> Tensor:
        """Attend within ``x`` (B, T, width), or to what ``cache`` holds as well.

        Args:
            x: the sequence.
            causal: each token sees itself and those before it; for several tokens at ``position`` 0 only.
            cache: (2, B, heads, C, head_width); keys and values of ``x`` are written into it at ``position``, and
                everything up to them is attended to.
            position: of the first token of ``x``.
        """
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.heads, self.head_width)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            end = position + length
            cache[0, :, :, position:end].copy_(key)
            cache[1, :, :, position:end].copy_(value)
            key, value = cache[0, :, :, :end], cache[1, :, :, :end]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal)
        return cast("Tensor", self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def _feed_forward(size: TransformerSize, approximate: str) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(size.width, 4 * size.width),
        nn.GELU(approximate),
        nn.Linear(4 * size.width, size.width),
    )


def _initialize(model: nn.Module) -> None:
    """Normal weights of deviation 0.02 and zero biases."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class EncoderBlock(nn.Module):
    """Attention and feed-forward, each followed by a layer norm (BERT)."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.attention = Attention(size)
        self.attention_norm = nn.LayerNorm(size.width, eps=1e-12)
        self.feed_forward = _feed_forward(size, "none")
        self.output_norm = nn.LayerNorm(size.width, eps=1e-12)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, False)))
        return cast("Tensor", self.output_norm(x + self.dropout(self.feed_forward(x))))


class BertClassifier(nn.Module):
    """A BERT encoder with its pooler and a linear head over two classes (Devlin et al., 2019).

    Input token ids (B, T), full length (no padding mask); output (B, 2). 109,483,778 parameters in base size.
    """

    def __init__(self, size: TransformerSize = BERT_BASE, classes: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.segments = nn.Embedding(2, size.width)
        self.norm = nn.LayerNorm(size.width, eps=1e-12)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(EncoderBlock(size) for _ in range(size.layers)))
        self.pooler = nn.Sequential(nn.Linear(size.width, size.width), nn.Tanh())
        self.head = nn.Linear(size.width, classes)
        _initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[:length] + self.segments.weight[0]
        x = self.blocks(self.dropout(self.norm(x)))
        return cast("Tensor", self.head(self.dropout(self.pooler(x[:, 0]))))


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each preceded by a layer norm (GPT-2)."""

    def __init__(self, size: TransformerSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.feed_forward = _feed_forward(size, "tanh")
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x: Tensor, causal: bool, cache: Tensor | None, position: int) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), causal, cache, position))
        return x + cast("Tensor", self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class Gpt2(nn.Module):
    """A GPT-2 decoder whose output shares the weights of its token embedding (Radford et al., 2019).

    Input token ids (B, T), output logits (B, T, vocabulary). 124,439,808 parameters in small size.
    """

    def __init__(self, size: TransformerSize = GPT2_SMALL) -> None:
        super().__init__()
        self.size = size
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        _initialize(self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens, causal=True))

    def hidden(self, tokens: Tensor, causal: bool, cache: Tensor | None = None, position: int = 0) -> Tensor:
        """The residual stream (B, T, width) after the last norm; ``cache`` is that of :func:`empty_cache`."""
        length = tokens.shape[1]
        x = self.dropout(self.tokens(tokens) + self.positions.weight[position : position + length])
        for index, block in enumerate(self.blocks):
            x = block(x, causal, None if cache is None else cache[index], position)
        return cast("Tensor", self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.tokens.weight)


def empty_cache(model: Gpt2, batch_size: int, context: int) -> Tensor:
    """Room for keys and values: (layers, 2, B, heads, context, head_width), at fixed addresses, yet to be filled."""
    size, weight = model.size, model.tokens.weight
    shape = (size.layers, 2, batch_size, size.heads, context, size.width // size.heads)
    return torch.empty(shape, dtype=weight.dtype, device=weight.device)


class Prefill(nn.Module):
    """Reads a prompt: fills the cache of keys and values and gives the logits of the next token (B, vocabulary)."""

    cache: Tensor

    def __init__(self, model: Gpt2, batch_size: int, context: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("cache", empty_cache(model, batch_size, context))

    def forward(self, prompt: Tensor) -> Tensor:
        hidden = self.model.hidden(prompt, True, self.cache)
        return self.model.logits(hidden[:, -1])


class Decode(nn.Module):
    """Generates one token per sample, always the last one of a context of fixed length.

    Each call writes the token's keys and values at the same place of the cache and attends to all of it, so every call
    costs the same and uses the same addresses. The cache holds those of a random prompt, computed here.

    Args:
        model: the decoder.
        batch_size: samples.
        context: length of the sequence, the new token included.
        prompt: token ids (B, context - 1); random when None.
    """

    cache: Tensor
    _fill_samples = 8

    def __init__(self, model: Gpt2, batch_size: int, context: int, prompt: Tensor | None = None) -> None:
        super().__init__()
        self.model = model
        self.position = context - 1
        self.register_buffer("cache", empty_cache(model, batch_size, context))
        device = model.tokens.weight.device
        if prompt is None:
            prompt = torch.randint(1, model.size.vocabulary, (batch_size, context - 1), device=device)
        model.eval()
        with torch.no_grad():
            # A few samples at a time: the prompt's activations must not set the peak of the memory.
            for start in range(0, batch_size, self._fill_samples):
                part = slice(start, start + self._fill_samples)
                model.hidden(prompt[part], True, self.cache[:, :, part])

    def forward(self, token: Tensor) -> Tensor:
        hidden = self.model.hidden(token, False, self.cache, self.position)
        return self.model.logits(hidden[:, -1])
