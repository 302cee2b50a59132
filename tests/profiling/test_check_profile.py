"""A profile fits a run if all stages recompute as in it; warnings of a busy machine."""

from dataclasses import replace

import pytest
from helpers import small_graph
from profiles import prepared_of, profile_of

from gnnpipe.cli.main import main
from gnnpipe.config import TrainConfig
from gnnpipe.errors import InputError
from gnnpipe.perf import Profile
from gnnpipe.perf.profile import LinkTimes
from gnnpipe.plan import Plan, StagePlan
from gnnpipe.planner.given_devices import profile_or_sheets
from gnnpipe.profiling.predict import check_profile
from gnnpipe.profiling.steps import work_of
from gnnpipe.setup.chunk_sizes import chunk_sizes


def plan_of(*recompute):
    """A plan of four ops in two stages, which recompute or not."""
    stages = [StagePlan((0, 1), (0,), (1.0,)), StagePlan((2, 3), (1,), (1.0,))]
    of_stage = zip(stages, recompute, strict=True)
    return Plan(tuple(replace(s, recompute=r) for s, r in of_stage), 2, "layer-sync")


@pytest.mark.parametrize(
    ("flag", "by_stage", "measured", "told"),
    [
        (False, (False, False), False, ""),
        (True, (False, False), True, ""),
        # The times of a stage that the plan recomputes are derived.
        (False, (True, False), False, ""),
        (True, (True, True), False, ""),
        (False, (True, True), True, ""),
        (
            False,
            (True, False),
            True,
            "with --recompute, and stage 1 of the plan does not recompute",
        ),
        (True, (True, False), False, "without --recompute, and stage 1 of the plan recomputes"),
        (
            True,
            (False, False),
            False,
            "without --recompute, and the run recomputes; take one with ",
        ),
        (False, (False, False), True, "with --recompute, and the run does not recompute"),
    ],
)
def test_recomputation_is_compared_by_stage(flag, by_stage, measured, told):
    prepared = prepared_of(layers=4, recompute=flag)
    profile = profile_of(prepared.model_graph, recompute=measured)
    if not told:
        check_profile(prepared.config, profile, 2, False, plan_of(*by_stage))
        return
    with pytest.raises(InputError, match=told):
        check_profile(prepared.config, profile, 2, False, plan_of(*by_stage))


def test_steps_of_a_stage_that_recomputes_are_fitted_as_the_costs_derive_them():
    """The work of backward contains that of forward, without the sums over edges that are kept."""
    found = []
    for recomputes in (False, True):
        graph = small_graph(features=20, sparse=True)  # wide, so that every layer pushes rows
        prepared = prepared_of(graph, layers=3, chunks=2, staleness="exact")
        (stage,) = prepared.plan.stages
        plan = replace(prepared.plan, stages=(replace(stage, recompute=recomputes),))
        prepared = replace(prepared, dag=replace(prepared.dag, plan=plan))
        found.append(work_of(("backward", 0, 0, 2), prepared, chunk_sizes(prepared), 0))
    plain, again = found
    added = {part: work for part, work in again.items() if part not in plain}
    assert again == plain | added
    assert {part for _, part in added} == {"forward_before", "forward_after"}
    for (kind, part), work in added.items():
        of_backward = plain[kind, part.replace("forward", "backward")]
        assert (work.rows, work.times) == (of_backward.rows, of_backward.times)
        assert (of_backward.edges > 0) == kind.startswith("aggregate, ")
        assert work.edges == (0 if part == "forward_after" else of_backward.edges)


def with_errors(profile, error, waiting):
    compute = [
        replace(t, ops={k: replace(op, relative_error=error) for k, op in t.ops.items()})
        for t in profile.compute
    ]
    return replace(profile, compute=tuple(compute), waiting_share=waiting)


def test_a_profile_warns_of_the_worst_fit_of_all_ops_and_links(tmp_path):
    good = with_errors(profile_of(prepared_of().model_graph), 0.1, 0.0)
    bad = with_errors(good, 0.4, 0.0)
    # One rank alone is measured badly, several at once are not.
    both = replace(good, compute=(*bad.compute, replace(good.compute[0], ranks=4)))
    assert "is off by 40%" in both.doubts()
    off = replace(good, shard_sum=LinkTimes(1e-5, 1e9, 0.7))
    assert off.doubts() == "the fit of shard sum is off by 70%"
    path = tmp_path / "bad.json"
    path.write_text(off.to_json())
    with pytest.warns(UserWarning, match=r"--profile '.*bad.json': the fit of shard sum is off"):
        assert Profile.read_to_use(str(path)) == off


def test_a_simulation_with_a_doubtful_profile_warns(tmp_path):
    profile = with_errors(profile_of(prepared_of().model_graph), 0.4, 0.0)
    path = tmp_path / "bad.json"
    path.write_text(profile.to_json())
    config = TrainConfig(profile=str(path))
    with pytest.warns(UserWarning, match="is off by 40%; measure again"):
        assert profile_or_sheets(config, None) == profile


@pytest.mark.parametrize(
    ("error", "waiting", "told"),
    [
        (0.25, 0.1, []),
        (0.4, 0.0, ["warning: the fit of linear, out 4", "is off by 40%; measure again"]),
        (
            0.1,
            0.34,
            ["warning: the machine was busy: a rank waited for a core for 34% of the time"],
        ),
        (0.4, 0.34, ["is off by 40% and the machine was busy", "on an idle machine"]),
    ],
)
def test_a_profile_warns_of_bad_fits_and_of_a_busy_machine(error, waiting, told):
    profile = with_errors(profile_of(prepared_of().model_graph), error, waiting)
    lines = [line for line in profile.lines() if line.startswith("warning: ")]
    assert len(lines) == bool(told)
    for word in told:
        assert word in lines[0]
    read = Profile.from_json(profile.to_json())
    assert read.waiting_share == waiting
    assert read.doubts() == profile.doubts()


@pytest.mark.parametrize("plan", [[], ["--plan", "auto", "--devices", "1", "--staleness", "exact"]])
@pytest.mark.filterwarnings("default:.*the machine was busy")
def test_simulate_warns_of_its_profile_once(plan, tmp_path, capsys):
    file = tmp_path / "profile.json"
    file.write_text(with_errors(profile_of(prepared_of().model_graph), 0.1, 0.5).to_json())
    settings = ["--dataset", "karate", "--hidden", "8", "--profile", str(file)]
    assert main(["simulate", *settings, *plan]) == 0
    assert capsys.readouterr().err.count("the machine was busy") == 1
