"""Runs a recording on a small graph and compares it with the model."""
