"""What is computed on a graph: the layers, one file per model.

Importing this folder registers every model by name.
"""

from gnnpipe.models import gat, gcn, gcnii, resgcn, sage
from gnnpipe.models.layer import GNN, MODELS, Layer, LayerSpec, Rows, Values

__all__ = [
    "GNN", "MODELS", "Layer", "LayerSpec", "Rows", "Values",
    "gat", "gcn", "gcnii", "resgcn", "sage",
]  # fmt: skip
