"""Execution of TensorDict modules directly on tensors, wherever no TensorDict is needed."""

from recurl.execution.lowering.module import Link, Linkable, children_in_order, in_order, link
from recurl.execution.lowering.network import (
    Network,
    distribution_of,
    explain,
    inputs_from,
    inputs_of,
    modules_in_order,
    modules_leading_to,
    obstacle_of,
    shared_state,
    why_whole,
)
from recurl.sequences.entries import Entries, Step, StepT, leaves, leaves_by_path, like, takes_entries, unmarked

__all__ = [
    "Entries",
    "Link",
    "Linkable",
    "Network",
    "Step",
    "StepT",
    "children_in_order",
    "distribution_of",
    "explain",
    "in_order",
    "inputs_from",
    "inputs_of",
    "leaves",
    "leaves_by_path",
    "like",
    "link",
    "modules_in_order",
    "modules_leading_to",
    "obstacle_of",
    "shared_state",
    "takes_entries",
    "unmarked",
    "why_whole",
]

why_not_lowered = obstacle_of  # name of earlier versions
