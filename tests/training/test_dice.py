"""Dice and the Hausdorff distance on cubes."""

import math

import numpy as np
import pytest
import torch

from ndlightnet.training.segmentation import dice_of, hausdorff95


def cube(number: int, *start: int, shape=(16, 16, 16)) -> torch.Tensor:
    """(1, *shape): a 4 x 4 x 4 cube of label `number` on zeros."""
    labels = torch.zeros(1, *shape, dtype=torch.long)
    labels[(0, *(slice(s, s + 4) for s in start))] = number
    return labels


@pytest.mark.parametrize("axis, shift, dice", [(0, 0, 1), (0, 1, 0.75), (2, 3, 0.25), (1, 5, 0)])
def test_dice_of_shifted_cubes(axis, shift, dice):
    """Two equal cubes shifted by s of 4 voxels share (4 - s) / 4 of their voxels."""
    moved = [4, 4, 4]
    moved[axis] += shift
    found = dice_of(cube(1, *moved), cube(1, 4, 4, 4), 2)
    assert found.shape == (1, 1)
    assert found.item() == pytest.approx(dice)


def test_dice_is_per_case_and_class_and_nan_where_the_truth_has_none():
    truth = torch.cat([cube(1, 0, 0, 0), cube(2, 0, 0, 0)])
    guess = torch.cat([cube(1, 0, 0, 2), cube(1, 0, 0, 0)])
    dice = dice_of(guess, truth, 4)
    assert dice.shape == (2, 3)
    wanted = [[0.5, math.nan, math.nan], [math.nan, 0, math.nan]]
    np.testing.assert_allclose(dice.numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("axis, shift", [(0, 1), (1, 2), (2, 3)])
def test_hausdorff_counts_millimetres_along_each_axis(axis, shift):
    """Of a shifted cube a whole side, 16 of its 56 surface voxels, is `shift` voxels off."""
    spacing, moved = (0.5, 2.0, 7.0), [4, 4, 4]
    moved[axis] += shift
    distance = hausdorff95(cube(1, *moved), cube(1, 4, 4, 4), 2, spacing)
    assert distance.shape == (1, 1)
    assert distance.item() == pytest.approx(shift * spacing[axis])


def test_hausdorff_takes_the_95th_percentile():
    """A single stray voxel is beyond the percentile; all of a small prediction is not."""
    stray = cube(1, 4, 4, 4)
    stray[0, 15, 15, 15] = 1
    assert hausdorff95(stray, cube(1, 4, 4, 4), 2, (1, 1, 1)).item() == 0
    far = torch.zeros_like(stray)
    far[0, 4, 4, 15] = 1  # the farthest of the cube's voxels count: 11 layers and a bit away
    assert hausdorff95(far, cube(1, 4, 4, 4), 2, (1, 1, 1)).item() > 11


@pytest.mark.parametrize("guess", [0, 1])
def test_hausdorff_of_an_absent_class_is_not_a_number(guess):
    """Neither has class 3, only the truth has 2, and only one of the guesses has 1."""
    distance = hausdorff95(cube(guess, 0, 0, 0), cube(2, 0, 0, 0), 4, (1, 1, 1))
    assert distance.shape == (1, 3) and not distance.isfinite().any()
