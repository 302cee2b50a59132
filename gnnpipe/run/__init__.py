"""Run folder, progress, results."""
