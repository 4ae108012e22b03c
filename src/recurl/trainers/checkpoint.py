"""Checkpoints, to be read and written by programs of one's own."""

from recurl.trainers.files.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]
