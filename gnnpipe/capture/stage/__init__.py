"""Runs a stage's part of a recording in steps."""
