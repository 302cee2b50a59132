"""The gradient norm of one stage, whose gradients are gathered in one tensor."""

import math

import pytest
import torch
from torch import nn

from gnnpipe.runtime.comm.mesh import Mesh
from gnnpipe.runtime.grad_clip import GradClip


def clip_of(numbers, clip_norm=0.0):
    weight = nn.Parameter(torch.zeros(len(numbers)))
    weight.grad = torch.tensor(numbers)
    clip = GradClip([("weight", weight)], Mesh.alone(), clip_norm, lambda: weight.grad)
    return clip, weight.grad


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e25])
def test_finite_gradients_pass_whatever_their_size(size):
    """The square of 1e25 is no number of float32, and that of 1e-30 is 0 there."""
    clip, _ = clip_of([3 * size, 4 * size])
    assert clip.clip_in_stage()
    assert clip.norm == pytest.approx(5 * size, rel=1e-6, abs=1e-22)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_named(wrong):
    clip, _ = clip_of([1.0, wrong])
    assert not clip.clip_in_stage()
    assert clip.faulty == ["weight"]


def test_the_gathered_gradients_are_clipped():
    clip, grad = clip_of([3.0, 4.0], clip_norm=1.0)
    assert clip.clip_in_stage()
    torch.testing.assert_close(grad, torch.tensor([0.6, 0.8]))
