"""Public functions to read and write checkpoints."""

from recurl.trainers.files.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "save_checkpoint"]
