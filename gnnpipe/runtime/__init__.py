"""Executes programs: executor, stages, histories, communication."""
