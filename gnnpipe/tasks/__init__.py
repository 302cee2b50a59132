"""Losses, labels and metrics."""
