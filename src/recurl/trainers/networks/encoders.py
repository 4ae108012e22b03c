"""Observation encoders: one for all vectors, one per image, concatenated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recurl.core.errors import ArgumentError
from recurl.core.keys import NestedKey, dotted
from recurl.modules import ObservationNorm
from recurl.trainers.config import RunConfig
from recurl.trainers.networks.layers import initialized
from recurl.trainers.networks.observations import FlatObservation, ImageEntry, Observations

if TYPE_CHECKING:
    from recurl.modules import ImageEncoder


class VectorEncoder(nn.Module):
    """Encoder of vector observations: ``[*B, *shape]`` per key to ``[*B, width]``.

    Flattens the observations, normalizes the numbers, and applies hidden layers. The first layer, on the concatenated
    entries, amounts to one layer per entry with summed outputs.
    """

    def __init__(self, flat: FlatObservation, norm: ObservationNorm | None, width: int, layers: int = 1) -> None:
        super().__init__()
        self.flat = flat
        self.norm = norm
        self.layer = nn.Linear(flat.features, width)
        initialized(self.layer, math.sqrt(2))
        deeper = [initialized(nn.Linear(width, width), math.sqrt(2)) for _ in range(layers - 1)]
        self.deeper = nn.ModuleList(deeper)
        self.features = width
        self.keys = flat.keys

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the embedding."""
        flat = self.flat(*observations)
        embedding = torch.tanh(self.layer(flat if self.norm is None else self._normalized(flat, self.norm)))
        for layer in self.deeper:
            embedding = torch.tanh(layer(embedding))
        return embedding

    def _normalized(self, flat: Tensor, norm: ObservationNorm) -> Tensor:
        numbers = self.flat.numbers
        if numbers == self.flat.features:
            return norm(flat)
        return torch.cat([norm(flat[..., :numbers]), flat[..., numbers:]], -1)


class JoinedEncoder(nn.Module):
    """Several encoders whose features are concatenated.

    Args:
        parts: the encoders with the keys of their inputs.
    """

    def __init__(self, parts: Sequence[tuple[list[NestedKey], VectorEncoder | ImageEncoder]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for _, part in parts)
        self._counts = [len(keys) for keys, _ in parts]
        self.features = sum(part.features for _, part in parts)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the embedding."""
        features, begin = list[Tensor](), 0
        for part, count in zip(self.parts, self._counts, strict=True):
            features.append(part(*observations[begin : begin + count]))
            begin += count
        return torch.cat(features, -1)


def make_encoder(config: RunConfig, observations: Observations) -> VectorEncoder | ImageEncoder | JoinedEncoder:
    """Build an untrained encoder of the entries ``observations.keys``.

    Raises:
        ArgumentError: an image is too small for the configured encoder.
    """
    width = config.encoder_width or config.hidden_size
    parts: list[tuple[list[NestedKey], VectorEncoder | ImageEncoder]] = [
        ([image.entry.key], _image_encoder(image, width, config.encoder_layers)) for image in observations.images
    ]
    flat = observations.flat
    if flat is not None:
        parts.append((flat.keys, VectorEncoder(flat, observations.norm, width, config.encoder_layers)))
    return parts[0][1] if len(parts) == 1 else JoinedEncoder(parts)


def _image_encoder(image: ImageEntry, width: int, layers: int) -> ImageEncoder:
    from recurl.modules import ImageEncoder  # noqa: PLC0415 - imported where it is used

    try:
        return ImageEncoder(
            image.entry.shape,
            layout=image.layout,
            architecture=image.architecture,
            width=width,
            layers=layers,
            scale=image.scale,
        )
    except ArgumentError as error:
        raise ArgumentError(f"The image {dotted(image.entry.key)} can't be encoded (--encoder): {error}") from error
