"""Forecast of stale rows."""
