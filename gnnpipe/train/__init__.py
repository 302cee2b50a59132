"""The trainer, its loop over epochs, and evaluation."""
