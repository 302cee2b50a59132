"""Readers of graphs and data sets."""
