"""Turns a user's unmodified ``torch_geometric`` model into a ``Model`` that runs chunk by chunk.

In the order in which ``capture`` uses them:

- ``trace``: records forward with torch.fx. ``rules`` replace the convolutions and normalisations
  that can be written as products with fixed matrices, means and row-wise work; ``markers`` are the
  calls that stand for the runtime's work. ``rewrite`` removes in-place calls and marks weights with
  one row for each vertex. ``buffers`` marks the buffers that forward assigns. ``call_order`` lists
  the calls branch by branch, in whatever order forward writes them.
- ``trial``: runs the recording on a small random graph, refuses calls that cannot run chunk by
  chunk, and compares the results with those of the model itself.
- ``recording``: the recorded calls and queries about them.
- ``stage``: splits the calls of a stage into steps and generates one function for each step.
- ``recorded_model``: the ``Model`` made of all this.
- ``whole_model``: the ``Model`` that calls the module as it is, if it cannot be recorded.
- ``link_decoder``: adds the scoring of vertex pairs to a model, for link prediction.
"""

from gnnpipe.capture.recorded_model import RecordedModel, capture
from gnnpipe.capture.whole_model import WholeModel

__all__ = ["RecordedModel", "WholeModel", "capture"]
