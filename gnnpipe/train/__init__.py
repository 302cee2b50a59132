"""Compose, loop, record: from a config to a trained model and the folder of its run."""
