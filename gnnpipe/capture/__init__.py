"""The bridge: takes a user's unmodified ``torch_geometric`` model and makes a ``Model`` of it.

``trace`` records the model's forward as a graph of calls, with every convolution that can be
lowered (``rules``) already taken apart; ``probe`` finds out on a small sample what each call does
to rows, and that the recording computes what the model computes; ``recording`` answers
questions about the calls; ``stage`` cuts them into the steps of a stage.
"""

from gnnpipe.capture.recorded_model import RecordedModel, capture

__all__ = ["RecordedModel", "capture"]
