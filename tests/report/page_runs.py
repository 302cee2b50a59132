"""Run folders for the tests of the page: really trained, then changed."""

from __future__ import annotations

import json
from dataclasses import replace

from gnnpipe import TrainConfig, Trainer
from gnnpipe.perf import Trace, read_trace, write_trace

SCRIPT = "</script></pre><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\"'"


def trained_run(folder, *, predicted=False, **settings):
    """The folder of a run of two epochs on karate."""
    config = TrainConfig(
        **{
            "dataset": "karate",
            "layers": 3,
            "chunks": 3,
            "epochs": 2,
            "eval_every": 1,
            "cache_dir": "off",
            "quiet": True,
            "out": str(folder),
        }
        | settings
    )
    Trainer(config).fit()
    if predicted:
        measured = read_trace(folder / "trace.json").measured
        write_trace(folder / "trace.json", Trace(measured, twice_as_fast(measured)))
    return folder


def twice_as_fast(spans):
    return tuple(replace(s, start_s=s.start_s / 2, end_s=s.end_s / 2) for s in spans)


def change_result(folder, **values):
    path = folder / "result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(result | values), encoding="utf-8")


def hostile_words(folder):
    """The same folder; every word in it that a page could show is a script."""
    change_result(folder, dataset=SCRIPT, metric=SCRIPT)
    (folder / "config.toml").write_text(
        f"dataset = {json.dumps(SCRIPT)}\nmodel = {json.dumps(SCRIPT)}\n{json.dumps(SCRIPT)} = 3\n",
        encoding="utf-8",
    )
    (folder / "program.txt").write_text(SCRIPT, encoding="utf-8")
    trace = read_trace(folder / "trace.json")
    spans = tuple(replace(s, kind=SCRIPT, lane=SCRIPT) for s in trace.measured)
    write_trace(folder / "trace.json", Trace(spans, spans))
    return folder
