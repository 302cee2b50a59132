"""Data source of .pt files: a saved ``Data`` or ``HeteroData``, or a PyG dataset's data.pt.

Such a file is a pickle. torch reads it with ``weights_only=True``, which makes tensors, plain
containers and the classes listed here, and refuses all else: other classes may run code.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from gnnpipe.data.clean import RawGraph
from gnnpipe.data.hetero import raw_hetero_graph
from gnnpipe.data.pyg import raw_graph
from gnnpipe.data.source import DataRequest, Source
from gnnpipe.errors import InputError
from gnnpipe.files import open_plain
from gnnpipe.graph.npz_archive import UNREADABLE

ENDINGS = (".pt", ".pth")

PROCESSED = Path("processed") / "data.pt"
"""The file of a PyG dataset in its folder."""


def _read(request: DataRequest) -> RawGraph:
    """The graph in the file ``request.dataset``, or in a folder's processed/data.pt.

    ``InputError``: missing, unreadable or unsafe file, several graphs, an attribute that is
    missing or wrong.
    """
    path = _path_of(request.dataset)
    is_processed = path.parts[-2:] == PROCESSED.parts
    name = path.absolute().parents[1].name if is_processed else path.stem
    content = _load(path)
    try:
        data = _data_of(path, content)
        if hasattr(data, "edge_types"):
            raw = raw_hetero_graph(data, name, "", request.seed, "classification")
        else:
            raw = raw_graph(data, name)
    except InputError:
        raise
    except Exception as error:  # a damaged file can give a ``Data`` any attributes
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _fail(path, f"its attributes cannot be read ({why})", "torch.save(data, path) anew")
    return replace(raw, is_own_data=True)


def _path_of(name: str) -> Path:
    path = Path(os.path.expanduser(name))
    return path / PROCESSED if os.path.isdir(path) else path


def _handles(name: str) -> bool:
    path = _path_of(name)
    return name.endswith(ENDINGS) or (path.parts[-2:] == PROCESSED.parts and path.is_file())


def _fail(path: Path, wrong: str, hint: str) -> NoReturn:
    raise InputError(f"--dataset {str(path)!r}: {wrong}; try: {hint}") from None


def _load(path: Path) -> Any:
    """The object in a .pt file; ``InputError`` if it holds anything but data."""
    import torch

    try:
        with open_plain(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about the layouts of sparse tensors
            with torch.serialization.safe_globals(_safe_classes()):
                return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        _fail(path, "no such file", "the path of a .pt file")
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (?:`)?([\w.]+)", str(error))
        if found is None:
            _fail(path, "not a readable .pt file", "torch.save(data, path) of a Data")
        wrong = f"not read, because it holds {found[1]}, which is not data and may run code"
        _fail(path, wrong, "torch.save(data, path) of a Data, or in Python Graph.from_pyg(data)")
    except (*UNREADABLE, AssertionError, AttributeError) as error:
        # torch's error for a damaged pickle may be only a number.
        why = re.sub(r"^\d*$", "damaged", " ".join(str(error).split())[:200])
        _fail(path, f"not a readable .pt file ({why})", "torch.save(data, path) of a Data")


def _safe_classes() -> list[Any]:
    """The classes in a pickled ``Data`` or array whose making runs no code of the file's."""
    import torch
    import torch_geometric.data.data as homogeneous
    from torch_geometric.data import Data, HeteroData, storage

    found: list[Any] = [Data, HeteroData, homogeneous.DataEdgeAttr, homogeneous.DataTensorAttr]
    found += [storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage, storage.GlobalStorage]
    found += [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefd"}]
    rebuild, scalar = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found += [(rebuild, f"{module}._reconstruct"), (scalar, f"{module}.scalar")]
    # Those that PyG has allowed must stay so, and ``safe_globals`` would remove them at its end.
    allowed = torch.serialization.get_safe_globals()
    return [one for one in found if one not in allowed]


def _data_of(path: Path, found: Any) -> Any:
    """The ``Data`` or ``HeteroData`` in the object of a file."""
    from torch_geometric.data import Data, HeteroData

    if isinstance(found, tuple):  # InMemoryDataset: (graph, slices) or (graph, slices, its class)
        slices = found[1] if len(found) in (2, 3) else None
        # The offsets of the graphs in each attribute; ``None`` or two offsets for one graph.
        offsets = next(iter(slices.values()), ()) if isinstance(slices, dict) else ()
        if len(found) not in (2, 3) or len(offsets) > 2:
            what = f"{len(offsets) - 1} graphs" if len(offsets) > 2 else "several objects"
            _fail(
                path, what, "a dataset of one graph, or one of its graphs: torch.save(data, path)"
            )
        found = found[0]
    if isinstance(found, dict):  # Data.to_dict()
        if "_global_store" in found:
            return HeteroData.from_dict(found)
        if {"edge_index", "adj_t"} & found.keys():
            return Data.from_dict(found)
    if not isinstance(found, Data | HeteroData):
        keys = f" with {', '.join(map(str, list(found)[:5]))}" if isinstance(found, dict) else ""
        wrong = f"holds a {type(found).__name__}{keys}, not a graph"
        _fail(path, wrong, "torch.save(data, path) of a Data or HeteroData")
    return found


SOURCE = Source(
    handles=_handles,
    read=_read,
    listing=(("<path>.pt", "a saved PyG Data or HeteroData, or a PyG dataset's data.pt"),),
)
