"""Masked pre-training: what the loss is, what sees what, and that it learns."""

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.layout import cut_patches, draw_boxes
from ndlightnet.models import MaskedDecoder, masked_loss

# patch, box, space
SHAPES = {1: ((2,), (3,), (30,)), 2: ((2, 3), (2, 1), (12, 12)), 3: ((1, 2, 2), (2, 1, 3), (4, 6, 12))}
every_dims = pytest.mark.parametrize("dims", SHAPES)


def networks(dims, **options):
    torch.manual_seed(0)
    options = {"patch_size": SHAPES[dims][0], "embed_dim": 24, "depth": 1, "num_classes": 0} | options
    net = NDLightNet(dims, 2, **options)
    return net, MaskedDecoder(net, 16, 1), torch.randn(3, 2, *SHAPES[dims][2])


def seeded():
    return torch.Generator().manual_seed(1)


@every_dims
def test_the_loss_is_that_of_normalised_dropped_patches(dims):
    net, decoder, x = networks(dims)
    patch, box, _ = SHAPES[dims]
    loss, result = masked_loss(net, decoder, x, box, 0.5, seeded())
    boxed = draw_boxes(x, patch, box, 0.5, seeded())
    predicted = decoder(net.forward_features(boxed), boxed)
    patches, undone = cut_patches(x, patch), cut_patches(result.cells, patch)
    errors, squares = [], []
    for at in map(tuple, boxed.absent().nonzero().tolist()):
        cells = patches[at]
        spread = (cells.var(correction=0) + 0.2**2 * x[at[0]].var(correction=0) + 1e-6).sqrt()
        normal = (cells - cells.mean()) / spread
        errors.append((predicted[at] - normal).square().mean())
        squares.append(normal.square().mean())
        torch.testing.assert_close(undone[at], predicted[at] * spread + cells.mean())
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    torch.testing.assert_close(result.explained, 1 - sum(errors) / sum(squares))
    # the reconstruction has the cells that were not dropped as they are
    assert result.cells.shape == x.shape and result.dropped.shape == (3, *x.shape[2:])
    present = ~result.dropped[:, None].expand_as(x)
    assert torch.equal(result.cells[present], x[present])
    assert torch.equal(cut_patches(result.dropped[:, None], patch).all(-1), boxed.absent())
    assert torch.equal(cut_patches(result.dropped[:, None], patch).any(-1), boxed.absent())


@every_dims
def test_dropped_cells_are_not_read(dims):
    """Others in their place change the target, not the features."""
    net, decoder, x = networks(dims)
    patch, box, _ = SHAPES[dims]
    _, result = masked_loss(net, decoder, x, box, 0.5, seeded())
    poisoned = torch.where(result.dropped[:, None], torch.full_like(x, torch.nan), x)
    features = [net.forward_features(draw_boxes(cells, patch, box, 0.5, seeded())) for cells in (x, poisoned)]
    assert features[1].isfinite().all() and torch.equal(*features)


@every_dims
def test_every_parameter_trains(dims):
    net, decoder, x = networks(dims)
    loss, _ = masked_loss(net, decoder, x, SHAPES[dims][1], 0.5)
    loss.backward()
    for name, parameter in (*net.named_parameters(), *decoder.named_parameters()):
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_the_noise_of_a_still_background_counts_little():
    """Half of a sample has a hundredth of the spread of the rest: its patches keep 0.01**2 /
    (0.2**2 * 0.5) = 1 / 200 of their normalised variance, the others nearly all."""
    net, decoder, _ = networks(2, patch_size=4)
    x = torch.randn(2, 2, 32, 32)
    x[..., :16] *= 0.01
    _, result = masked_loss(net, decoder, x, 1, 0.5, seeded())
    share = ((result.target - result.mean) / result.spread).square().mean(-1)
    assert share[:, :, :4].mean() < 0.01 * share[:, :, 4:].mean()
    still = masked_loss(net, decoder, torch.ones(2, 2, 32, 32), 1, 0.5)
    assert still[0].isfinite() and still[1].explained.isfinite()


def test_it_learns_to_continue_a_pattern():
    """Stripes of period three, whose phase a sample tells; one answer for all of its patches is off by 0.6."""
    net, decoder, _ = networks(2, patch_size=2)
    optimizer = torch.optim.Adam([*net.parameters(), *decoder.parameters()], 1e-2)
    for _ in range(25):
        line = ((torch.arange(12) + torch.randint(3, (8, 1))) % 3 == 0).float()
        loss, _ = masked_loss(net, decoder, line[:, None, :, None].expand(8, 2, 12, 12), 1, 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


@pytest.mark.parametrize("options", [{"causal": True}, {"vocab_size": 9, "patch_size": None}])
def test_networks_that_cannot_be_pre_trained(options):
    dims = 1 if "vocab_size" in options else 2
    net = NDLightNet(dims, 2, embed_dim=24, depth=1, **{"patch_size": 2, **options})
    with pytest.raises(ValueError, match="expected a network of cells that is not causal"):
        MaskedDecoder(net)


def test_behind_convolutions():
    net = NDLightNet(2, 2, patch_size=4, embed_dim=16, depth=1, stem_blocks=1, num_classes=0)
    loss, _ = masked_loss(net, MaskedDecoder(net, 16, 1), torch.randn(2, 2, 16, 16), 2, 0.5)
    loss.backward()
    assert loss.isfinite() and net.embed.first[0].weight.grad.any()
