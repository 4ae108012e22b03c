"""Replay buffer storages: tensors in memory, tensors on disk, or a list of objects."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError, ArgumentTypeError, UnsupportedError, UsageError
from recurl.core.keys import NestedKey
from recurl.core.lazy import lazy_names
from recurl.core.untrusted import open_regular
from recurl.data.replay_buffers.folders import flat_tensordict, load_folder, map_tensors, seal_folder, tensor_leaves
from recurl.data.replay_buffers.next_images import NextImages, next_images_of, root_key
from recurl.data.replay_buffers.storage import Storage

lazy_names(__name__)

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage", "leaves"]

Data: TypeAlias = TensorDictBase | Tensor
_CHUNK = 1024  # items
_LANES_BYTES = 20
_PLAIN = "_tensor"  # key if the data is a single tensor


class LazyTensorStorage(Storage):
    """Storage of tensors, or TensorDicts of tensors, in memory that is allocated when the first data is added.

    An image (uint8, two or more dimensions) under ``"next"`` that equals the image of the following step in its lane is
    not stored again, which halves the memory for images.

    Args:
        max_size: maximum number of items.
        device: device of the storage; ``"auto"`` for the device of the first data.
        ndim: number of batch dimensions that count as items; see :class:`Storage`.
        share_next_images: store such images once. The bookkeeping is on the host, which therefore waits for the device.

    Raises:
        ArgumentError: ``max_size`` or ``ndim`` is not positive; or data has other entries, shapes or dtypes than the
            first data.
        ArgumentTypeError: data is neither a tensor nor a TensorDict.

    Example:
        >>> storage = LazyTensorStorage(10)
        >>> storage.prepare(torch.ones(2, 3))
        >>> storage.set(torch.tensor([4, 5]), torch.ones(2, 3))
        >>> storage.get(torch.tensor([5]))
        tensor([[1., 1., 1.]])
    """

    def __init__(
        self, max_size: int, *, device: torch.device | str = "cpu", ndim: int = 1, share_next_images: bool = True
    ) -> None:
        super().__init__(max_size, ndim)
        self.device = device
        self._share_next_images = share_next_images
        self._inner = torch.Size([])  # batch size of an item
        self._leaves: dict[NestedKey, Tensor] = {}
        self._next: dict[NestedKey, NextImages] = {}
        self._pairs: dict[NestedKey, NestedKey] = {}  # root key of each key in _next

    def batch_shape(self, data: Any) -> torch.Size:
        """Return the batch dimensions of ``data``."""
        if isinstance(data, TensorDictBase):
            return data.batch_size
        if isinstance(data, Tensor):
            return data.shape
        raise ArgumentTypeError(
            f"{type(self).__name__} holds tensors and TensorDicts, got {type(data).__name__}: use ListStorage for that."
        )

    @property
    def keys(self) -> set[NestedKey]:
        """Keys of the stored entries; empty before the first data is added."""
        return {*self._leaves, *self._next}

    def prepare(self, data: Any) -> None:
        """Allocate memory at the first call, and check that ``data`` can be stored; see :meth:`Storage.prepare`."""
        super().prepare(data)
        entries = leaves(data)
        if not self._leaves:
            if self.device == "auto":
                self.device = next((value.device for value in entries.values()), torch.device("cpu"))
            items = {key: value.new_empty(value.shape[self.ndim :]) for key, value in entries.items()}
            self._allocate(items, data.batch_size[self.ndim :] if isinstance(data, TensorDictBase) else torch.Size([]))
        elif entries.keys() != self.keys:
            differ = sorted(map(str, entries.keys() ^ self.keys))
            raise ArgumentError(
                f"Data must have the entries of the storage, {sorted(map(str, self.keys))}; these differ: "
                f"{', '.join(differ)}. Select the entries to keep before extending."
            )
        self._check(entries, self.ndim)

    def _check(self, entries: dict[NestedKey, Tensor], dims: int) -> None:
        for key, value in entries.items():
            leaf = self._leaves.get(self._pairs.get(key, key))  # next images have the shape of the images
            if leaf is None:
                raise ArgumentError(
                    f"There is no entry {key!r} in the storage, which has {sorted(map(str, self.keys))}."
                )
            if value.shape[dims:] != leaf.shape[1:] or value.dtype != leaf.dtype:
                raise ArgumentError(
                    f"The entry {key!r} is stored with shape {tuple(leaf.shape[1:])} and dtype {leaf.dtype} per item, "
                    f"got {tuple(value.shape[dims:])} and {value.dtype}."
                )

    def _allocate(self, items: dict[NestedKey, Tensor], inner: torch.Size) -> None:
        """Allocate memory for entries like those of one example item; ``inner`` is the item's batch size."""
        self._pairs = {} if inner or not self._share_next_images else next_images_of(items)
        memory = self._memory(items, self.lanes * self.capacity, self._pairs)
        self._leaves = {key: leaf for key, leaf in memory.items() if key not in self._pairs}
        self._next = {
            after: NextImages(self._leaves[key], self.lanes, memory[after]) for after, key in self._pairs.items()
        }
        self._inner = inner

    def _memory(
        self, items: dict[NestedKey, Tensor], size: int, growing: Collection[NestedKey]
    ) -> dict[NestedKey, Tensor]:
        """Allocate memory for ``size`` items; less for the entries ``growing``, which are extended later."""
        return {
            key: torch.empty(
                (self.lanes if key in growing else size, *item.shape), dtype=item.dtype, device=self.device
            )
            for key, item in items.items()
        }

    def set(self, index: Tensor, data: Any) -> None:
        """Write ``data``, for which :meth:`prepare` was called, at positions ``index``; see :meth:`Storage.set`."""
        entries = {key: value.flatten(0, self.ndim - 1) for key, value in leaves(data).items()}
        self._set(index, entries)

    def _set(self, index: Tensor, entries: dict[NestedKey, Tensor]) -> None:
        for key, images in self._next.items():
            images.set(index.cpu(), entries[self._pairs[key]], entries[key])
        self._write(index, {key: value for key, value in entries.items() if key not in self._next})

    def write(self, index: Tensor, entries: dict[NestedKey, Tensor]) -> None:
        """Overwrite some of the entries, each ``[N, ...]``, at ``index``, int64 ``[N]`` on the CPU.

        Raises:
            ArgumentError: an entry is not stored, or has another shape or dtype there.
        """
        self._check(entries, 1)
        for key, images in self._next.items():
            if self._pairs[key] in entries:
                images.write_root(index.cpu(), entries[self._pairs[key]])
            if key in entries:
                images.write(index.cpu(), entries[key])
        self._write(index, {key: value for key, value in entries.items() if key not in self._next})

    def _write(self, index: Tensor, entries: dict[NestedKey, Tensor]) -> None:
        for key, value in entries.items():
            leaf = self._leaves[key]
            leaf.index_copy_(0, index.to(leaf.device), value.detach().to(leaf.device))

    def get(self, index: Tensor) -> Any:
        """Return a copy of the items at ``index``."""
        entries = self.entries(index)
        if entries.keys() == {_PLAIN}:
            return entries[_PLAIN]
        return flat_tensordict(entries, torch.Size([index.shape[0], *self._inner]))

    def entries(self, index: Tensor) -> dict[NestedKey, Tensor]:
        """Return copies of the entries, ``[N, ...]`` each, at ``index``, int64 ``[N]``."""
        there = index.to(self.device, non_blocking=True)
        entries = {key: leaf.index_select(0, there) for key, leaf in self._leaves.items()}
        return {**entries, **{key: images.get(index.cpu()) for key, images in self._next.items()}}

    def _filled(self, leaf: Tensor, steps: int) -> Tensor:
        """Return the first ``steps`` items of each lane, ``[lanes, steps, ...]``; shares memory."""
        return leaf.unflatten(0, (self.lanes, -1))[:, :steps]

    def state_dict(self, filled: int) -> dict[str, Any]:
        """Return the contents as tensors and plain Python values."""
        contents = {key: self._filled(leaf, filled) for key, leaf in self._leaves.items()}
        positions = self._positions(filled)
        return {
            "next": {key: images.unshared(positions) for key, images in self._next.items()},
            "lanes": self.lanes,
            "inner": list(self._inner),
            "entries": {
                key: value.clone(memory_format=torch.contiguous_format).flatten(0, 1) for key, value in contents.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the contents from a :meth:`state_dict`."""
        self._restore(state["lanes"], state["entries"], torch.Size(state["inner"]), state.get("next", {}))

    def dumps(self, path: Path, filled: int) -> None:
        """Write a memory-mapped TensorDict, also readable by ``TensorDict.load_memmap``; see :meth:`Storage.dumps`."""
        size = torch.Size([self.lanes * filled, *self._inner])
        items = {key: leaf[0] for key, leaf in self._leaves.items()}
        mapped = map_tensors({**items, **{key: images.root[0] for key, images in self._next.items()}}, size, path)
        for key, leaf in self._leaves.items():
            mapped[key].unflatten(0, (self.lanes, filled)).copy_(self._filled(leaf, filled))
        for key, images in self._next.items():  # in full, for readers that aren't aware of lanes
            for target, positions in zip(mapped[key].split(_CHUNK), self._positions(filled).split(_CHUNK), strict=True):
                target.copy_(images.get(positions))
        seal_folder(path, {"lanes": self.lanes})

    def loads(self, path: Path) -> None:
        """Restore the contents written by :meth:`dumps`.

        Raises:
            ArgumentError: the folder is missing or damaged, or its contents don't match this storage.
        """
        saved, facts = load_folder(path)
        lanes = facts["lanes"] if facts else _read_lanes(path / "lanes")
        self._restore(lanes, tensor_leaves(saved), saved.batch_size[1:])

    def _positions(self, steps: int) -> Tensor:
        """Return the positions of the first ``steps`` items of each lane, in the order of :meth:`_filled`."""
        return (torch.arange(self.lanes).unsqueeze(-1) * self.capacity + torch.arange(steps)).flatten()

    def _restore(
        self,
        lanes: int,
        entries: dict[NestedKey, Tensor],
        inner: torch.Size,
        next_images: Mapping[NestedKey, tuple[Tensor, Tensor]] = MappingProxyType({}),
    ) -> None:
        """Restore the first n steps of each lane from ``entries``, ``[lanes * n, ...]`` each.

        Next images missing from ``entries`` are restored from ``next_images``; see :meth:`NextImages.unshared`.
        """
        if self.device == "auto":
            self.device = torch.device("cpu")
        if not self._leaves:
            self.lanes = lanes
            items = {key: value[0] for key, value in entries.items()}
            self._allocate(
                {**items, **{key: images.new_empty(images.shape[1:]) for key, (_, images) in next_images.items()}},
                inner,
            )
        if lanes != self.lanes or entries.keys() | next_images.keys() != self.keys:
            raise ArgumentError(
                f"The saved contents, {lanes} lanes of {sorted(map(str, entries))}, must match the storage, "
                f"{self.lanes} lanes of {sorted(map(str, self.keys))}. Load into a new storage."
            )
        self._check({**entries, **{key: images for key, (_, images) in next_images.items()}}, 1)
        for key in next_images.keys() & self._leaves.keys():  # saved once, and stored in full here
            images = entries[root_key(key)].unflatten(0, (lanes, -1)).roll(-1, 1).flatten(0, 1)
            own, values = next_images[key]
            entries = {**entries, key: images.index_copy_(0, own.to(images.device), values.to(images.device))}
        positions = self._positions(next(iter(entries.values())).shape[0] // lanes) if self._next else torch.empty(0)
        for key, images in self._next.items():
            if key in next_images:
                images.restore(positions, *next_images[key])
            else:  # saved in full
                images.clear()
                images.set(positions, entries[self._pairs[key]], entries[key])
        for key, value in entries.items():
            if key in self._next:
                continue
            lanewise = value.unflatten(0, (lanes, -1))
            self._filled(self._leaves[key], lanewise.shape[1]).copy_(lanewise)


class LazyMemmapStorage(LazyTensorStorage):
    """Storage of tensors, or TensorDicts of tensors, in memory-mapped files, for more data than fits into memory.

    Args:
        max_size: maximum number of items. Files are sparse: disk space is allocated as steps are added.
        scratch_dir: folder of the files; it must be empty or absent, and is kept. When None, the files are unnamed, and
            their space is freed when this object and its forks are gone, even after a crash. The files are not a
            backup: use ``ReplayBuffer.dumps``.
        ndim: number of batch dimensions that count as items; see :class:`Storage`.

    Raises:
        ArgumentError: ``max_size`` or ``ndim`` is not positive; or data has other entries, shapes or dtypes than the
            first data.
        UnsupportedError: ``scratch_dir`` is None on Windows, when the first data is added.
        UsageError: ``scratch_dir`` is not empty when the first data is added.
    """

    def __init__(self, max_size: int, *, scratch_dir: str | Path | None = None, ndim: int = 1) -> None:
        super().__init__(max_size, ndim=ndim)
        self.scratch_dir = None if scratch_dir is None else Path(scratch_dir)

    def _memory(
        self, items: dict[NestedKey, Tensor], size: int, growing: Collection[NestedKey]
    ) -> dict[NestedKey, Tensor]:
        del growing  # sparse files take no space before they are written
        if self.scratch_dir is None:
            if os.name == "nt":
                raise UnsupportedError(
                    "Unnamed files need a POSIX system such as Linux or macOS, and this is Windows: give "
                    "LazyMemmapStorage a scratch_dir."
                )
            with tempfile.TemporaryDirectory(prefix="recurl-") as folder:
                return map_tensors(items, torch.Size([size]), Path(folder))  # mapped memory outlives its name
        if self.scratch_dir.exists() and any(self.scratch_dir.iterdir()):
            raise UsageError(f"The scratch_dir of a storage must be empty, but {self.scratch_dir} has files in it.")
        return map_tensors(items, torch.Size([size]), self.scratch_dir)


class ListStorage(Storage):
    """Storage of arbitrary Python objects in a list.

    A batch that is a TensorDict or a tensor is stored item by item and returned stacked; a batch that is a list, tuple
    or other sequence is returned as a list.

    Args:
        max_size: maximum number of items.

    Raises:
        ArgumentError: ``max_size`` is not positive.
        ArgumentTypeError: data is not a sequence of items.

    Example:
        >>> storage = ListStorage(3)
        >>> storage.prepare(["a", "b"])
        >>> storage.set(torch.tensor([0, 1]), ["a", "b"])
        >>> storage.get(torch.tensor([1, 1]))
        ['b', 'b']
    """

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size, ndim=1)
        self._items: list[Any] = []

    def batch_shape(self, data: Any) -> torch.Size:
        """Return the batch dimensions of ``data``."""
        if isinstance(data, TensorDictBase):
            return data.batch_size
        if isinstance(data, Tensor):
            return data.shape
        if isinstance(data, Sequence) and not isinstance(data, str):
            return torch.Size([len(data)])
        raise ArgumentTypeError(
            f"A batch must be a TensorDict, a tensor or a list of items, got {type(data).__name__}."
        )

    def set(self, index: Tensor, data: Any) -> None:
        """Write ``data`` at positions ``index``."""
        items = data.detach().clone().unbind(0) if isinstance(data, TensorDictBase | Tensor) else data
        for position, item in zip(index.tolist(), items, strict=True):
            self._items[position : position + 1] = [item]

    def get(self, index: Tensor) -> Any:
        """Return a copy of the items at ``index``."""
        items = [self._items[position] for position in index.tolist()]
        if isinstance(items[0], TensorDictBase | Tensor):
            return torch.stack(items)  # pyright: ignore[reportArgumentType] - tensordict registers itself with torch
        return items

    def state_dict(self, filled: int) -> dict[str, Any]:
        """Return the contents; items that aren't TensorDicts are returned unchanged. See :meth:`Storage.state_dict`."""
        if self._items and isinstance(self._items[0], TensorDictBase):
            batch = cast(TensorDictBase, torch.stack(self._items))
            return {"lanes": self.lanes, "batch_size": list(batch.batch_size), "entries": leaves(batch)}
        return {"lanes": self.lanes, "items": list(self._items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the contents from a :meth:`state_dict`."""
        self.lanes = state["lanes"]
        if "entries" in state:
            self._items = list(flat_tensordict(state["entries"], torch.Size(state["batch_size"])).unbind(0))
        else:
            self._items = list(state["items"])

    def dumps(self, path: Path, filled: int) -> None:
        """Write the items, which must be TensorDicts, tensors or plain Python values; see :meth:`Storage.dumps`."""
        path.mkdir(parents=True, exist_ok=True)
        save_archive(self.state_dict(filled), path / "items.pt")

    def loads(self, path: Path) -> None:
        """Restore the contents written by :meth:`dumps`.

        Raises:
            ArgumentError: the file is missing or damaged.
        """
        self.load_state_dict(load_archive(path / "items.pt"))


def _read_lanes(path: Path) -> int:
    """Return the number of lanes from the separate file that earlier versions wrote."""
    with open_regular(path) as file:
        return int(file.read(_LANES_BYTES))


def leaves(data: TensorDictBase | Tensor) -> dict[NestedKey, Tensor]:
    """Return the tensors of a TensorDict by key; a plain tensor is treated as a single entry."""
    return {_PLAIN: data} if isinstance(data, Tensor) else tensor_leaves(data)
