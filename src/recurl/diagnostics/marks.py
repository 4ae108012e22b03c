"""Checks of the episode boundaries marked in a batch: ``is_init`` and trajectory ids."""

from __future__ import annotations

from tensordict import TensorDictBase

from recurl.core.keys import TRAJ_IDS, TRAJ_STEPS
from recurl.diagnostics import experiment as ex
from recurl.diagnostics.result import Fault, check


@check("is_init")
def check_is_init(batch: TensorDictBase) -> str:
    """Check that ``is_init`` is True at the first step of every episode and nowhere else.

    Args:
        batch: batch as collected, ``[*B, T]``. In a batch ``[N]`` with trajectory ids, which may consist of
            concatenated rows, the flags are not compared with the ends of episodes.
    """
    flags = ex.flags_of(batch)
    ends = ex.ends_before(batch)
    if flags.numel() > 1 and flags.all() and not ends[..., 1:].all():
        raise Fault("is_init is always True: every step loses the memory of previous steps", ex.TRACKER)
    if ends.any() and not flags.any():
        raise Fault("is_init is always False, though episodes end: memory leaks into the next episode", ex.TRACKER)
    ids = batch.get(TRAJ_IDS, None)
    if batch.ndim > 1 or ids is None:
        known = ends if ids is None else ends | ex.changes(ids)
        missed, invented = (ends & ~flags)[..., 1:], (flags & ~known)[..., 1:]
        if missed.any():
            raise Fault(
                f"is_init is False at the first step of {int(missed.sum())} of {int(ends.sum())} episodes", ex.TRACKER
            )
        if invented.any():
            raise Fault(f"is_init is True at {int(invented.sum())} steps in the middle of an episode", ex.TRACKER)
    return f"True at {int(flags.sum())} of {flags.numel()} steps, where episodes begin"


@check("traj_ids")
def check_traj_ids(batch: TensorDictBase) -> str:
    """Check that ``("collector", "traj_ids")`` changes exactly where episodes begin, and that no id is reused.

    If the batch also has ``("collector", "traj_steps")``, these must increase by one within a trajectory.

    Args:
        batch: batch as collected, ``[*B, T]``.
    """
    ids = batch.get(TRAJ_IDS, None)
    fix = "collect with recurl.collectors.Collector, which numbers trajectories, and don't modify its ids"
    if ids is None:
        return "not in the batch: is_init alone marks boundaries, so don't flatten [*B, T] to [N]"
    if ids.shape != batch.batch_size or ids.dtype.is_floating_point:
        raise Fault(f"ids must be integers of shape {list(batch.batch_size)}, got {ids.dtype} {list(ids.shape)}", fix)
    changes, flags, ends = ex.changes(ids), ex.flags_of(batch), ex.ends_before(batch)
    missing = ((flags | ends) & ~changes)[..., 1:]
    if missing.any():
        raise Fault(f"the id does not change at {int(missing.sum())} beginnings of an episode", fix)
    starts = changes.clone()
    starts[..., 0] = True
    seen = ids[starts]
    if seen.unique().numel() != seen.numel():
        raise Fault("an id is used for two trajectories: a flattened batch may join them", fix)
    invented = (changes & ~(flags | ends)).sum()
    if batch.ndim > 1 and invented:
        raise Fault(f"the id changes at {int(invented)} steps where no episode begins", fix)
    steps = batch.get(TRAJ_STEPS, None)
    if steps is None:
        return f"{seen.numel()} trajectories with unique ids"
    if steps.shape != batch.batch_size or steps.dtype.is_floating_point:
        raise Fault(
            f"steps must be integers of shape {list(batch.batch_size)}, got {steps.dtype} {list(steps.shape)}", fix
        )
    skipped = (steps[..., 1:] - steps[..., :-1] != 1) & ~changes[..., 1:]
    if skipped.any():
        raise Fault(f"traj_steps does not increase by one at {int(skipped.sum())} steps of a trajectory", fix)
    return f"{seen.numel()} trajectories with unique ids and numbered steps"
