"""Specs, and minibatches of collected data."""

from recurl.data.minibatches import SequenceMinibatches
from recurl.specs import Binary, Bounded, Categorical, Composite, MultiCategorical, OneHot, TensorSpec, Unbounded

__all__ = [
    "Binary",
    "Bounded",
    "Categorical",
    "Composite",
    "MultiCategorical",
    "OneHot",
    "SequenceMinibatches",
    "TensorSpec",
    "Unbounded",
]
