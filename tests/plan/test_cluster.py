"""Cluster files: what they say, and every fault by its field."""

import pytest

from gnnpipe.errors import InputError
from gnnpipe.plan.cluster import Cluster, Device, Link

GOOD = """
[[devices]]
count = 2
speed = 1.0
memory_bytes = 16_000_000_000
[[devices]]
speed = 0.5
memory_bytes = 8_000_000_000
[link]
bandwidth_bytes_per_s = 1.25e9
latency_s = 5e-5
[[pairs]]
ranks = [2, 0]
bandwidth_bytes_per_s = 25e9
latency_s = 0
"""


def read(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return Cluster.read(str(path))


def test_a_cluster(tmp_path):
    found = read(tmp_path, GOOD)
    strong, weak = Device(1.0, 16_000_000_000), Device(0.5, 8_000_000_000)
    assert found.devices == (strong, strong, weak)
    assert read(tmp_path, GOOD.replace("8_000_000_000", "8e9")).devices == found.devices
    assert found.between(0, 1) == found.link == Link(1.25e9, 5e-5)
    assert found.between(0, 2) == found.between(2, 0) == Link(25e9, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (GOOD, "", ["devices is missing"]),
        (GOOD, "[", ["not valid TOML"]),
        ("[link]", "[lnk]", ["'lnk' is not a field; did you mean 'link'?"]),
        ("[link]", "[[link]]", ["link [{", "a table in [ ]"]),
        ("[[pairs]]", "[pairs]", ["pairs {", "a table in [[ ]] for each entry"]),
        ("speed = 0.5", "", ["devices", "speed is missing"]),
        ("speed = 0.5", "speed = 0", ["devices[1]: speed 0", "1e-06 to"]),
        ("speed = 0.5", "speed = nan", ["speed nan"]),
        ("speed = 0.5", "speed = 'fast'", ["speed", "'fast'"]),
        ("speed = 0.5", "speed = true", ["devices[1]: speed True: must be a number"]),
        (
            "speed = 0.5",
            "sped = 0.5\nspeed = 1.0",
            ["devices[1]: 'sped' is not a field; did you mean 'speed'?"],
        ),
        ("8_000_000_000", "-1", ["memory_bytes -1"]),
        ("8_000_000_000", "8.5", ["memory_bytes", "whole number"]),
        ("count = 2", "count = 0", ["devices[0]: count 0: must be 1 to"]),
        ("count = 2", "count = 1_000_000_000", ["count 1000000000"]),
        (
            "count = 2",
            "count = 100_000",
            ["devices[1]: count 1: makes 100,001 devices", "give at most 100,000"],
        ),
        ("speed = 0.5", "sped = 0.5", ["'sped' is not a field; did you mean 'speed'?"]),
        ("8_000_000_000", "1e30", ["devices[1]: memory_bytes 1e+30: must be a whole number"]),
        ("= 25e9", "= 0.5", ["pairs[0]: bandwidth_bytes_per_s 0.5", "1 to"]),
        ("[2, 0]", "'0-2'", ["pairs[0]: ranks '0-2': must be a list"]),
        (
            "[[pairs]]",
            "[[pairs]]\nranks = [0, 2]\nbandwidth_bytes_per_s = 1e9\nlatency_s = 0\n[[pairs]]",
            ["pairs[1]: ranks [2, 0]: were given before"],
        ),
        ("1.25e9", "0", ["bandwidth_bytes_per_s 0", "1 to"]),
        ("1.25e9", "inf", ["bandwidth_bytes_per_s"]),
        ("1.25e9", "0.5", ["bandwidth_bytes_per_s 0.5", "1 to 1e+30"]),
        ("speed = 0.5", "speed = 1e-320", ["speed 1e-320"]),
        ("5e-5", "1e40", ["latency_s 1e+40"]),
        ("5e-5", "-1", ["latency_s -1", "0 to"]),
        ("[2, 0]", "[0]", ["pairs[0]: ranks [0]: must be two different ranks, like [0, 1]"]),
        ("[2, 0]", "[0, 0]", ["pairs[0]: ranks [0, 0]: must be two different ranks"]),
        ("[2, 0]", "[0, 1, 2]", ["pairs[0]: ranks [0, 1, 2]: must be two different ranks"]),
        ("[2, 0]", "[0, 3]", ["[0, 3]", "below 3"]),
        ("[2, 0]", "[0, 1.5]", ["pairs[0]: ranks[1] 1.5: must be a whole number"]),
    ],
)
def test_a_wrong_cluster_is_refused_by_field(old, new, told, tmp_path):
    assert old in GOOD
    with pytest.raises(InputError) as caught:
        read(tmp_path, GOOD.replace(old, new))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"--cluster '{tmp_path}/cluster.toml': ")
    assert all(word in text for word in told), text


def test_a_cluster_that_is_not_there():
    with pytest.raises(InputError, match="cannot be read"):
        Cluster.read("no/such.toml")
