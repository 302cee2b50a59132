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


def written(*stages, chunks=2, schedule="fill-drain"):
    """The JSON of a plan; of each stage the ops and the ranks, with equal shares."""
    each = [{"ops": o, "ranks": r, "shares": [1 / len(r)] * len(r)} for o, r in stages]
    return json.dumps({"version": 6, "stages": each, "chunks": chunks, "schedule": schedule})


def test_a_plan_of_one_stage_trains_as_the_flags_do(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(written(([0, 1, 2, 3], [0])))
    config = {**CONFIG.to_dict(), "plan": str(file)}
    found = Trainer(TrainConfig.from_dict(config), graph=small_graph()).fit()
    flags = Trainer(
        TrainConfig.from_dict({**config, "plan": "uniform", "chunks": 2}), small_graph()
    )
    assert [row.loss for row in found.history] == [row.loss for row in flags.fit().history]


def test_a_stale_plan_with_exact_epochs_only_is_run_exactly(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(written(([0, 1, 2, 3], [0])))
    config = TrainConfig.from_dict({**CONFIG.to_dict(), "plan": str(file), "epochs": 1})
    assert prepare(config, Mesh.alone(), small_graph()).program.is_exact
    assert not prepare(replace(config, epochs=2), Mesh.alone(), small_graph()).program.is_exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (written(([2, 3], [0]), ([0, 1], [1])), "stage 0 reads layer 1, which stage 1 computes la"),
        (written(([0, 2], [0]), ([1, 3], [1])), "stage 0 is not convex: layers 0 and 2 are in the"),
        (written(([0, 1, 2], [0])), "is for 3 layers, and gcnii has 4; try --layers 3"),
        (written(([0, 1, 2, 3], [0]), schedule="zigzag"), "schedule 'zigzag'"),
        (written(([0, 1, 2, 3], [1, 0])), r"stages\[0\]: ranks \[1, 0\]: must ascend; try"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused(text, message):
    model = prepare(CONFIG, Mesh.alone(), small_graph()).model_graph
    with pytest.raises(InputError, match=message):
        check_plan(Plan.from_json(text), model)
