"""Convolutional networks that torchvision lacks, written from their papers: what merged execution is judged by.

Imports torch: only the zoo's builders import this module.
"""

# mypy: disallow-subclassing-any=False
# (types of torch are not followed, so that checks are the same with and without it)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Size = int | tuple[int, ...]


def _same(kernel: Size, dilation: int = 1) -> Size:
    """The padding that keeps the size at stride 1, for odd kernels."""
    if isinstance(kernel, int):
        return dilation * (kernel - 1) // 2
    return tuple(dilation * (one - 1) // 2 for one in kernel)


class ConvNorm(nn.Sequential):
    """A convolution without bias, a batch norm, and an activation where one is given."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: Size,
        stride: Size = 1,
        *,
        padding: Size | None = None,
        dilation: int = 1,
        groups: int = 1,
        activation: Callable[[], nn.Module] | None = lambda: nn.ReLU(inplace=True),
        dimensions: int = 2,
    ) -> None:
        convolution = (nn.Conv2d, nn.Conv3d)[dimensions - 2]
        norm = (nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 2]
        padding = _same(kernel, dilation) if padding is None else padding
        layers: list[nn.Module] = [
            convolution(inputs, outputs, cast(Any, kernel), cast(Any, stride), cast(Any, padding), dilation, groups,
                        bias=False),
            norm(outputs),
        ]  # fmt: skip
        super().__init__(*layers, *([] if activation is None else [activation()]))


class BasicBlock(nn.Module):
    """Two 3^d convolutions and a residual (He et al., 2016), in two or three dimensions, dilated or not."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int = 1,
        dilations: tuple[int, int] = (1, 1),
        residual: bool = True,
        dimensions: int = 2,
    ) -> None:
        super().__init__()
        first, second = dilations
        self.first = ConvNorm(inputs, outputs, 3, stride, dilation=first, dimensions=dimensions)
        self.second = ConvNorm(outputs, outputs, 3, dilation=second, activation=None, dimensions=dimensions)
        self.shortcut: nn.Module | None = None
        if residual:
            changes = stride != 1 or inputs != outputs
            self.shortcut = (
                ConvNorm(inputs, outputs, 1, stride, activation=None, dimensions=dimensions)
                if changes
                else nn.Identity()
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if self.shortcut is not None:
            y = y + self.shortcut(x)
        return cast("Tensor", self.relu(y))


class Drn26(nn.Sequential):
    """DRN-C-26 of Yu, Koltun, Funkhouser, *Dilated Residual Networks* (CVPR 2017): stride 8, then dilations 2 and 4.

    The last two stages have no residuals, which removes gridding. Input (B, 3, H, W), output (B, classes).
    """

    def __init__(self, classes: int = 1000) -> None:
        def stage(inputs: int, outputs: int, blocks: int, stride: int, first: int, dilation: int) -> nn.Sequential:
            dilations = [(first, dilation)] + [(dilation, dilation)] * (blocks - 1)
            made = [
                BasicBlock(inputs if n == 0 else outputs, outputs, stride if n == 0 else 1, one)
                for n, one in enumerate(dilations)
            ]
            return nn.Sequential(*made)

        super().__init__(
            ConvNorm(3, 16, 7),
            stage(16, 16, 1, 1, 1, 1),
            stage(16, 32, 1, 2, 1, 1),
            stage(32, 64, 2, 2, 1, 1),
            stage(64, 128, 2, 2, 1, 1),
            stage(128, 256, 2, 1, 2, 2),
            stage(256, 512, 2, 1, 4, 4),
            BasicBlock(512, 512, dilations=(2, 2), residual=False),
            BasicBlock(512, 512, residual=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(512, classes),
        )


class ResNet3d34(nn.Sequential):
    """3-D ResNet-34 of Hara, Kataoka, Satoh, *Can Spatiotemporal 3D CNNs Retrace the History of 2D CNNs?* (CVPR 2018).

    Shortcuts that change the shape are convolutions. Input (B, 3, T, H, W), output (B, classes).
    """

    def __init__(self, classes: int = 400) -> None:
        layers: list[nn.Module] = [ConvNorm(3, 64, 7, (1, 2, 2), dimensions=3), nn.MaxPool3d(3, 2, 1)]
        inputs = 64
        for number, blocks in enumerate((3, 4, 6, 3)):
            outputs = 64 << number
            for block in range(blocks):
                stride = 2 if block == 0 and number > 0 else 1
                layers.append(BasicBlock(inputs, outputs, stride, dimensions=3))
                inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _leaky() -> nn.Module:
    return nn.LeakyReLU(0.1, inplace=True)


class DarkBlock(nn.Module):
    """1×1 to half of the channels, 3×3 back, and a residual without an activation behind it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.narrow = ConvNorm(channels, channels // 2, 1, activation=_leaky)
        self.wide = ConvNorm(channels // 2, channels, 3, activation=_leaky)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", x + self.wide(self.narrow(x)))


class DarkNet53(nn.Sequential):
    """The classifier of Redmon, Farhadi, *YOLOv3: An Incremental Improvement* (2018).

    Input (B, 3, H, W), output (B, classes).
    """

    def __init__(self, classes: int = 1000) -> None:
        layers: list[nn.Module] = [ConvNorm(3, 32, 3, activation=_leaky)]
        for number, blocks in enumerate((1, 2, 8, 8, 4)):
            outputs = 64 << number
            layers.append(ConvNorm(outputs // 2, outputs, 3, 2, activation=_leaky))
            layers += [DarkBlock(outputs) for _ in range(blocks)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, classes))


class Branches(nn.Module):
    """The outputs of several branches on one input, side by side in the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _inception_a() -> nn.Module:
    return Branches(
        ConvNorm(384, 96, 1),
        nn.Sequential(ConvNorm(384, 64, 1), ConvNorm(64, 96, 3)),
        nn.Sequential(ConvNorm(384, 64, 1), ConvNorm(64, 96, 3), ConvNorm(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), ConvNorm(384, 96, 1)),
    )


def _inception_b() -> nn.Module:
    row, column = (1, 7), (7, 1)
    return Branches(
        ConvNorm(1024, 384, 1),
        nn.Sequential(ConvNorm(1024, 192, 1), ConvNorm(192, 224, row), ConvNorm(224, 256, column)),
        nn.Sequential(
            ConvNorm(1024, 192, 1), ConvNorm(192, 192, column), ConvNorm(192, 224, row),
            ConvNorm(224, 224, column), ConvNorm(224, 256, row),
        ),
        nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), ConvNorm(1024, 128, 1)),
    )  # fmt: skip


def _inception_c() -> nn.Module:
    def both(inputs: int) -> nn.Module:
        return Branches(ConvNorm(inputs, 256, (1, 3)), ConvNorm(inputs, 256, (3, 1)))

    return Branches(
        ConvNorm(1536, 256, 1),
        nn.Sequential(ConvNorm(1536, 384, 1), both(384)),
        nn.Sequential(ConvNorm(1536, 384, 1), ConvNorm(384, 448, (3, 1)), ConvNorm(448, 512, (1, 3)), both(512)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), ConvNorm(1536, 256, 1)),
    )


class InceptionV4(nn.Sequential):
    """Szegedy, Ioffe, Vanhoucke, Alemi, *Inception-v4, Inception-ResNet and the Impact of Residual Connections* (2017).

    Input (B, 3, H, W) with H and W of at least 75 (299 in the paper), output (B, classes); 42,679,816 parameters.
    """

    def __init__(self, classes: int = 1000) -> None:
        stem = (
            ConvNorm(3, 32, 3, 2, padding=0),
            ConvNorm(32, 32, 3, padding=0),
            ConvNorm(32, 64, 3),
            Branches(nn.MaxPool2d(3, 2), ConvNorm(64, 96, 3, 2, padding=0)),
            Branches(
                nn.Sequential(ConvNorm(160, 64, 1), ConvNorm(64, 96, 3, padding=0)),
                nn.Sequential(
                    ConvNorm(160, 64, 1), ConvNorm(64, 64, (1, 7)), ConvNorm(64, 64, (7, 1)),
                    ConvNorm(64, 96, 3, padding=0),
                ),
            ),
            Branches(ConvNorm(192, 192, 3, 2, padding=0), nn.MaxPool2d(3, 2)),
        )  # fmt: skip
        reduction_a = Branches(
            ConvNorm(384, 384, 3, 2, padding=0),
            nn.Sequential(ConvNorm(384, 192, 1), ConvNorm(192, 224, 3), ConvNorm(224, 256, 3, 2, padding=0)),
            nn.MaxPool2d(3, 2),
        )
        reduction_b = Branches(
            nn.Sequential(ConvNorm(1024, 192, 1), ConvNorm(192, 192, 3, 2, padding=0)),
            nn.Sequential(
                ConvNorm(1024, 256, 1), ConvNorm(256, 256, (1, 7)), ConvNorm(256, 320, (7, 1)),
                ConvNorm(320, 320, 3, 2, padding=0),
            ),
            nn.MaxPool2d(3, 2),
        )  # fmt: skip
        super().__init__(
            *stem,
            *(_inception_a() for _ in range(4)),
            reduction_a,
            *(_inception_b() for _ in range(7)),
            reduction_b,
            *(_inception_c() for _ in range(3)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(1536, classes),
        )


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, outputs, 3), ConvNorm(outputs, outputs, 3))


class UNet(nn.Module):
    """Ronneberger, Fischer, Brox, *U-Net* (MICCAI 2015), with padding and batch norms as is usual today.

    Input (B, channels, H, W) of any size of at least 16, output (B, classes, H, W).
    """

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(_pair(a, b) for a, b in zip([channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_pair(2 * one, one) for one in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else self.pool(x))
            skips.append(x)
        for up, block, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = block(torch.cat([skip, _fitted(up(x), skip)], 1))
        return cast("Tensor", self.head(x))


def _fitted(x: Tensor, like: Tensor) -> Tensor:
    """Padded at its far ends to the size of a tensor that is at most one larger: odd sizes lose one when halved."""
    rows, columns = like.shape[2] - x.shape[2], like.shape[3] - x.shape[3]
    return F.pad(x, [0, columns, 0, rows])


class DeepCam(nn.Module):
    """A segmentation network in the manner of DeepCAM.

    DeepLabv3+ over an encoder of ResNet-50 whose last stage is dilated, and a decoder at full resolution, as in Kurth
    et al., *Exascale Deep Learning for Climate Analytics* (SC 2018).

    Input (B, channels, H, W) of 16 fields, output (B, classes, H, W).

    Args:
        encoder: torchvision's ResNet-50 with output stride 16.
        channels: of the input.
        classes: of the output.
    """

    rates = (6, 12, 18)

    def __init__(self, encoder: nn.Module, channels: int = 16, classes: int = 3) -> None:
        super().__init__()
        parts = cast(Any, encoder)
        self.stem = ConvNorm(channels, 64, 7, 2)
        self.shallow = nn.Sequential(parts.maxpool, parts.layer1)
        self.deep = nn.Sequential(parts.layer2, parts.layer3, parts.layer4)
        self.pyramid = Branches(ConvNorm(2048, 256, 1), *(ConvNorm(2048, 256, 3, dilation=one) for one in self.rates))
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2048, 256, 1), nn.ReLU(inplace=True))
        self.project = ConvNorm(5 * 256, 256, 1)
        self.skip = ConvNorm(256, 48, 1)
        self.refine = nn.Sequential(ConvNorm(304, 256, 3), ConvNorm(256, 256, 3))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in ((256, 128), (128, 64)))
        self.mix = nn.ModuleList((ConvNorm(128 + 64, 128, 3), ConvNorm(64, 64, 3)))
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = self.stem(x)
        quarter = self.shallow(half)
        y = self.deep(quarter)
        pooled = self.image(y).expand(-1, -1, y.shape[2], y.shape[3])
        y = self.project(torch.cat([self.pyramid(y), pooled], 1))
        y = F.interpolate(y, size=quarter.shape[2:], mode="bilinear", align_corners=False)
        y = self.refine(torch.cat([y, self.skip(quarter)], 1))
        y = self.mix[0](torch.cat([_cropped(self.up[0](y), half), half], 1))
        return cast("Tensor", self.head(self.mix[1](_cropped(self.up[1](y), x))))


def _cropped(x: Tensor, like: Tensor) -> Tensor:
    """Cut at its far ends to the size of a tensor that is at most one smaller."""
    return x[:, :, : like.shape[2], : like.shape[3]]
