"""The version, written here alone so that a clone that is not installed has one too."""

__version__ = "0.1.0"
