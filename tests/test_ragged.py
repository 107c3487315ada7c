"""Grids end to end: offsets, lines, padding, and what `pack` refuses."""

import pytest
import torch

from ndlightnet import Grid, NDLightNet, Packed, Ragged, pack
from ndlightnet.grid import cut_patches

SHAPES = ((3, 4, 5), (1, 2, 40), (6, 1, 4))


def test_offsets_and_owners():
    layout = Ragged(SHAPES)
    assert (len(layout), layout.ndim, layout.length) == (3, 3, 60 + 80 + 24)
    assert layout.offsets == (0, 60, 140, 164) and layout.lengths == (60, 80, 24)
    owners = layout.owners(torch.device("cpu"))
    assert torch.equal(owners, torch.tensor([0] * 60 + [1] * 80 + [2] * 24))
    assert layout.owners(torch.device("cpu")) is owners  # made once


def test_lines_are_those_of_the_grids():
    """Every token is in one line along each axis, as Grid.lines has them."""
    layout = Ragged(SHAPES)
    x = torch.arange(layout.length)
    for axis in range(3):
        expected = {
            tuple(line[:, 0].tolist())
            for part, shape in zip(layout.split(x[:, None]), SHAPES, strict=True)
            for line in Grid(shape).lines(part, axis)
        }
        found = set()
        for group in layout.lines(torch.device("cpu")):
            if group.axis == axis:
                assert group.most & (group.most - 1) == 0 and group.most >= 16
                for first, step, n in group.table.tolist():
                    assert n <= group.most and (n > group.most // 2 or group.most == 16)
                    found.add(tuple(range(first, first + n * step, step)))
        assert found == expected


@pytest.mark.parametrize("patch", [2, (1, 3, 2)])
def test_pack_cuts_every_sample_as_it_is_cut_alone(patch):
    samples = [torch.randn(2, 5, 4, 7), torch.randn(2, 1, 9, 2)]
    packed = pack(samples, patch)
    sizes = (patch,) * 3 if isinstance(patch, int) else patch
    for part, sample in zip(packed.unpack(), samples, strict=True):
        assert torch.equal(part, cut_patches(sample[None], sizes)[0])
    assert len(packed) == 2 and packed.to("cpu").layout is packed.layout


def test_words_and_nested_tensors():
    words = [torch.arange(3), torch.arange(5)]
    assert torch.equal(pack(words).values, torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]))
    nested = torch.nested.nested_tensor([torch.randn(3, 7, 2), torch.randn(3, 4, 5)])
    packed = pack(nested, 1)
    assert packed.layout.shapes == ((7, 2), (4, 5))


@pytest.mark.parametrize(
    "samples, patch, named",
    [
        ([], 1, r"samples=\[\]"),
        ([torch.randn(2, 3), torch.randn(1, 3)], 1, r"samples\[1\] \(1, 3\)"),
        ([torch.randn(2, 3), torch.randn(2, 3, 3)], 1, r"samples\[1\] \(2, 3, 3\)"),
        ([torch.zeros(2, 3, dtype=torch.long)], 1, r"samples\[0\].*int64: expected floats"),
        ([torch.randn(2, 3)], None, r"patch_size=None"),
        ([torch.randn(2, 3, 3)], (1, 2, 3), r"patch_size=\(1, 2, 3\)"),
    ],
)
def test_what_cannot_be_packed_is_named(samples, patch, named):
    with pytest.raises(ValueError, match=named):
        pack(samples, patch)


def test_a_network_names_what_does_not_fit():
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=16, depth=1)
    with pytest.raises(ValueError, match=r"pack with the network's patch_size"):
        net(pack([torch.randn(1, 4, 4)], 1))
    with pytest.raises(ValueError, match=r"with 1 axes: expected .* with 2"):
        net(Packed(torch.randn(5, 4), Ragged([(5,)])))
    with pytest.raises(ValueError, match="mask"):
        net(net.pack([torch.randn(1, 4, 4)]), torch.ones(1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="same number of axes"):
        Ragged([(3,), (3, 4)])
