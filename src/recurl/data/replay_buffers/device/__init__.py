"""Replay on the learner's device: slices of one length, sampled without involving the host."""

from recurl.data.replay_buffers.device.buffer import DeviceSliceBuffer
from recurl.data.replay_buffers.draws import ByPriority, ByStep, ByTrajectory
from recurl.data.replay_buffers.recurrent import RowBurnIn, row_priorities

__all__ = ["ByPriority", "ByStep", "ByTrajectory", "DeviceSliceBuffer", "RowBurnIn", "row_priorities"]
