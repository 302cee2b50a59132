"""Bad input of every kind: exit code 2, one line that says what and what to try, nothing written.

A kind is a name, what makes the command's words in an empty folder, and words that the line must
hold: the flag or field, the value, and what to try.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bad_files import (
    cut_off,
    entries,
    entry,
    evil_npz,
    evil_pickle,
    evil_pt,
    flipped,
    folder_instead,
    link_to,
    npz,
    ogb,
    ogb_binary,
    packed,
    pipe_instead,
    promising,
    pyg_files,
    toml,
    written,
    x_with,
)

import gnnpipe.train.trainer  # noqa: F401, so that no case waits for torch
from gnnpipe import TrainConfig, Trainer
from gnnpipe.cli.main import main
from gnnpipe.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--dataset", "karate", "--hidden", "8", "--epochs", "2", "--cache-dir", "off"]
BIG = np.iinfo(np.int64).max


def words(text):
    """The words of a command line; '·' stands for one that is empty."""
    return lambda folder: ["" if word == "·" else word for word in text.split(" ")]


KINDS = {
    # flags as words
    "flag misspelt": (words("--layer 3"), ["--layer: unknown flag", "'--layers'"]),
    "flag shortened": (words("--lay 3"), ["--lay: unknown flag", "'--layers'"]),
    "flag far off": (words("--use-gpu"), ["--use-gpu: unknown flag", "gnnpipe train --help"]),
    "flag of nothing": (words("--zzz 3"), ["--zzz: unknown flag", "gnnpipe train --help"]),
    "flag without value": (words("--lr"), ["--lr", "expected one argument", "--help"]),
    "switch with a value": (words("--recompute yes"), ["--recompute 'yes'", "--no-recompute"]),
    "switch = value": (words("--recompute=yes"), ["--recompute 'yes'", "--no-recompute"]),
    "optional switch, value": (words("--shuffle-chunks 1"), ["--shuffle-chunks '1'", "alone"]),
    "word without flag": (words("karate"), ["'karate'", "a value without a flag", "--help"]),
    "two dashes": (words("-- --layers"), ["'--", "a value without a flag", "--help"]),
    "fraction for a count": (words("--layers 1.5"), ["--layers: '1.5'", "whole number"]),
    "exponent for a count": (words("--layers 1e3"), ["--layers: '1e3'", "whole number"]),
    "hexadecimal": (words("--layers 0x10"), ["--layers: '0x10'", "whole number"]),
    "word for a number": (words("--lr fast"), ["--lr: 'fast'", "a number"]),
    "empty number": (words("--lr ·"), ["--lr: ''", "a number"]),
    "count of 5,000 digits": (words("--layers " + "9" * 5000), ["--layers: '999", "whole"]),
    "second of two": (words("--layers 3 --layers 4x"), ["--layers: '4x'", "whole number"]),
    # borders
    "no epoch": (words("--epochs 0"), ["--epochs 0", "at least 1"]),
    "negative layers": (words("--layers -2"), ["--layers -2", "at least 1"]),
    "too many layers": (words("--layers 1000000000"), ["--layers 1000000000", "at most 10,000"]),
    "hidden beyond all": (words("--hidden 1000000000"), ["--hidden", "at most 1,000,000"]),
    "weights beyond memory": (
        words("--hidden 200000 --layers 20"),
        ["--hidden 200000", "--layers 20", "weights", "GiB", "try --hidden 64"],
    ),
    "lr nan": (words("--lr nan"), ["--lr nan", "finite"]),
    "lr inf": (words("--lr inf"), ["--lr inf", "finite"]),
    "lr 0": (words("--lr 0"), ["--lr 0", "more than 0"]),
    "lr beyond float32": (words("--lr 1e300"), ["--lr 1e+300", "at most"]),
    "decay beyond float32": (words("--weight-decay 1e300"), ["--weight-decay 1e+300", "at most"]),
    "dropout 1": (words("--dropout 1"), ["--dropout 1", "less than 1"]),
    "negative dropout": (words("--dropout -0.1"), ["--dropout -0.1", "at least 0"]),
    "alpha 1": (words("--model gcnii --model-args alpha=1"), ["'alpha=1'", "less than 1"]),
    "theta 0": (words("--model gcnii --model-args theta=0"), ["'theta=0'", "more than 0"]),
    "no heads": (words("--model gat --model-args heads=0"), ["'heads=0'", "less than 1"]),
    "heads of gcn": (words("--model-args heads=2"), ["'heads=2'", "gcn has no argument 'heads'"]),
    "args of a name": (words("--model gat --model-args head=2"), ["'head=2'", "mean 'heads'"]),
    "args of a setting": (words("--model-args hidden=8"), ["'hidden=8'", "try --hidden 8"]),
    "args are no value": (words("--model-args heads=two"), ["heads=two", "heads='two'"]),
    "args are cut off": (words("--model-args heads=("), ["'heads=('", "heads=8"]),
    "args without a name": (words("--model-args 8"), ["'8'", "keyword arguments", "heads=8"]),
    "args of a dict": (words("--model-args **{}"), ["'**{}'", "keyword arguments"]),
    "args twice": (words("--model gat --model-args heads=2,heads=4"), ["heads is given twice"]),
    "a file without a function": (words("--model net.py"), ["'net.py'", "try net.py:make_model"]),
    "args end early": (words("--model-args a=1)(b=2"), ["'a=1)(b=2'", "keyword arguments"]),
    "heads are text": (words("--model gat --model-args heads='2'"), ["wrong type", "heads='2'"]),
    "seed too large": (words("--seed 4294967296"), ["--seed 4294967296", "4,294,967,295"]),
    "negative seed": (words("--seed -1"), ["--seed -1", "at least 0"]),
    "no seeds": (words("--seeds 0"), ["--seeds 0", "at least 1"]),
    "no patience": (words("--timeout 0"), ["--timeout 0", "more than 0"]),
    "timeout of ages": (words("--timeout 1e10"), ["--timeout", "at most"]),
    "snapshot every 0": (words("--snapshot-every 0"), ["--snapshot-every 0", "at least 1"]),
    "evaluations past all": (words("--eval-every " + "9" * 20), ["--eval-every 999", "at most"]),
    "no chunks": (words("--chunks 0"), ["--chunks 0", "at least 1"]),
    "more chunks than rows": (words("--chunks 35"), ["--chunks 35", "34"]),
    "chunks past the program": (words("--chunks 1000000000"), ["--chunks 1000000000", "(34)"]),
    "chunks beyond all": (words("--chunks " + "9" * 30), ["--chunks 999", "at most"]),
    # choices and names
    "model misspelt": (words("--model gcnn"), ["--model 'gcnn'", "'gcn'"]),
    "model in capitals": (words("--model GCN"), ["--model 'GCN'", "'gcn'"]),
    "model empty": (words("--model ·"), ["--model ''", "known: gat"]),
    "dtype unknown": (words("--dtype half"), ["--dtype 'half'", "float32"]),
    "device with number": (words("--device cuda:0"), ["--device 'cuda:0'", "cuda"]),
    "staleness misspelt": (words("--staleness papre"), ["--staleness 'papre'", "paper"]),
    "partitioner misspelt": (words("--partitioner meits"), ["'meits'", "'metis'"]),
    "metric for other task": (words("--metric r2"), ["--metric r2", "karate"]),
    "dataset misspelt": (words("--dataset debain"), ["--dataset 'debain'", "'debian'"]),
    "dataset empty": (words("--dataset ·"), ["--dataset ''", "known: debian"]),
    "dataset a folder": (words("--dataset .."), ["--dataset '..'", ".npz"]),
    "dataset .pt": (words("--dataset debian.pt"), ["'debian.pt': no such file"]),
    "dataset .csv": (words("--dataset edges.csv"), ["'edges.csv': no such file"]),
    "dataset not there": (words("--dataset no/graph.npz"), ["'no/graph.npz'", "no such file"]),
    "dataset of no user": (words("--dataset ~no/g.npz"), ["'~no/g.npz'", "no such file"]),
    "dataset in Chinese": (words("--dataset 图.npz"), ["'图.npz'", "no such file"]),
    "dataset in Python": (words("--dataset passed-in:mine"), ["'passed-in:mine'", "graph=graph"]),
    "model in Python": (words("--model passed-in:Net"), ["'passed-in:Net'", "model=model"]),
    "generator unknown": (words("--dataset synthetic:tree"), ["'tree'", "planted"]),
    "generator key": (words("--dataset synthetic:planted:m=3"), ["'m'"]),
    "generator key twice": (
        words("--dataset synthetic:planted:n=100,n=200"),
        ["n is given twice", "leave one out"],
    ),
    "generator too large": (
        words("--dataset synthetic:planted:n=2e9"),
        ["synthetic:planted:n=2e9", "GiB", "smaller n"],
    ),
    "space in a value": (lambda f: ["--model", " gcn"], ["--model ' gcn'", "try 'gcn'"]),
    "newline in a path": (lambda f: ["--out", "a\nb"], ["--out 'a\\nb'", "not text; remove it"]),
    "no UTF-8 in a path": (
        lambda f: ["--out", "a\udcff"],
        ["--out 'a\\udcff'", "not text; remove it"],
    ),
    "null byte in a path": (lambda f: ["--data-dir", "a\0b"], ["--data-dir 'a\\x00b'"]),
    # contradictions
    "split to nobody": (words("--split 0/50/50"), ["--split '0/50/50'", "60/20/20"]),
    "split past 100": (words("--split 60/20/30"), ["'60/20/30'", "add up to 100", "60/20/20"]),
    "split of words": (words("--split nan/50/50"), ["--split 'nan/50/50'", "60/20/20"]),
    "split too small": (words("--split 0.1/50/49.9"), ["train_mask", "--split 60/20/20"]),
    "heads do not divide": (
        words("--model gat --model-args heads=3"),
        ["--model gat", "'heads=3'", "try hidden 9"],
    ),
    "stages without torchrun": (words("--stages 2"), ["--stages 2", "torchrun --nproc-per-node 2"]),
    "shards without torchrun": (words("--shards 3"), ["--shards 3", "torchrun"]),
    "exact and shuffled": (
        words("--chunks 2 --staleness exact --shuffle-chunks"),
        ["--shuffle-chunks True"],
    ),
    "patience unseen": (words("--patience 5 --eval-every 0"), ["--patience 5", "--eval-every 5"]),
    "warm-up past the end": (words("--warmup-epochs 2"), ["--warmup-epochs 2", "--epochs 2"]),
    # folders
    "out a file": (written("run.txt", b"", ["--out", "run.txt"]), ["--out 'run.txt'", "a folder"]),
    "out in a file": (written("a", b"", ["--out", "a/run"]), ["--out 'a/run'", "another folder"]),
    "out in /proc": (words("--out /proc/run"), ["--out '/proc/run'", "another folder"]),
    "out in use": (written("a", b"", ["--out", "."]), ["--out '.'", "a new folder"]),
    "out a broken link": (link_to("run.d", "/proc/no/where", ["--out", "run.d"]), ["--out"]),
    "cache a file": (
        written("a", b"", ["--cache-dir", "a/b", "--chunks", "2"]),
        ["--cache-dir 'a/b'", "'off'"],
    ),
    "cache a device": (words("--cache-dir /dev/null"), ["--cache-dir '/dev/null'", "'off'"]),
    "data a file": (
        written("a", b"", ["--dataset", "cora", "--data-dir", "a"]),
        ["--data-dir 'a'"],
    ),
    "data for OGB a file": (
        written("a", b"", ["--dataset", "ogbn-arxiv", "--data-dir", "a"]),
        ["--data-dir 'a'"],
    ),
    "out too long": (words("--out " + "a" * 300), ["--out 'aaa", "shorten it"]),
    "out of too many": (words("--out " + "a/" * 3000), ["--out 'a/a", "shorten it"]),
    # TOML
    "config not there": (words("--config no.toml"), ["--config 'no.toml'", "a TOML file"]),
    "config a folder": (words("--config ."), ["--config '.'", "a TOML file"]),
    "config a device": (words("--config /dev/zero"), ["--config '/dev/zero'", "a TOML file"]),
    "config a pipe": (pipe_instead("p", ["--config", "p"]), ["--config 'p'", "regular file"]),
    "config too long": (words("--config " + "c" * 300), ["--config 'ccc", "a TOML file"]),
    "config unnamed": (words("--config ·"), ["--config ''", "a TOML file"]),
    "TOML unknown key": (toml("layerz = 3"), ["'layerz'", "'layers'"]),
    "TOML key of earlier": (toml("heads = 3"), ["'heads'", "model_args = 'heads=3'"]),
    "TOML other version": (toml("layers = 3\nwarp = 9"), ["'warp'", "run.toml"]),
    "TOML unknown table": (toml("[train]\nlayers = 3"), ["'train'", "run.toml"]),
    "TOML nested table": (toml("[layers.a.b]\nc = 3"), ["--layers {'a'", "a whole number"]),
    "TOML list": (toml("layers = [3]"), ["--layers [3]", "a whole number"]),
    "TOML text for number": (toml("layers = 'three'"), ["--layers 'three'", "a whole number"]),
    "TOML fraction": (toml("layers = 3.0"), ["--layers 3.0", "a whole number"]),
    "TOML true for number": (toml("lr = true"), ["--lr True", "a number"]),
    "TOML number for text": (toml("model = 3"), ["--model 3", "text"]),
    "TOML text for switch": (toml("recompute = 'yes'"), ["--recompute 'yes'", "true or false"]),
    "TOML date": (toml("seed = 2026-11-22"), ["--seed", "a whole number"]),
    "TOML key twice": (toml("layers = 3\nlayers = 4"), ["run.toml", "not valid TOML"]),
    "TOML key in two ways": (toml("eval-every = 3\neval_every = 4"), ["eval-every", "leave one"]),
    "TOML torn": (toml("layers = "), ["run.toml", "not valid TOML"]),
    "TOML not UTF-8": (toml(b"model = '\xff'"), ["run.toml", "UTF-8"]),
    "TOML too large": (toml(b"#" * (2 << 20)), ["run.toml", "larger than 1 MiB"]),
    "TOML too deep": (toml("layers = " + "[" * 50_000), ["run.toml", "not valid TOML"]),
    "TOML many digits": (toml("layers = " + "1" * 9_000), ["run.toml", "not valid TOML"]),
    "TOML nan": (toml("lr = nan"), ["--lr nan", "finite"]),
    # npz: the file
    "npz empty": (written("graph.npz", b"", ["--dataset", "graph.npz"]), ["'graph.npz'", "savez"]),
    "npz of text": (written("g.npz", b"0 1\n1 2\n", ["--dataset", "g.npz"]), ["g.npz", "savez"]),
    "json by path": (written("g.json", b"{}", ["--dataset", "./g.json"]), ["g.json", "no .npz"]),
    "folder without a graph": (written("notes", b"a", ["--dataset", "./"]), ["'./'", "edges.csv"]),
    "npz a folder": (folder_instead("g.npz", ["--dataset", "g.npz"]), ["'g.npz'", "a folder"]),
    "npz a pipe": (
        pipe_instead("g.npz", ["--dataset", "g.npz"]),
        ["'g.npz'", "not a regular file"],
    ),
    "npz a link to itself": (link_to("g.npz", "g.npz", ["--dataset", "g.npz"]), ["'g.npz'"]),
    "npz a link to a device": (link_to("g.npz", "/dev/zero", ["--dataset", "g.npz"]), ["g.npz"]),
    "npz a single array": (
        written("g.npz", entry(np.arange(3)), ["--dataset", "g.npz"]),
        ["g.npz", "a single array"],
    ),
    "npz cut off": (cut_off(300), ["'graph.npz'", "savez"]),
    "npz without directory": (cut_off(2000), ["'graph.npz'", "savez"]),
    "npz with a flipped byte": (flipped, ["'graph.npz'", "savez"]),
    "npz of objects": (npz(y=np.array([{}] * 40, object)), ["y", "objects", "allow_pickle=False"]),
    "npz of evil objects": (evil_npz, ["y", "objects", "allow_pickle=False"]),
    "npz promising terabytes": (
        packed(entries(x=promising("<f4", (10**12, 5)))),
        ["x promises 20,000,000,000,000 bytes"],
    ),
    "npz promising too little": (
        packed(entries(x=promising("<f4", (4, 5), b"0" * 800))),
        ["x promises 80 bytes"],
    ),
    "npz of negative length": (packed(entries(x=promising("<f4", (-4, 5)))), ["x", "shape"]),
    "npz of unknown type": (packed(entries(x=promising("<q9", (4, 5)))), ["graph.npz", "savez"]),
    "npz with a strange header": (packed(entries(x=b"\x93NUMPY\x07\x07??")), ["graph.npz"]),
    "npz with no header": (packed(entries(x=b"hello")), ["graph.npz", "savez"]),
    "npz key twice": (
        packed([*entries(), ("x", entry(np.zeros((40, 5))))]),
        ["two entries named 'x'"],
    ),
    "npz with .. in names": (
        packed([(f"../../{name}", content) for name, content in entries()]),
        ["no key"],
    ),
    "npz packed by lzma": (packed(entries(), compression=14), ["graph.npz", "packed"]),
    # npz: what is in it
    "npz without edges": (npz(edge_index=None), ["no key 'edge_index'"]),
    "npz without x": (npz(x=None), ["no features", "x_data"]),
    "npz without y": (npz(y=None), ["no key 'y'"]),
    "npz without a mask": (npz(train_mask=None), ["train_mask", "--split 60/20/20"]),
    "x nan": (npz(x=x_with(np.nan)), ["x[3, 2] = nan", "nan_to_num"]),
    "x inf": (npz(x=x_with(-np.inf)), ["x[3, 2] = -inf", "nan_to_num"]),
    "x beyond float32": (npz(x=x_with(1e300)), ["x[3, 2] = inf", "float32"]),
    "x complex": (npz(x=np.ones((40, 5), complex)), ["x is of type complex128", "float32"]),
    "x of words": (npz(x=np.full((40, 5), "a")), ["x is of type <U1", "float32"]),
    "x too short": (npz(x=np.ones((39, 5))), ["x has shape [39, 5] for 40", "[40, F]"]),
    "x without columns": (npz(x=np.ones((40, 0))), ["x has shape [40, 0]", "F >= 1"]),
    "x a number": (npz(x=np.float32(3)), ["x has shape", "[40, F]"]),
    "x of three axes": (npz(x=np.ones((40, 5, 2))), ["x has shape [40, 5, 2]"]),
    "edge past the last": (npz(edge_index=[[0, 40], [1, 2]]), ["edge_index", "40", "0..39"]),
    "edge below 0": (npz(edge_index=[[0, -1], [1, 2]]), ["edge_index", "-1"]),
    "edges past 2^63": (npz(edge_index=np.full((2, 2), 2**63, np.uint64)), ["edge_index", "0..39"]),
    "edges as fractions": (npz(edge_index=np.ones((2, 3))), ["edge_index", "float64", "int64"]),
    "edges upside down": (npz(edge_index=np.ones((3, 2), int)), ["edge_index", "[3, 2]", "[2, E]"]),
    "edges a number": (npz(edge_index=np.int64(3)), ["edge_index", "[2, E]"]),
    "weights too short": (npz(edge_weight=np.ones(7)), ["edge_weight", "[7]", "160"]),
    "weights nan": (npz(edge_weight=np.full(160, np.nan)), ["edge_weight[0] = nan", "finite"]),
    "types below 0": (npz(edge_type=np.full(160, -1)), ["edge_type", "below 0"]),
    "types past 2^31": (npz(edge_type=np.full(160, BIG)), ["edge_type"]),
    "y too large": (npz(y=np.full(40, 41)), ["y[0] = 41", "classes 0..39"]),
    "y past 2^62": (npz(y=np.full(40, BIG)), ["y[0]", "classes 0..39"]),
    "y below -1": (npz(y=np.full(40, -7)), ["y[0] = -7", "classes"]),
    "y of fractions": (npz(y=np.full(40, 0.5)), ["y[0] = 0.5", "classes", "regression"]),
    "y of nobody": (npz(y=np.full(40, -1)), ["y: no vertex is labelled", "0..C-1"]),
    "y of words": (npz(y=np.full(40, "cat")), ["y is of type <U3", "classes"]),
    "y too short": (npz(y=np.zeros(39, int)), ["39", "40"]),
    "y of three axes": (npz(y=np.zeros((40, 2, 2), int)), ["y has shape [40, 2, 2]"]),
    "no vertices": (
        npz(
            x=np.ones((0, 5)),
            y=np.zeros(0, int),
            edge_index=np.zeros((2, 0), int),
            train_mask=np.zeros(0, bool),
            val_mask=np.zeros(0, bool),
            test_mask=np.zeros(0, bool),
        ),
        ["no vertices"],
    ),
    "y inf": (npz(y=np.full(40, np.inf), task="regression"), ["y[0, 0] = inf", "NaN = none"]),
    "task unknown": (npz(task="ranking"), ["task 'ranking'", "regression"]),
    "task a list": (npz(task=["a", "b"]), ["task", "regression"]),
    "classes of words": (npz(num_classes="four"), ["num_classes", "whole number"]),
    "classes past all": (npz(num_classes=10**12), ["num_classes = 1000000000000"]),
    "classes too few": (npz(num_classes=2), ["y[2] = 2", "num_classes is 2"]),
    "mask too short": (npz(val_mask=np.zeros(7, bool)), ["val_mask"]),
    "mask of nobody": (npz(train_mask=np.zeros(40, bool)), ["train_mask", "--split 60/20/20"]),
    "mask past the last": (npz(train_mask=np.array([99])), ["train_mask[0] = 99", "range"]),
    "mask names one twice": (npz(train_mask=np.array([3, 3])), ["train_mask", "vertex 3 2 times"]),
    "mask of words": (npz(train_mask=np.full(40, "yes")), ["train_mask"]),
    "mask nan": (npz(train_mask=np.full(40, np.nan)), ["train_mask"]),
    "x_shape of words": (
        npz(x=None, x_data=[1.0], x_indices=[0], x_indptr=[0, 1], x_shape="a"),
        ["CSR"],
    ),
    "x_shape past memory": (
        npz(x=None, x_data=[1.0], x_indices=[0], x_indptr=[0, 1], x_shape=[10**12, 5]),
        ["CSR"],
    ),
    "x_indices past columns": (
        npz(x=None, x_data=[1.0], x_indices=[9], x_indptr=[0] + [1] * 40, x_shape=[40, 5]),
        ["CSR"],
    ),
    # OGB's layout
    "OGB file missing": (ogb(valid=None), ["valid.csv.gz", "anew"]),
    "OGB not gzip": (ogb(edge=b"0,1\n"), ["edge.csv.gz", "anew"]),
    "OGB empty file": (ogb(edge=b""), ["edge_index", "[2, E]"]),
    "OGB cut off": (ogb(edge=b"\x1f\x8b\x08\x00\x00\x00\x00\x00"), ["edge.csv.gz", "anew"]),
    "OGB words": (ogb(edge=["0,1", "1,a"]), ["edge.csv.gz", "anew"]),
    "OGB ragged": (ogb(edge=["0,1", "1,2,3"]), ["edge.csv.gz", "anew"]),
    "OGB fractions": (ogb(edge=["0,1.5"]), ["edge.csv.gz", "anew"]),
    "OGB past the last": (ogb(edge=[(0, 5)]), ["edge_index", "0..4"]),
    "OGB label past all": (ogb(node_label=[0, 1, 40, 3, 4]), ["y[2] = 40", "0..39"]),
    "OGB nan feature": (ogb(node_feat=[[np.nan, 1]] * 5), ["x[0, 0] = nan"]),
    "OGB other count": (ogb(num_node_list=[6]), ["5 labels for 6 vertices"]),
    "OGB count past all": (ogb(num_node_list=[10**18]), ["10", "vertices"]),
    "OGB negative count": (ogb(num_node_list=[-3]), ["vertices"]),
    "OGB two splits": (ogb(train=[0, 2, 9]), ["train_mask[2] = 9"]),
    "OGB empty train": (ogb(train=[]), ["train_mask", "--split 60/20/20"]),
    "OGB key missing": (ogb_binary(node_feat=None), ["node_feat", "data.npz"]),
    "OGB count of words": (ogb_binary(num_nodes_list=np.array(["a"])), ["number of", "anew"]),
    "OGB of objects": (ogb_binary(node_label=np.array([{}] * 5, object)), ["objects"]),
    "OGB edges of floats": (ogb_binary(edge_index=np.ones((2, 3))), ["edge_index", "float64"]),
    # PyG's files
    "PyG of nonsense": (pyg_files(raw__ms_academic_cs_npz=b"no"), ["coauthor:CS", "remove them"]),
    "PyG evil raw": (
        pyg_files(raw__ms_academic_cs_npz=lambda f: evil_pickle(f)),
        ["coauthor:CS", "remove them"],
    ),
    "PyG evil processed": (
        pyg_files(raw__ms_academic_cs_npz=b"no", processed__data_pt=evil_pt),
        ["remove them"],
    ),
    "PyG evil pickle": (
        pyg_files(raw__ms_academic_cs_npz=b"no", processed__data_pt=evil_pickle),
        ["remove them"],
    ),
    "PyG evil beside": (
        pyg_files(raw__ms_academic_cs_npz=b"no", processed__pre_transform_pt=evil_pt),
        ["remove them"],
    ),
    "PyG member unknown": (words("--dataset coauthor:Maths"), ["coauthor", "'maths'"]),
}


def tree_of(folder):
    """Every path below a folder with what it holds."""
    return {
        path: path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }


def check_refused(code, out, err, time_s, folder, before):
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert err.startswith("gnnpipe: error: ")
    assert len(err) < 1000, err
    assert "Traceback" not in err + out
    assert time_s < 10
    assert tree_of(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, expected = KINDS[kind]
    arguments = ["train", *SMALL, "--out", "run", *make(tmp_path)]
    before = tree_of(tmp_path)
    start = time.monotonic()
    code = main(arguments)
    time_s = time.monotonic() - start
    out, err = capsys.readouterr()
    check_refused(code, out, err, time_s, tmp_path, before)
    for word in expected:
        assert word in err, err


TOGETHER = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
ENVIRONMENTS = {
    "world of words": ({"WORLD_SIZE": "two"}, ["WORLD_SIZE 'two'", "whole number", "unset"]),
    "world empty": ({"WORLD_SIZE": ""}, ["WORLD_SIZE ''", "unset"]),
    "world negative": ({"WORLD_SIZE": "-1"}, ["WORLD_SIZE '-1'", "unset"]),
    "world 0": ({"WORLD_SIZE": "0"}, ["WORLD_SIZE '0'", "unset"]),
    "world past all": ({"WORLD_SIZE": "9" * 30}, ["WORLD_SIZE '999", "unset"]),
    "world of another job": ({"WORLD_SIZE": "3"}, ["need 2 ranks, not 3", "torchrun"]),
    "rank missing": (TOGETHER | {"RANK": None}, ["RANK (not set)", "0..1", "torchrun"]),
    "rank of words": (TOGETHER | {"RANK": "first"}, ["RANK 'first'", "0..1"]),
    "rank past the last": (TOGETHER | {"RANK": "5"}, ["RANK '5'", "0..1"]),
    "local rank of words": (TOGETHER | {"LOCAL_RANK": "x"}, ["LOCAL_RANK 'x'", "whole number"]),
    "address missing": (TOGETHER | {"MASTER_ADDR": None}, ["MASTER_ADDR", "127.0.0.1"]),
    "address of nobody": (TOGETHER | {"MASTER_ADDR": "no.such.host.invalid"}, ["MASTER_ADDR"]),
    "port missing": (TOGETHER | {"MASTER_PORT": None}, ["MASTER_PORT (not set)", "1..65535"]),
    "port of words": (TOGETHER | {"MASTER_PORT": "http"}, ["MASTER_PORT 'http'", "1..65535"]),
    "port past the last": (TOGETHER | {"MASTER_PORT": "99999"}, ["MASTER_PORT '99999'"]),
}


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_bad_environment(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment, expected = ENVIRONMENTS[kind]
    for name in (*TOGETHER, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    start = time.monotonic()
    code = main(["train", *SMALL, "--out", "run", "--stages", "2"])
    time_s = time.monotonic() - start
    out, err = capsys.readouterr()
    check_refused(code, out, err, time_s, tmp_path, {})
    for word in expected:
        assert word in err, err


def test_at_least_sixty_kinds():
    assert len(KINDS) + len(ENVIRONMENTS) >= 60


def test_an_error_is_told_whatever_rank_another_job_has_left(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    assert main(["train", *SMALL, "--layers", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npz of evil objects", "PyG evil processed", "TOML too deep"])
def test_bad_input_in_a_process_of_its_own(kind, tmp_path):
    make, expected = KINDS[kind]
    arguments = ["train", *SMALL, "--out", "run", *make(tmp_path)]
    before = tree_of(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "gnnpipe", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    # Importing torch may take seconds here, which is not the reader's time.
    check_refused(done.returncode, done.stdout, done.stderr, 0, tmp_path, before)
    for word in expected:
        assert word in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = npz()(tmp_path)
    (tmp_path / "graph.npz").chmod(0)
    assert main(["train", *SMALL, *arguments, "--out", "run"]) == 2
    assert "Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"config": {"epochs": 3}}, "config: is a dict, not a gnnpipe.TrainConfig"),
        ({"graph": object()}, "graph: is a object, not a gnnpipe.Graph; try Graph.from_pyg"),
        ({"model": "gcn"}, "model: is a str, not a torch.nn.Module; or try --model"),
        ({"plan": 3}, "plan: is a int; try Plan.from_json(text)"),
    ],
)
def test_a_part_of_another_kind_is_refused_where_it_is_given(parts, said):
    config = TrainConfig(dataset="karate", out="off", quiet=True)
    with pytest.raises(InputError, match=re.escape(said)):
        Trainer(**{"config": config} | parts)
