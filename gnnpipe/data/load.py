"""Loads a graph by the name given to ``--dataset``, from the data source that handles the name.

PyG is imported only when one of its data sets is loaded, since that takes seconds.
"""

from __future__ import annotations

from dataclasses import replace

from gnnpipe.config import TrainConfig
from gnnpipe.data import embedded, npz, ogb, pt, pyg_datasets, synthetic, tables
from gnnpipe.data.clean import clean, without_labels
from gnnpipe.data.links import split_links
from gnnpipe.data.source import SOURCES, DataRequest, Source, add_source
from gnnpipe.errors import InputError
from gnnpipe.graph.graph import Graph
from gnnpipe.registry import nearest

# The entries of the data sources; a name goes to the first one here that handles it.
for _file in reversed((embedded, synthetic, ogb, pyg_datasets, tables, pt, npz)):
    add_source(_file.SOURCE)


def load_graph(
    dataset: str,
    *,
    data_dir: str = "",
    split: str = "given",
    seed: int = 0,
    symmetrize: bool = False,
    remove_self_loops: bool = False,
    coalesce: bool = False,
    task: str = "labels",
) -> Graph:
    """The graph of the data set ``dataset`` (see ``dataset_names``), checked.

    Args:
        dataset: a name, or the path of a file or folder.
        data_dir: folder of downloaded data sets; '' is ~/.cache/gnnpipe/datasets.
        split: 'given' for the data set's own split (60/20/20 with seed 0 where it has none), or
            percentages such as '60/20/20'.
        seed: of the split by percentages.
        symmetrize: add the reverse of every edge.
        remove_self_loops: remove the data set's self-loops.
        coalesce: keep one of all parallel edges.
        task: 'labels' of the vertices, or 'links': ``split`` is then that of the links, of which
            'given' holds out 5 % to validate and 10 % to test.

    Raises:
        InputError: one line with the data set or field, the value and a remedy to try.

    >>> load_graph("karate").num_vertices
    34
    """
    request = _request(dataset, data_dir, split, seed, task)
    return _load(request, split, symmetrize, remove_self_loops, coalesce, task)


def _request(dataset: str, data_dir: str, split: str, seed: int, task: str) -> DataRequest:
    is_for_links = task == "links"
    return DataRequest(
        dataset,
        data_dir,
        needs_split=split == "given" and not is_for_links,
        needs_labels=not is_for_links,
        seed=seed,
    )


def _load(
    request: DataRequest,
    split: str,
    symmetrize: bool,
    remove_self_loops: bool,
    coalesce: bool,
    task: str,
) -> Graph:
    """The requested graph, checked; the arguments are those of ``load_graph``."""
    if request.dataset.startswith("passed-in:"):
        raise InputError(
            f"--dataset {request.dataset!r}: this run's graph was passed in from Python; pass it "
            "again: Trainer(config, graph=graph)"
        )
    raw, seed = _source_of(request.dataset).read(request), request.seed
    if task == "links":
        graph = clean(without_labels(raw), symmetrize=symmetrize)
    else:
        needs_labels = request.needs_labels
        graph = clean(raw, split=split, seed=seed, symmetrize=symmetrize, needs_labels=needs_labels)
    if remove_self_loops:
        graph = graph.without_self_loops()
    if coalesce:
        graph = graph.without_parallel_edges()
    return split_links(graph, split, seed) if task == "links" else graph


def _source_of(dataset: str) -> Source:
    for source in SOURCES:
        if source.handles(dataset):
            return source
    raise InputError(
        f"--dataset {dataset!r}: unknown dataset; {_hint(dataset)}; see `gnnpipe info --list`, or "
        "give the path of a file or folder: .npz, .csv, .parquet, .pt, or OGB's layout"
    )


def dataset_names() -> list[str]:
    """Every data set or pattern of names with a few words of help, in aligned columns."""
    lines = [line for source in SOURCES for line in source.listing]
    width = max(len(name) for name, _ in lines if len(name) < 45)
    return [f"{name:<{width}}  {text}" for name, text in lines]


def _hint(dataset: str) -> str:
    """The nearest single name, or else the families: all single names would fill a page."""
    listed = [name for source in SOURCES for name, _ in source.listing]
    single = {name for name in listed if not set("<|") & set(name)}
    hint = nearest(dataset, single.union(*(source.names for source in SOURCES)))
    if hint.startswith("did you mean"):
        return hint
    heads = dict.fromkeys(name.partition(":")[0] for name in listed)
    return "known: " + ", ".join(head for head in heads if not head.startswith("<"))


def configured_graph(config: TrainConfig, needs_labels: bool = True) -> Graph:
    """The graph that a config names, as ``load_graph`` reads it.

    ``needs_labels``: refuse a data set without labels.
    """
    split, task = config.split, config.task
    request = _request(config.dataset, config.data_dir, split, config.seed, task)
    request = replace(request, needs_labels=needs_labels and request.needs_labels)
    rest = config.symmetrize, config.remove_self_loops, config.coalesce
    return _load(request, split, *rest, task)


def unlabelled_graph(config: TrainConfig, num_classes: int) -> Graph:
    """The graph that a config names, to predict for: its labels and split are not read.

    ``num_classes``: the width of the logits; 0 if it is not known.
    """
    request = DataRequest(config.dataset, config.data_dir, needs_split=False, needs_labels=False)
    raw = _source_of(config.dataset).read(request)
    count = raw.num_vertices
    if count is None and raw.x is not None:
        count = int(raw.x.shape[0])
    bare = replace(
        raw,
        y=None,
        masks=None,
        split_seed=None,
        task="classification",
        num_vertices=count,
        num_classes=num_classes,
    )
    graph = clean(bare, symmetrize=config.symmetrize, needs_labels=False)
    if config.remove_self_loops:
        graph = graph.without_self_loops()
    return graph.without_parallel_edges() if config.coalesce else graph
