"""Built-in models, one file each, and the interface between a model and the runtime.

Importing this package registers the built-in models by name.
"""

from gnnpipe.models import gat, gcn, gcnii, resgcn, sage
from gnnpipe.models.layer import MODELS, Layer, LayerSpec, Rows, Values
from gnnpipe.models.layer_stack import GNN
from gnnpipe.models.stage_module import Aggregation, MeanOfRows, Model, Received, StageModule

__all__ = [
    "GNN",
    "MODELS",
    "Aggregation",
    "Layer",
    "LayerSpec",
    "MeanOfRows",
    "Model",
    "Received",
    "Rows",
    "StageModule",
    "Values",
    "gat",
    "gcn",
    "gcnii",
    "resgcn",
    "sage",
]
