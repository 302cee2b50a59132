"""Profiles as files: they survive, and every fault is named by its field."""

import json
from dataclasses import replace

import pytest
from profiles import prepared_of, profile_of

from gnnpipe.errors import InputError
from gnnpipe.perf import Profile
from gnnpipe.perf.profile import LinkTimes


@pytest.fixture(scope="module")
def profile():
    return profile_of(prepared_of().model_graph)


def test_a_profile_survives_json(profile):
    assert Profile.from_json(profile.to_json()) == profile
    alone = replace(profile, message=None, exchange=None, shard_sum=None)
    assert Profile.from_json(alone.to_json()) == alone


def test_a_link_of_two_shards_is_that_of_pairs_if_measured(profile):
    quick = LinkTimes(1e-6, 1e10, 0.0)
    both = replace(profile, pair_exchange=quick, pair_sum=quick)
    assert Profile.from_json(both.to_json()) == both
    data = json.loads(profile.to_json())
    del data["pair_exchange"], data["pair_sum"]
    assert Profile.from_json(json.dumps(data)) == profile  # written before there were pairs
    for name in ("exchange", "shard_sum"):
        measured = getattr(profile, name)
        assert profile.link(name, 2) == both.link(name) == both.link(name, 4) == measured
        assert both.link(name, 2) == quick
    assert both.link("message", 2) == profile.message


def spoiled(profile, path, value):
    """The JSON with what is at ``path`` replaced, or gone."""
    data = json.loads(profile.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


OP = ("compute", 0, "ops")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 8, ["version", "7"]),
        (("version",), None, ["gnnpipe profile"]),
        (("machine",), None, ["machine", "missing"]),
        (("machine",), 3, ["machine", "text"]),
        (("speed",), 3, ["'speed' is not a field", "known: "]),
        (("source",), "guessed", ["source", "'guessed'", "by hand"]),
        (("threads",), -1, ["threads", "-1"]),
        (("threads",), 1.5, ["threads", "1.5"]),
        (("threads",), True, ["threads", "True"]),
        (("recompute",), 1, ["recompute", "true or false"]),
        (("compute",), [], ["compute"]),
        (("compute",), {}, ["compute", "list"]),
        (("compute", 0, "ranks"), 0, ["compute: ranks [0, 2]"]),
        (("compute", 0, "ranks"), 2, ["compute: ranks [2, 2]", "ascend"]),
        (("compute", 1, "boundary_per_number_s"), -1e-9, ["compute[1]", "boundary_per_number_s"]),
        (("compute", 0, "begin", "base_s"), float("nan"), ["compute[0]", "begin", "base_s", "nan"]),
        (("compute", 0, "begin", "base_s"), float("inf"), ["base_s", "inf"]),
        (("compute", 0, "begin", "base_s"), "fast", ["base_s", "'fast'"]),
        (("compute", 0, "begin", "base_s"), 10**400, ["base_s", "1000"]),
        (("compute", 0, "begin", "base_s"), 1e308, ["base_s", "from 0 to 1e+30"]),
        (("compute", 0, "begin", "base_s"), True, ["base_s", "True"]),
        (("compute", 0, "update"), None, ["compute[0]: update is missing"]),
        (("compute", 0, "update", "per_rows_s"), 0, ["'per_rows_s'", "mean 'per_row_s'?"]),
        ((*OP,), [1], ["ops", "object"]),
        (("message", "latency_s"), [0], ["message", "latency_s"]),
        (("exchange", "bandwidth_bytes_per_s"), 0, ["exchange: bandwidth_bytes_per_s 0"]),
        (("exchange", "bandwidth_bytes_per_s"), 1e-320, ["at least 0.1"]),
    ],
)
def test_a_wrong_profile_is_refused_by_field(profile, path, value, words):
    with pytest.raises(InputError) as caught:
        Profile.from_json(spoiled(profile, path, value), "file.json")
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"version": 1}'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(InputError):
        Profile.from_json(text)


def test_times_of_other_numbers_of_ranks_are_those_of_the_nearest(profile):
    assert [profile.compute_of(n).ranks for n in (1, 2, 8)] == [1, 2, 2]
