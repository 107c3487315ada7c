"""Masked pre-training: what the loss is, what sees what, and that it learns."""

import pytest
import torch

from ndlightnet import NDLightNet
from ndlightnet.layout import cut_patches, draw_boxes
from ndlightnet.models import MaskedDecoder, masked_loss

# patch, box, space
SHAPES = {1: ((2,), (3,), (30,)), 2: ((2, 3), (2, 1), (12, 12)), 3: ((1, 2, 2), (2, 1, 3), (4, 6, 12))}
every_dims = pytest.mark.parametrize("dims", SHAPES)


def made(dims, **options):
    torch.manual_seed(0)
    given = {"patch_size": SHAPES[dims][0], "embed_dim": 24, "depth": 1, "num_classes": 0}
    net = NDLightNet(dims, 2, **given | options)
    return net, MaskedDecoder(net, 16, 1), torch.randn(3, 2, *SHAPES[dims][2])


@every_dims
def test_the_loss_is_that_of_normalised_dropped_patches(dims, monkeypatch):
    net, decoder, x = made(dims)
    patch, box, _ = SHAPES[dims]
    loss, found = masked_loss(net, decoder, x, box, 0.5, torch.Generator().manual_seed(1))
    boxed = draw_boxes(x, patch, box, 0.5, torch.Generator().manual_seed(1))
    predicted = decoder(net.forward_features(boxed), boxed)
    spread = {}
    errors, whole = [], []
    for at in map(tuple, boxed.absent().nonzero().tolist()):
        cells = cut_patches(x, patch)[at]
        still = 0.2**2 * x[at[0]].var(correction=0)
        spread[at] = (cells.var(correction=0) + still + 1e-6).sqrt()
        normal = (cells - cells.mean()) / spread[at]
        errors.append((predicted[at] - normal).square().mean())
        whole.append(normal.square().mean())
    torch.testing.assert_close(loss, torch.stack(errors).mean())
    torch.testing.assert_close(found.explained, 1 - sum(errors) / sum(whole))
    # the reconstruction has the kept cells as they are, and the predicted ones undone
    assert found.cells.shape == x.shape and found.dropped.shape == (3, *x.shape[2:])
    kept = ~found.dropped[:, None].expand_as(x)
    assert torch.equal(found.cells[kept], x[kept])
    at = tuple(boxed.absent().nonzero()[0].tolist())
    cells = cut_patches(x, patch)[at]
    undone = predicted[at] * spread[at] + cells.mean()
    torch.testing.assert_close(cut_patches(found.cells, patch)[at], undone)
    assert torch.equal(
        cut_patches(found.dropped[:, None].float(), patch)[at], torch.ones(cut_patches(x[:, :1], patch).shape[-1])
    )


@every_dims
def test_what_is_dropped_is_not_seen(dims):
    """Other cells in its place change the target, not the prediction."""
    net, decoder, x = made(dims)
    patch, box, _ = SHAPES[dims]
    boxed = draw_boxes(x, patch, box, 0.5, torch.Generator().manual_seed(1))
    _, found = masked_loss(net, decoder, x, box, 0.5, torch.Generator().manual_seed(1))
    other = torch.where(found.dropped[:, None], torch.full_like(x, torch.nan), x)
    again = draw_boxes(other, patch, box, 0.5, torch.Generator().manual_seed(1))
    features = net.forward_features(again)
    assert features.isfinite().all()
    assert torch.equal(features, net.forward_features(boxed))


@every_dims
def test_every_parameter_trains(dims):
    net, decoder, x = made(dims)
    loss, _ = masked_loss(net, decoder, x, SHAPES[dims][1], 0.5)
    loss.backward()
    for part in (net, decoder):
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


def test_the_noise_of_a_still_background_counts_little():
    """Half of a sample has a hundredth of the spread of the rest: its patches keep 0.01**2 /
    (0.2**2 * 0.5) = 1 / 200 of their normalised variance, the others nearly all."""
    net, decoder, _ = made(2, patch_size=4)
    x = torch.randn(2, 2, 32, 32)
    x[..., :16] *= 0.01
    _, found = masked_loss(net, decoder, x, 1, 0.5, torch.Generator().manual_seed(1))
    share = ((found.target - found.mean) / found.spread).square().mean(-1)
    assert share[:, :, :4].mean() < 0.01 * share[:, :, 4:].mean()
    still = masked_loss(net, decoder, torch.ones(2, 2, 32, 32), 1, 0.5)
    assert still[0].isfinite() and still[1].explained.isfinite()


@pytest.mark.slow
def test_it_learns_to_continue_a_pattern():
    """Stripes of one direction a sample, from a quarter of their boxes."""
    torch.manual_seed(0)
    net = NDLightNet(2, 1, patch_size=2, embed_dim=32, depth=2, num_classes=0)
    decoder = MaskedDecoder(net, 32, 1)
    line = (torch.arange(16) // 2 % 2).float()
    both = torch.stack([line[:, None].expand(16, 16), line.expand(16, 16)])[:, None]
    both = both + 0.1 * torch.linspace(0, 1, 16)  # no patch is flat
    optimizer = torch.optim.Adam([*net.parameters(), *decoder.parameters()], 3e-3)
    losses = []
    for _ in range(150):
        x = both[torch.randint(2, (16,))] + 0.01 * torch.randn(16, 1, 16, 16)
        loss, _found = masked_loss(net, decoder, x, 2, 0.75)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.8 and sum(losses[-10:]) / 10 < 0.7 * sum(losses[:10]) / 10


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
