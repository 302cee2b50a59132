"""Plans that are written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers import small_graph

from gnnpipe import TrainConfig, Trainer
from gnnpipe.errors import InputError
from gnnpipe.plan import Plan
from gnnpipe.planner import check_plan
from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.setup.prepare import prepare

CONFIG = TrainConfig(
    model="gcnii", layers=4, hidden=8, epochs=2, out="off", cache_dir="off", quiet=True
)

OPS = list(range(12))
"""Encoder, ReLU, dropout; for each of 4 layers the aggregation and the call behind it; decoder."""


def written(*stages, chunks=2, schedule="fill-drain"):
    """The JSON of a plan; of each stage the ops and the ranks, with equal shares."""
    each = [{"ops": o, "ranks": r, "shares": [1 / len(r)] * len(r)} for o, r in stages]
    return json.dumps({"version": 6, "stages": each, "chunks": chunks, "schedule": schedule})


def test_a_plan_of_one_stage_trains_as_the_flags_do(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(written((OPS, [0])))
    config = {**CONFIG.to_dict(), "plan": str(file)}
    found = Trainer(TrainConfig.from_dict(config), graph=small_graph()).fit()
    flags = Trainer(
        TrainConfig.from_dict({**config, "plan": "uniform", "chunks": 2}), small_graph()
    )
    assert [row.loss for row in found.history] == [row.loss for row in flags.fit().history]


def test_a_stale_plan_with_exact_epochs_only_is_run_exactly(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(written((OPS, [0])))
    config = TrainConfig.from_dict({**CONFIG.to_dict(), "plan": str(file), "epochs": 1})
    assert prepare(config, Mesh.alone(), small_graph()).program.is_exact
    assert not prepare(replace(config, epochs=2), Mesh.alone(), small_graph()).program.is_exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            written((OPS[6:], [0]), (OPS[:6], [1])),
            "stage 0 reads op 5, which stage 1 computes later",
        ),
        (
            written(([*OPS[:3], 4], [0]), ([3, *OPS[5:]], [1])),
            "stage 0 is not convex: ops 2 and 4 are in the stage, but op 3 between them is in sta",
        ),
        (written((OPS[:-1], [0])), "is for 11 ops, and GCNII has 12; try the --layers that the pl"),
        (written((OPS, [0]), schedule="zigzag"), "schedule 'zigzag'"),
        (written((OPS, [1, 0])), r"stages\[0\]: ranks \[1, 0\]: must ascend; try"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(text, message):
    model = prepare(CONFIG, Mesh.alone(), small_graph()).model_graph
    with pytest.raises(InputError, match=message):
        check_plan(Plan.from_json(text), model)
