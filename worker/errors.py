"""What can go wrong while a model is loaded. Errors of a running step are `fairlane.scheduler.executor.StepError`."""

from __future__ import annotations


class ModelLoadError(Exception):
    """The model cannot be served as it is; the message names the file, key or tensor and says what to do."""
