"""Checkpoints: everything a run needs to resume to the bit, under any shape."""
