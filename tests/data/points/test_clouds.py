"""Clouds of points: files, surfaces, made shapes."""

import nibabel
import numpy as np
import pytest
import torch

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.shapes import SHAPES, draw_shape, make_shapes
from ndlightnet.data.points.clouds import half_space, placed, read_cloud, some_points, surface, write_cloud


def test_the_same_points_from_every_format(tmp_path):
    points = torch.randn(9, 3)
    np.save(tmp_path / "a.npy", np.concatenate([points.numpy(), np.ones((9, 2))], 1))  # with features
    np.savetxt(tmp_path / "a.xyz", points.numpy(), fmt="%.9g")
    write_cloud(tmp_path / "a.ply", points)
    for ending in ("npy", "xyz", "ply"):
        assert torch.equal(read_cloud(tmp_path / f"a.{ending}").float(), points), ending


def test_the_surface_of_a_mask():
    """Voxel by voxel."""
    mask = np.random.default_rng(0).random((6, 5, 4)) < 0.8
    padded = np.pad(mask, 1)
    expected = [
        at
        for at in np.argwhere(mask).tolist()
        if not all(
            padded[tuple(np.array(at) + 1 + side * np.eye(3, dtype=int)[axis])] for axis in range(3) for side in (-1, 1)
        )
    ]
    assert surface(mask).tolist() == expected and len(expected) < mask.sum()


def test_masks_lie_in_millimetres(tmp_path):
    mask = np.zeros((6, 5, 4), np.uint8)
    mask[1:5, 1:4, 1:3] = 3
    affine = np.array([[0, 2, 0, 5], [-1.5, 0, 0, 6], [0, 0, 3, 7], [0, 0, 0, 1.0]])
    nibabel.save(nibabel.Nifti1Image(mask, affine), tmp_path / "a.nii.gz")
    np.save(tmp_path / "a.npy", mask)
    near, map_place = np.random.default_rng(0).random((20, 3)), np.array([5e5, 5e6, 100.0])  # metres
    far = near + map_place
    np.save(tmp_path / "far.npy", np.concatenate([far, far[:5]]))
    write_cloud(tmp_path / "far.ply", read_cloud(tmp_path / "far.npy"))
    assert np.array_equal(read_cloud(tmp_path / "far.ply").numpy(), far)  # each place once
    frames = [placed(torch.from_numpy(x)).points for x in (near, far)]
    assert (frames[0] - frames[1]).abs().max() < 1e-8
    voxels = read_cloud(tmp_path / "a.npy")
    assert len(voxels) == 4 * 3 * 2  # all, as no voxel is within two slices
    expected = voxels.double() @ torch.from_numpy(affine[:3, :3].T) + torch.from_numpy(affine[:3, 3])
    assert torch.equal(read_cloud(tmp_path / "a.nii.gz"), expected)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.npy", np.zeros((9, 2)), "has an array (9, 2) float64, expected numbers (points, 3 or more)"),
        ("a.npy", np.zeros((9, 3), complex), "complex128, expected numbers"),
        ("a.npy", np.full((9, 3), np.inf), "has coordinates that are not finite numbers"),
        ("a.npy", np.random.default_rng(0).random((7, 3)), "has 7 points at different places, expected 8 or more"),
        ("a.npy", np.ones((9, 3)), "has 1 points at different places, expected 8 or more"),
        ("a.npy", np.zeros((4, 4, 4), bool), "has 0 points"),
        ("a.npy", np.zeros((1, 9, 3)), "has an array (1, 9, 3) float64"),
        ("a.npy", b"no array", "a.npy"),
        ("a.xyz", b"1 2 3\n1 2\n", "a.xyz"),
        ("a.ply", b"ply\nformat ascii 1.0\nend_header\n", "a.ply"),
        ("a.nii", b"none", "a.nii"),
        ("a.nii.gz", nibabel.Nifti1Image(np.ones((4, 4, 4, 2), np.uint8), np.eye(4)), "has the shape (4, 4, 4, 2)"),
    ],
)
def test_bad_files_are_one_error_that_names_them(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        (nibabel.save if name.endswith(".gz") else lambda array, file: np.save(file, array))(content, path)
    with pytest.raises(DataError) as error:
        read_cloud(path)
    assert str(path) in str(error.value) and message in str(error.value) and "\n" not in str(error.value)


def test_a_placed_cloud_and_its_parts():
    cloud, rng = 5 * torch.randn(40, 3).double() + 7, torch.Generator().manual_seed(0)
    frame = placed(cloud)
    points, centre, radius = frame.points, frame.centre, frame.radius
    assert points.mean(0).abs().max() < 1e-5 and points.norm(dim=1).max() == pytest.approx(1)
    torch.testing.assert_close(points * radius + centre, cloud)
    part = half_space(points, 0.25, rng)
    rest = [point for point in points.tolist() if point not in part.tolist()]
    assert len(part) == 10 and len(rest) == 30
    # a plane lies between: a perceptron finds it
    normal = torch.zeros(4)
    sides = torch.cat([part, torch.tensor(rest)]).float(), torch.tensor([-1.0] * 10 + [1.0] * 30)
    for _ in range(100000):
        wrong = ((torch.cat([sides[0], torch.ones(40, 1)], 1) @ normal) * sides[1] <= 0).nonzero()
        if not len(wrong):
            break
        normal += sides[1][wrong[0, 0]] * torch.cat([sides[0][wrong[0, 0]], torch.ones(1)])
    assert not len(wrong)
    assert len(half_space(points, 0.01, rng)) == 8
    few, many = some_points(points, 30, rng), some_points(points, 50, rng)
    assert len({tuple(p) for p in few.tolist()}) == 30 and len({tuple(p) for p in many.tolist()}) == 40


# of each shape, before it is stretched and turned: what is 0 on its surface
ON = {
    "ellipsoid": lambda x, y, z: np.sqrt(x**2 + y**2 + z**2) - 1,
    "box": lambda x, y, z: np.abs([x, y, z]).max(0) - 1,
    "cylinder": lambda x, y, z: np.maximum(np.hypot(x, y), np.abs(z)) - 1,
    "cone": lambda x, y, z: np.minimum(np.abs(z + 1), np.abs(np.hypot(x, y) - (1 - z) / 2)),
    "torus": lambda x, y, z: np.hypot(np.hypot(x, y) - 1, z) - 0.35,
}


@pytest.mark.parametrize("name", SHAPES)
def test_made_points_lie_on_the_surface(name):
    points = SHAPES[name](np.random.default_rng(0), 500)
    assert points.shape == (500, 3) and np.abs(ON[name](*points.T)).max() < 1e-9
    assert (np.ptp(points, 0) > [1.5, 1.5, 0.6]).all()
    drawn = draw_shape(np.random.default_rng(1), name, 500)  # stretched by 0.5 to 1, and turned
    radii = [np.linalg.norm(each, axis=1).max() for each in (points, drawn)]
    assert drawn.shape == (500, 3) and 0.5 * 0.9 < radii[1] / radii[0] < 1


@pytest.mark.parametrize("name, share", [("cylinder", 1 / 3), ("cone", 1 / (1 + 5**0.5))])
def test_made_points_are_spread_by_area(name, share):
    """That of the flat ends: within four standard deviations."""
    z = SHAPES[name](np.random.default_rng(0), 20000)[:, 2]
    flat = (np.abs(z) == 1).mean() if name == "cylinder" else (z == -1).mean()
    assert abs(flat - share) < 4 * np.sqrt(share * (1 - share) / 20000)


def test_shapes_are_made_once(tmp_path):
    sets = [make_shapes(tmp_path / str(n), 11, 5, 20) for n in range(2)]
    files = sorted(path.relative_to(sets[0]) for path in sets[0].rglob("*.npy"))
    assert [sum(file.parts[0] == split for file in files) for split in ("train", "test")] == [11, 5]
    assert {file.parts[1] for file in files} == {*SHAPES}
    for file in files:
        one, two = (np.load(folder / file) for folder in sets)
        assert np.array_equal(one, two) and one.shape == (20, 3) and one.dtype == np.float32
    assert make_shapes(sets[0], 11, 5, 20) == sets[0]
    with pytest.raises(DataError, match="drawn with other arguments"):
        make_shapes(sets[0], 11, 5, 21)
    with pytest.raises(ValueError, match="expected 5 or more of either, and a point or more"):
        make_shapes(tmp_path / "none", 4, 5)
