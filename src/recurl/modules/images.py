"""Convolutional encoders of images, which stay uint8 until the first layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from recurl.distributed import merge_max
from recurl.errors import ArgumentError

__all__ = ["ARCHITECTURES", "LAYOUTS", "Architecture", "ImageEncoder", "ImageScale", "Layout", "image_layout"]

Architecture: TypeAlias = Literal["auto", "small", "nature", "impala"]
Layout: TypeAlias = Literal["auto", "hwc", "chw", "hw"]
ARCHITECTURES = ("auto", "small", "nature", "impala")
LAYOUTS = ("auto", "hwc", "chw", "hw")
_LEAST_SIDE = {"small": 1, "nature": 36, "impala": 8}
_SMALL_CHANNELS = (16, 32, 64)
_SMALL_SIDE = 8  # images up to here aren't made smaller
_IMPALA_CHANNELS = (16, 32, 32)
_AT_ONCE = 256  # images whose features are computed together where no gradient needs them


def image_layout(shape: Sequence[int], layout: Layout = "auto") -> Layout:
    """Return the layout of images: ``"hw"``, ``"hwc"`` or ``"chw"``.

    Args:
        shape: shape of one image.
        layout: the layout; ``"auto"`` takes the smaller of the first and last of three dimensions as the channels, and
            the last if they are equal.

    Raises:
        ArgumentError: there is no such layout, or images of this shape can't have it.

    Example:
        >>> image_layout((210, 160, 3)), image_layout((4, 84, 84)), image_layout((84, 84))
        ('hwc', 'chw', 'hw')
    """
    if layout not in LAYOUTS:
        raise ArgumentError(f"An image layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if len(shape) not in (2, 3) or 0 in shape or (layout != "auto" and len(layout) != len(shape)):
        wanted = "2 or 3 dimensions" if layout == "auto" else f"{len(layout)} dimensions for the layout {layout}"
        raise ArgumentError(f"An image must have {wanted}, none of them empty, got shape {list(shape)}.")
    if layout != "auto":
        return layout
    if len(shape) == 2:
        return "hw"
    return "chw" if shape[0] < shape[-1] else "hwc"


class ImageScale(nn.Module):
    """Factor that brings the values of uint8 images into [0, 1]: the inverse of the largest value seen so far.

    Images of symbols, such as MiniGrid's, hold values up to 10 where their space allows 255. As with
    :class:`~recurl.modules.ObservationNorm`, only ``update`` changes the factor, between batches.

    Args:
        high: largest value that the space allows; it counts until the first update.

    Example:
        >>> scale = ImageScale()
        >>> scale.update(torch.tensor([[0, 10]], dtype=torch.uint8))
        >>> scale.factor
        tensor(0.1000)
    """

    def __init__(self, high: int = 255) -> None:
        super().__init__()
        self.largest = nn.Buffer(torch.zeros(()))
        self.factor = nn.Buffer(torch.tensor(1 / max(high, 1)))

    @torch.no_grad()
    def update(self, images: Tensor) -> None:
        """Take images, uint8 of any shape, into account."""
        own = images.amax().to(self.largest.dtype) if images.numel() else self.largest  # other ranks may have some
        self.largest.copy_(torch.maximum(self.largest, merge_max(own)))
        self.factor.copy_(torch.where(self.largest > 0, 1 / self.largest.clamp_min(1), self.factor))


class ImageEncoder(nn.Module):
    """Features of images: convolutions, then fully connected layers with ReLU.

    All leading dimensions go through the convolutions at once. Images are read in float32 with channels last, whatever
    their layout, and their scale is folded into the first convolution. Where no gradient is needed, 256 images at a
    time are encoded, so that a whole batch needs little memory.

    ``"nature"`` has the three convolutions of Mnih et al., "Human-level control through deep reinforcement learning"
    (2015), ``"impala"`` the residual blocks of Espeholt et al., "IMPALA" (2018), ``"small"`` three convolutions of 3x3
    (16, 32 and 64 channels), which halve images of sides above 8.

    Args:
        shape: shape of one image.
        layout: see :func:`image_layout`.
        architecture: the convolutions; ``"auto"`` takes ``"nature"`` for images of at least 36x36, else ``"small"``.
        width: number of features.
        layers: fully connected layers after the convolutions, at least 1.
        scale: factor of the values; 1/255 when None.

    Shapes:
        uint8 ``[..., *shape]`` to ``[..., width]``, float32.

    Raises:
        ArgumentError: the architecture is unknown or needs larger images, or the layout doesn't fit; or the input ends
            with another shape or has another dtype.

    Example:
        >>> encoder = ImageEncoder((24, 24, 3), width=32)
        >>> encoder.architecture, encoder(torch.zeros(5, 2, 24, 24, 3, dtype=torch.uint8)).shape
        ('small', torch.Size([5, 2, 32]))
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        layout: Layout = "auto",
        architecture: Architecture = "auto",
        width: int = 512,
        layers: int = 1,
        scale: ImageScale | None = None,
    ) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        self.layout = image_layout(shape, layout)
        channels, height, side = self._sizes()
        self.architecture = _fitting(architecture, height, side)
        self.features = width
        self.scale = ImageScale() if scale is None else scale
        self.first, self.rest = _BUILD[self.architecture](channels, max(height, side))
        with torch.no_grad():
            flat = self._convolved(torch.zeros(1, *self.shape, dtype=torch.uint8)).shape[1]
        sizes = [flat, *[width] * layers]
        self.dense = nn.Sequential(*(part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(module.weight, math.sqrt(2))
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def _sizes(self) -> tuple[int, int, int]:
        """Return channels, height and width of the images."""
        if self.layout == "hw":
            return 1, self.shape[0], self.shape[1]
        if self.layout == "chw":
            return self.shape[0], self.shape[1], self.shape[2]
        return self.shape[2], self.shape[0], self.shape[1]

    def forward(self, images: Tensor) -> Tensor:
        """Return the features."""
        lead = images.shape[: images.ndim - len(self.shape)]
        if images.dtype != torch.uint8 or images.shape[len(lead) :] != self.shape:
            raise ArgumentError(
                f"Images must be torch.uint8 of shape [..., {', '.join(map(str, self.shape))}], got {images.dtype} of "
                f"shape {list(images.shape)}."
            )
        flat = images.reshape(-1, *self.shape)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            features = self.dense(self._convolved(flat))
        else:
            features = torch.cat([self.dense(self._convolved(part)) for part in flat.split(_AT_ONCE)])
        return features.reshape(*lead, self.features)

    def _convolved(self, images: Tensor) -> Tensor:
        """Return the flattened results of the convolutions of ``[N, *shape]``."""
        if self.layout == "hw":
            images = images.unsqueeze(1)
        elif self.layout == "hwc":
            images = images.permute(0, 3, 1, 2)
        frames = images.to(torch.float32, memory_format=torch.channels_last)
        first = self.first
        weight = first.weight * self.scale.factor
        return self.rest(functional.conv2d(frames, weight, first.bias, first.stride, first.padding)).flatten(1)


def _fitting(architecture: Architecture, height: int, width: int) -> Architecture:
    if architecture not in ARCHITECTURES:
        raise ArgumentError(f"An image encoder must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}.")
    smaller = min(height, width)
    if architecture == "auto":
        return "nature" if smaller >= _LEAST_SIDE["nature"] else "small"
    least = _LEAST_SIDE[architecture]
    if smaller < least:
        raise ArgumentError(
            f"The encoder {architecture} needs images of at least {least}x{least}, got {height}x{width}: take auto, "
            "which has an encoder for small images."
        )
    return architecture


def _small(channels: int, side: int) -> tuple[nn.Conv2d, nn.Module]:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *_SMALL_CHANNELS)):
        stride = 2 if side > _SMALL_SIDE else 1
        side = -(-side // stride)
        layers += [nn.Conv2d(inputs, outputs, 3, stride, padding=1), nn.ReLU(inplace=True)]
    return _split(layers)


def _nature(channels: int, side: int) -> tuple[nn.Conv2d, nn.Module]:
    del side
    first, second, third = nn.Conv2d(channels, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
    return _split([layer for part in (first, second, third) for layer in (part, nn.ReLU(inplace=True))])


def _impala(channels: int, side: int) -> tuple[nn.Conv2d, nn.Module]:
    del side
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((channels, *_IMPALA_CHANNELS)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(3, 2, padding=1)]
        layers += [_Residual(outputs), _Residual(outputs)]
    return _split([*layers, nn.ReLU(inplace=True)])


def _split(layers: list[nn.Module]) -> tuple[nn.Conv2d, nn.Module]:
    first = layers[0]
    assert isinstance(first, nn.Conv2d)
    return first, nn.Sequential(*layers[1:])


_BUILD = {"small": _small, "nature": _nature, "impala": _impala}


class _Residual(nn.Module):
    """Two convolutions beside an identity: ``[N, C, H, W]`` to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = nn.Sequential(
            nn.ReLU(),  # not in place: its input is added below
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum."""
        return images + self.convolve(images)
