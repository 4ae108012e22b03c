"""Specs of tensors and TensorDicts: shape, dtype, device, and domain.

Names and semantics follow TorchRL. A :class:`Composite` is a tree of specs whose leaves share leading batch dimensions.
"""

from recurl.core.specs.base import TensorSpec
from recurl.core.specs.composite import Composite, declare, has_real_part
from recurl.core.specs.leaves import Binary, Bounded, Categorical, MultiCategorical, OneHot, Unbounded
from recurl.core.specs.masks import choice_counts, has_mask, masked_rand, rows_without_choice, split_choices

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "OneHot",
    "TensorSpec",
    "Unbounded",
    "choice_counts",
    "declare",
    "has_mask",
    "has_real_part",
    "masked_rand",
    "rows_without_choice",
    "split_choices",
]
