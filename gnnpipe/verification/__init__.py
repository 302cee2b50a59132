"""Comparison with an independent reference."""
