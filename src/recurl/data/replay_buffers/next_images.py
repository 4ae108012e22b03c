"""Deduplicated storage of images under ``"next"``: images equal to those of the following steps aren't stored again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recurl.core.keys import NestedKey, next_key, path_of

__all__ = ["NextImages", "next_images_of", "root_key"]

_UNUSED, _SHARED = -2, -1


def next_images_of(items: Mapping[NestedKey, Tensor]) -> dict[NestedKey, NestedKey]:
    """Map the keys of images under ``"next"`` to the keys of the corresponding images at the root.

    Args:
        items: one item of each entry. An image is uint8 with at least two dimensions.

    Example:
        >>> image = torch.zeros(4, 4, dtype=torch.uint8)
        >>> next_images_of({"image": image, ("next", "image"): image, ("next", "reward"): torch.zeros(1)})
        {('next', 'image'): 'image'}
    """
    pairs = {next_key(key): key for key, item in items.items() if item.dtype == torch.uint8 and item.ndim > 1}
    return {
        after: key
        for after, key in pairs.items()
        if after in items and (items[after].shape, items[after].dtype) == (items[key].shape, items[key].dtype)
    }


def root_key(key: NestedKey) -> NestedKey:
    """Return the key of the image of a step, given that of the image of the next step."""
    _, *path = path_of(key)
    return tuple(path) if len(path) > 1 else path[0]


class NextImages:
    """Images of the next steps, shared with the images of the steps where possible.

    A next image that is bitwise equal to the image at the following position of its lane is read from there. Stored
    here are only the last next image of each trajectory and, until the following step is added, the newest one of each
    lane. Later writes, at any position, never change the next images that are read back.

    Args:
        root: the images of the steps, ``[lanes * capacity, ...]``.
        lanes: number of lanes, each a ring of ``capacity`` positions.
        pool: initial memory for the images stored here, ``[M, ...]``; more is allocated when needed.
    """

    def __init__(self, root: Tensor, lanes: int, pool: Tensor) -> None:
        self.root = root
        self._capacity = root.shape[0] // max(lanes, 1)
        self._pool = pool
        self._slot = torch.full((root.shape[0],), _UNUSED, dtype=torch.int32)  # slot in the pool, by position
        self._free = list(range(pool.shape[0] - 1, -1, -1))

    @property
    def stored(self) -> int:
        """Number of images in the pool."""
        return self._pool.shape[0] - len(self._free)

    def set(self, index: Tensor, images: Tensor, after: Tensor) -> None:
        """Write steps; must be called before their images are written to ``root``.

        Args:
            index: positions, int64 ``[N]`` on the CPU.
            images: images of the steps, ``[N, ...]``.
            after: images of the next steps, ``[N, ...]``.
        """
        self._keep_for_previous(index, images, torch.isin(self._previous(index), index, invert=True))
        self._release(index)
        shared = torch.zeros(index.shape, dtype=torch.bool)
        followed = index[1:] == self._following(index[:-1])
        shared[:-1] = followed & _equal(after[:-1], images[1:])
        self._slot[index[shared]] = _SHARED
        self._keep(index[~shared], after[(~shared).to(after.device)])

    def get(self, index: Tensor) -> Tensor:
        """Return the next images of the steps at ``index``, int64 ``[N]`` on the CPU."""
        found = self.root.index_select(0, self._following(index).to(self.root.device))
        slots = self._slot[index].long()
        own = (slots >= 0).nonzero().squeeze(-1)
        found[own.to(found.device)] = self._pool.index_select(0, slots[own].to(self._pool.device))
        return found

    def write(self, index: Tensor, after: Tensor) -> None:
        """Overwrite the next images of the steps at ``index``."""
        self._release(index)
        self._keep(index, after)

    def write_root(self, index: Tensor, images: Tensor) -> None:
        """Prepare for new images at ``index`` of ``root``; must be called before they are written."""
        self._keep_for_previous(index, images, torch.ones(index.shape, dtype=torch.bool))

    def unshared(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices into ``index`` of the positions with an image in the pool, and these images."""
        slots = self._slot[index].long()
        own = (slots >= 0).nonzero().squeeze(-1)
        return own, self._pool.index_select(0, slots[own].to(self._pool.device))

    def restore(self, index: Tensor, own: Tensor, images: Tensor) -> None:
        """Restore the result of :meth:`unshared` for the positions ``index``."""
        self.clear()
        self._slot[index] = _SHARED
        self._keep(index[own], images)

    def clear(self) -> None:
        """Remove all steps."""
        self._slot.fill_(_UNUSED)
        self._free = list(range(self._pool.shape[0] - 1, -1, -1))

    def _previous(self, index: Tensor) -> Tensor:
        return torch.where(index % self._capacity == 0, index + self._capacity - 1, index - 1)

    def _following(self, index: Tensor) -> Tensor:
        last = index % self._capacity == self._capacity - 1
        return torch.where(last, index - self._capacity + 1, index + 1)

    def _keep_for_previous(self, index: Tensor, images: Tensor, of: Tensor) -> None:
        """Preserve the next images of the steps before ``index[of]``, whose root images are about to be overwritten."""
        previous, index, images = self._previous(index)[of], index[of], images[of.to(images.device)]
        slots = self._slot[previous].long()
        own, shared = ((mask.nonzero().squeeze(-1)) for mask in (slots >= 0, slots == _SHARED))
        kept = self._pool.index_select(0, slots[own].to(self._pool.device))
        found = own[_equal(kept, images[own.to(images.device)])]
        self._release(previous[found])
        self._slot[previous[found]] = _SHARED
        old = self.root.index_select(0, index[shared].to(self.root.device))
        differs = ~_equal(old, images[shared.to(images.device)])
        self._keep(previous[shared][differs], old[differs.to(old.device)])

    def _release(self, index: Tensor) -> None:
        slots = self._slot[index]
        self._free.extend(slots[slots >= 0].tolist())
        self._slot[index] = _UNUSED

    def _keep(self, index: Tensor, images: Tensor) -> None:
        missing = index.numel() - len(self._free)
        if missing > 0:
            size = self._pool.shape[0]
            grown = self._pool.new_empty((size + max(missing, size), *self._pool.shape[1:]))
            grown[:size] = self._pool
            self._free[:0] = range(grown.shape[0] - 1, size - 1, -1)
            self._pool = grown
        slots = torch.tensor([self._free.pop() for _ in range(index.numel())], dtype=torch.int64)
        self._slot[index] = slots.to(torch.int32)
        self._pool.index_copy_(0, slots.to(self._pool.device), images.detach().to(self._pool.device))


def _equal(first: Tensor, second: Tensor) -> Tensor:
    """Return which items of ``[N, ...]`` are equal, bool ``[N]`` on the CPU."""
    return (first == second.to(first.device)).flatten(1).all(1).cpu()
