"""Callbacks and loggers: code of the user that runs during training."""
