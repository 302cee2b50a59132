"""Runs a recorded model eagerly and compares."""
