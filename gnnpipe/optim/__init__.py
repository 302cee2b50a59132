"""Optimizers, learning-rate schedules, and the weights of asynchronous passes."""
