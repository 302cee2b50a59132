"""Built-in models, one file each, and the interface between a model and the runtime.

Importing this package registers the built-in models by name.
"""

from gnnpipe.models.gat import GAT
from gnnpipe.models.gcn import GCN
from gnnpipe.models.gcnii import GCNII
from gnnpipe.models.registry import MODELS
from gnnpipe.models.resgcn import ResGCN
from gnnpipe.models.rows import Rows, Values
from gnnpipe.models.sage import SAGE
from gnnpipe.models.stage_module import Aggregation, MeanOfRows, Model, Received, StageModule

__all__ = [
    "GAT",
    "GCN",
    "GCNII",
    "MODELS",
    "SAGE",
    "Aggregation",
    "MeanOfRows",
    "Model",
    "Received",
    "ResGCN",
    "Rows",
    "StageModule",
    "Values",
]
