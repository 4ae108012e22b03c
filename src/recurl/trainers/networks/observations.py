"""Observed entries of a run, their encoding, and their running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from recurl.core import specs
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.core.keys import ACTION_MASK, AGENT_MASK, IS_INIT, NestedKey, dotted, is_within
from recurl.modules import ObservationNorm
from recurl.trainers.config import RunConfig

if TYPE_CHECKING:
    from recurl.modules.images import Architecture, ImageScale, Layout

__all__ = ["Entry", "FlatObservation", "ImageEntry", "IntegerEncoder", "Observations"]

_NUMBERS = (specs.Bounded, specs.Unbounded)
_CODES = (specs.Categorical, specs.MultiCategorical)
_MAX_ONE_HOT = 512  # more values than this are embedded
_EMBEDDING_SIZE = 32


class Entry(NamedTuple):
    """An observed entry: its key, and its spec and shape in one environment."""

    key: NestedKey
    spec: specs.TensorSpec
    shape: torch.Size

    def __str__(self) -> str:
        return f"{dotted(self.key)} ({str(self.spec.dtype).removeprefix('torch.')} {list(self.shape)})"


class ImageEntry(NamedTuple):
    """An observed image and its encoding."""

    entry: Entry
    layout: Layout
    architecture: Architecture
    scale: ImageScale


class Observations:
    """Observations of a run, split into images and vectors.

    Args:
        config: determines the entries to leave out and the encoding of images.
        spec: observation spec of the environments, ``[*B]``.
        without: further entries to leave out.

    Attributes:
        keys: keys of all entries.
        images: uint8 entries of two or three dimensions; empty if ``encoder`` is ``"mlp"``.
        flat: flattens all other entries into one vector; None if there are none.
        norm: running statistics of the numbers in this vector, or None.

    Raises:
        ArgumentError: no entry is left, or no image fits the image options.
        UnsupportedError: an entry has no encoder.
    """

    def __init__(self, config: RunConfig, spec: specs.Composite, without: Sequence[str] = ()) -> None:
        entries = [entry for entry in _entries(config, spec) if not is_within(entry.key, without)]
        seen = [entry for entry in entries if config.encoder != "mlp" and _is_image(entry)]
        _check_images(config, entries, seen)
        self._learns_scale = config.normalize_observations
        architecture: Architecture = "auto" if config.encoder == "mlp" else config.encoder
        self.images = [_image(entry, config, architecture) for entry in seen]
        others = [entry for entry in entries if entry not in seen]
        self.flat = FlatObservation(others) if others else None
        numbers = 0 if self.flat is None else self.flat.numbers
        self.norm = ObservationNorm((numbers,)) if config.normalize_observations and numbers else None
        self.keys = [*(image.entry.key for image in self.images), *([] if self.flat is None else self.flat.keys)]

    def update(self, batch: TensorDictBase) -> None:
        """Update the running statistics with the observations of a batch ``[*B]``."""
        if self.norm is not None and self.flat is not None:
            flat = self.flat(*(batch[key] for key in self.flat.keys))
            self.norm.update(flat if self.flat.features == self.flat.numbers else flat[..., : self.flat.numbers])
        if self._learns_scale:
            for image in self.images:
                image.scale.update(batch[image.entry.key])


def _entries(config: RunConfig, spec: specs.Composite) -> list[Entry]:
    lead = len(spec.shape)
    leaves = dict(spec.items(include_nested=True, leaves_only=True))
    hidden = [key for key, leaf in leaves.items() if key == ACTION_MASK and leaf.dtype is torch.bool]
    left_out = (IS_INIT, AGENT_MASK, *([] if config.show_action_mask else hidden))
    kept = [key for key in leaves if key not in left_out and not is_within(key, config.drop_observations)]
    if not kept:
        has, dropped = ", ".join(map(dotted, leaves)), " ".join(config.drop_observations)
        raise ArgumentError(
            f"An observation must be left to learn from: the environment has {has or 'none'}"
            f"{f', and --drop-observations is {dropped}.' if dropped else '.'}"
        )
    entries = [Entry(key, leaves[key], leaves[key].shape[lead:]) for key in sorted(kept, key=str)]
    for entry in entries:
        known = isinstance(entry.spec, (*_NUMBERS, *_CODES, specs.OneHot, specs.Binary))
        if not known or entry.spec.dtype is None or entry.spec.dtype.is_complex:
            raise UnsupportedError(
                f"The observation {entry} has no encoder for its spec, {type(entry.spec).__name__}: leave it out with "
                f"--drop-observations {dotted(entry.key)}, or change the environment."
            )
    return entries


def _is_image(entry: Entry) -> bool:
    number = isinstance(entry.spec, _NUMBERS) and entry.spec.dtype == torch.uint8
    return number and len(entry.shape) in (2, 3) and 0 not in entry.shape


def _check_images(config: RunConfig, entries: list[Entry], images: list[Entry]) -> None:
    """Raise if an image option is set that no image fits."""
    has = f"the environment observes {', '.join(map(str, entries))}"
    if config.encoder not in ("auto", "mlp") and not images:
        raise ArgumentError(
            f"--encoder {config.encoder} needs an image, uint8 of 2 or 3 dimensions, and {has}: use auto or mlp."
        )
    layout = config.image_layout
    if layout != "auto" and not any(len(entry.shape) == len(layout) for entry in images):
        raise ArgumentError(
            f"--image-layout {layout} needs an image of {len(layout)} dimensions (and no --encoder mlp), and {has}: "
            "use auto."
        )


def _image(entry: Entry, config: RunConfig, architecture: Architecture) -> ImageEntry:
    from recurl.modules.images import ImageScale, image_layout  # noqa: PLC0415 - imported where it is used

    requested = config.image_layout
    layout = image_layout(entry.shape, requested if len(requested) == len(entry.shape) else "auto")
    return ImageEntry(entry, layout, architecture, ImageScale(_largest_value(entry.spec)))


def _largest_value(spec: specs.TensorSpec) -> int:
    """Return the largest value of a spec of dtype uint8, at least 1."""
    return max(1, int(spec.high.max())) if isinstance(spec, specs.Bounded) else 255


class FlatObservation(nn.Module):
    """Flatten the vectors, choices and bits of one step into one vector, numbers first.

    Numbers are passed through, except uint8, which is divided by the largest value of its spec. Choices become one-hot
    vectors, or learned embeddings of size 32 above 512 values. Bits become 0 and 1.

    Args:
        entries: the observed entries.

    Attributes:
        entries: the entries in the order of the arguments of :meth:`forward`, numbers first.
        keys: keys of ``entries``.
        numbers: number of leading features that running statistics apply to.
        features: length of the vector.
        readers: encoder of each entry, in the same order.

    Shapes:
        one tensor ``[..., *shape]`` per key to ``[..., features]``, float32.

    Example:
        >>> a, b = (Entry(key, specs.Unbounded(size), torch.Size([size])) for key, size in (("a", 2), ("b", 1)))
        >>> flat = FlatObservation([a, b])
        >>> flat(torch.ones(1, 2), torch.zeros(1, 1))
        tensor([[1., 1., 0.]])
    """

    def __init__(self, entries: list[Entry]) -> None:
        super().__init__()
        numbers = [entry for entry in entries if _is_number(entry.spec)]
        ordered = [*numbers, *(entry for entry in entries if not _is_number(entry.spec))]
        self.entries = ordered
        self.keys: list[NestedKey] = [entry.key for entry in ordered]
        self.numbers = sum(entry.shape.numel() for entry in numbers)
        codes: list[IntegerEncoder] = []
        self.readers: list[IntegerEncoder | partial[Tensor]] = []
        for entry in ordered:
            reader = _reader(entry)
            if isinstance(reader, IntegerEncoder):
                codes.append(reader)
            self.readers.append(reader)
        self.codes = nn.ModuleList(codes)
        plain = sum(entry.shape.numel() for entry in ordered if not isinstance(entry.spec, _CODES))
        self.features = plain + sum(code.features for code in codes)

    def forward(self, *observations: Tensor) -> Tensor:
        """Return the flat observation."""
        flat = [read(value) for read, value in zip(self.readers, observations, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def _is_number(spec: specs.TensorSpec) -> bool:
    return isinstance(spec, _NUMBERS) and spec.dtype not in (torch.uint8, torch.bool)


def _reader(entry: Entry) -> IntegerEncoder | partial[Tensor]:
    if isinstance(entry.spec, specs.Categorical | specs.MultiCategorical):
        counts = specs.choice_counts(entry.spec)[: entry.shape.numel()]  # counts of a single environment
        return IntegerEncoder(counts, len(entry.shape))
    divisor = (
        _largest_value(entry.spec) if entry.spec.dtype == torch.uint8 and isinstance(entry.spec, _NUMBERS) else None
    )
    return partial(_flatten, dims=len(entry.shape), divisor=divisor)


def _flatten(value: Tensor, *, dims: int, divisor: int | None = None) -> Tensor:
    value = value.to(torch.float32) if divisor is None else value / divisor
    if dims == 0:
        return value.unsqueeze(-1)
    return value.flatten(-dims) if dims > 1 else value


class IntegerEncoder(nn.Module):
    """Encode several integers as one-hot vectors, or as learned embeddings above 512 values in total.

    Args:
        sizes: number of values of each integer.
        dims: number of dimensions of the integers of one step.

    Shapes:
        integers ``[..., *shape]`` to ``[..., features]``, float32.

    Example:
        >>> IntegerEncoder([2, 3], 1)(torch.tensor([1, 0]))
        tensor([0., 1., 1., 0., 0.])
    """

    owner: Tensor
    level: Tensor
    offset: Tensor

    def __init__(self, sizes: Sequence[int], dims: int) -> None:
        super().__init__()
        self._dims = dims
        total, counts = sum(sizes), torch.tensor(sizes)
        starts = counts.cumsum(0) - counts
        self.table = None if total <= _MAX_ONE_HOT else nn.Embedding(total, _EMBEDDING_SIZE)
        self.features = total if self.table is None else len(sizes) * _EMBEDDING_SIZE
        owner = torch.arange(len(sizes)).repeat_interleave(counts) if self.table is None else torch.zeros(0)
        level = torch.arange(total) - starts[owner] if self.table is None else torch.zeros(0)
        for name, value in {"owner": owner, "level": level, "offset": starts}.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """Return the encoded integers."""
        codes = value.unsqueeze(-1) if self._dims == 0 else value.flatten(-self._dims)
        if self.table is None:
            return (codes.index_select(-1, self.owner) == self.level).to(torch.float32)
        return self.table(codes + self.offset).flatten(-2)
