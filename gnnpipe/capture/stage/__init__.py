"""Splits a recorded model into the steps of a stage."""
