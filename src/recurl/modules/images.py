"""Convolutional image encoders. Images stay uint8 until the first layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from recurl.core.errors import ArgumentError
from recurl.core.torch_compat import is_compiling
from recurl.distributed import merge_max

__all__ = ["ARCHITECTURES", "LAYOUTS", "Architecture", "ImageEncoder", "ImageScale", "Layout", "image_layout"]

Architecture: TypeAlias = Literal["auto", "small", "nature", "impala"]
Layout: TypeAlias = Literal["auto", "hwc", "chw", "hw"]
ARCHITECTURES = ("auto", "small", "nature", "impala")
LAYOUTS = ("auto", "hwc", "chw", "hw")
_MIN_SIDE = {"small": 1, "nature": 36, "impala": 8}
_SMALL_CHANNELS = (16, 32, 64)
_SMALL_SIDE = 8  # images up to this size aren't downsampled
_IMPALA_CHANNELS = (16, 32, 32)
_CHUNK = 256  # images encoded at a time if no gradient is needed


def image_layout(shape: Sequence[int], layout: Layout = "auto") -> Layout:
    """Return the layout of images: ``"hw"``, ``"hwc"`` or ``"chw"``.

    Args:
        shape: shape of one image.
        layout: the layout. ``"auto"`` takes the smaller of the first and last of three dimensions as the channels, the
            last if they are equal.

    Raises:
        ArgumentError: the layout is unknown, or doesn't fit the shape.

    Example:
        >>> image_layout((210, 160, 3)), image_layout((4, 84, 84)), image_layout((84, 84))
        ('hwc', 'chw', 'hw')
    """
    if layout not in LAYOUTS:
        raise ArgumentError(f"An image layout must be one of {', '.join(LAYOUTS)}, got {layout!r}.")
    if len(shape) not in (2, 3) or 0 in shape or (layout != "auto" and len(layout) != len(shape)):
        wanted = "2 or 3 dimensions" if layout == "auto" else f"{len(layout)} dimensions for the layout {layout}"
        raise ArgumentError(f"An image must have {wanted}, none of size 0, got shape {list(shape)}.")
    if layout != "auto":
        return layout
    if len(shape) == 2:
        return "hw"
    return "chw" if shape[0] < shape[-1] else "hwc"


class ImageScale(nn.Module):
    """Scale factor that maps uint8 images to [0, 1]: the inverse of the largest value seen so far.

    Symbolic images, such as MiniGrid's, have values up to 10 although their space allows 255. As with
    :class:`~recurl.modules.ObservationNorm`, only ``update`` changes the factor, between batches.

    Args:
        high: largest value that the space allows, used until the first update.

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
        """Update the largest value by uint8 images of any shape."""
        own = images.amax().to(self.largest.dtype) if images.numel() else self.largest  # other ranks may have images
        self.largest.copy_(torch.maximum(self.largest, merge_max(own)))
        self.factor.copy_(torch.where(self.largest > 0, 1 / self.largest.clamp_min(1), self.factor))


class ImageEncoder(nn.Module):
    """Image encoder: convolutions followed by fully connected layers with ReLU.

    All leading dimensions are flattened into one batch. Images are converted to float32 with channels last, whatever
    their layout, and the scale is folded into the first convolution. If no gradient is needed, 256 images at a time are
    encoded, so that a whole batch needs little memory.

    ``"nature"`` has the three convolutions of Mnih et al., "Human-level control through deep reinforcement learning"
    (2015), ``"impala"`` the residual blocks of Espeholt et al., "IMPALA" (2018), and ``"small"`` three 3x3 convolutions
    (16, 32 and 64 channels), each of which halves images with sides above 8.

    Args:
        shape: shape of one image.
        layout: see :func:`image_layout`.
        architecture: the convolutions; ``"auto"`` selects ``"nature"`` for images of at least 36x36, else ``"small"``.
        width: number of features.
        layers: number of fully connected layers after the convolutions, at least 1.
        scale: scale factor of the values; 1/255 if None.

    Shapes:
        uint8 ``[..., *shape]`` to ``[..., width]``, float32.

    Raises:
        ArgumentError: the architecture is unknown or needs larger images, or the layout doesn't fit; or, when called,
            the input has the wrong trailing shape or dtype.

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
        self.architecture = _resolve_architecture(architecture, height, side)
        self.features = width
        self.scale = ImageScale() if scale is None else scale
        self.first, self.rest = _BUILD[self.architecture](channels, max(height, side))
        with torch.no_grad():
            flat = self._convolve(torch.zeros(1, *self.shape, dtype=torch.uint8)).shape[1]
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
        if torch.is_grad_enabled() or is_compiling():
            features = self.dense(self._convolve(flat))
        else:
            features = torch.cat([self.dense(self._convolve(part)) for part in flat.split(_CHUNK)])
        return features.reshape(*lead, self.features)

    def _convolve(self, images: Tensor) -> Tensor:
        """Return the flattened outputs of the convolutions for images ``[N, *shape]``."""
        if self.layout == "hw":
            images = images.unsqueeze(1)
        elif self.layout == "hwc":
            images = images.permute(0, 3, 1, 2)
        frames = images.to(torch.float32, memory_format=torch.channels_last)
        first = self.first
        weight = first.weight * self.scale.factor
        return self.rest(functional.conv2d(frames, weight, first.bias, first.stride, first.padding)).flatten(1)


def _resolve_architecture(architecture: Architecture, height: int, width: int) -> Architecture:
    if architecture not in ARCHITECTURES:
        raise ArgumentError(f"An image encoder must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}.")
    smaller = min(height, width)
    if architecture == "auto":
        return "nature" if smaller >= _MIN_SIDE["nature"] else "small"
    least = _MIN_SIDE[architecture]
    if smaller < least:
        raise ArgumentError(
            f"The encoder {architecture} needs images of at least {least}x{least}, got {height}x{width}: use auto, "
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
    """Residual block of two convolutions: ``[N, C, H, W]`` to the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolve = nn.Sequential(
            nn.ReLU(),  # not in place: its input is added below
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the sum of input and residual."""
        return images + self.convolve(images)
