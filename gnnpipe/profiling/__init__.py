"""Measures costs on this machine and predicts the time of an epoch."""
