"""Networks of MONAI and torchvision under our constructors: shapes, deep supervision, a step."""

import pytest
import torch
from torch import nn

from ndlightnet.training.peers import DynUNet, SegResNet, SwinUNETR, TorchvisionVideo

SMALL = {DynUNet: {"strides": (2, 2)}, SegResNet: {"init_filters": 8}, SwinUNETR: {"feature_size": 12}}
each_peer = pytest.mark.parametrize("peer", SMALL)


@pytest.mark.slow
@each_peer
@pytest.mark.parametrize("space", [(33, 5), (1, 1), (9, 7, 11)])
def test_any_size_keeps_its_size(peer, space):
    net = peer(len(space), 2, 3, **SMALL[peer]).eval()
    assert (net.in_channels, net.out_channels) == (2, 3)
    with torch.no_grad():
        y = net(torch.randn(1, 2, *space))
    assert y.shape == (1, 3, *space) and y.isfinite().all()


@each_peer
def test_padding_is_at_the_end_and_cut_off_again(peer):
    """What it gives is what MONAI's network gives of the padded input."""
    net, x = peer(2, 1, 2, **SMALL[peer]).eval(), torch.randn(1, 1, 30, 43)
    whole = torch.zeros(1, 1, 32, 64)
    whole[..., :30, :43] = x
    if peer is not SwinUNETR:  # eights and fours do
        whole = whole[..., :48] if peer is SegResNet else whole[..., :44]
    with torch.no_grad():
        assert torch.equal(net(x), net.net(whole)[..., :30, :43])


@pytest.mark.parametrize("strides, levels", [((2, 2, 2), 3), ((2, [2, 1]), 2)])
def test_deep_supervision_in_training_only(strides, levels):
    """A list of logits, each brought to the size of the input."""
    net, x = DynUNet(2, 1, 3, strides), torch.randn(2, 1, 17, 22)
    outputs = net.train()(x)
    assert isinstance(outputs, list) and len(outputs) == levels and all(y.shape == (2, 3, 17, 22) for y in outputs)
    assert not any(torch.equal(outputs[0], y) for y in outputs[1:])
    assert net.eval()(x).shape == (2, 3, 17, 22)
    plain = DynUNet(2, 1, 3, strides, deep_supervision=False).train()
    assert plain(x).shape == (2, 3, 17, 22)


def test_levels_and_anisotropic_strides():
    sizes = [sum(p.numel() for p in DynUNet(3, 1, 2, [2] * n).parameters()) for n in (2, 3, 4)]
    assert sizes == sorted(sizes) and sizes[-1] > 4 * sizes[0]
    net = DynUNet(3, 1, 2, [[2, 2, 1], [2, 2, 1], 2])
    assert net.multiple == (8, 8, 2)
    widest = max(m.out_channels for m in net.modules() if isinstance(m, nn.Conv3d))
    assert widest == 256 and DynUNet(2, 1, 2, [2] * 5).net.filters[-1] == 320
    for wrong in ([[2, 2], 2], [2], []):
        with pytest.raises(ValueError, match="strides="):
            DynUNet(3, 1, 2, wrong)


@pytest.mark.slow
@each_peer
def test_a_few_steps_lower_the_loss(peer):
    net, x = peer(2, 1, 2, **SMALL[peer]).train(), torch.randn(2, 1, 32, 19)
    target = (x[:, 0] > 0).long()
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        outputs = net(x)
        outputs = outputs if isinstance(outputs, list) else [outputs]
        loss = sum(nn.functional.cross_entropy(y, target) for y in outputs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_torchvisions_video_networks():
    """With other channels the first convolution is new; weights are read but for the output."""
    torch.manual_seed(0)
    net = TorchvisionVideo("r3d_18", 3, in_chans=6).eval()
    assert (net.in_chans, net.num_classes) == (6, 3)
    x = torch.randn(2, 6, 4, 24, 20)
    assert net(x).shape == (2, 3) and net.net.stem[0].in_channels == 6
    rgb = TorchvisionVideo("r3d_18", 3).eval()
    torch.testing.assert_close(rgb(x[:, :3]), rgb.net(x[:, :3]))


class Small(nn.Module):
    """With the names of torchvision's networks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv3d(3, 4, 3), nn.Linear(4, num_classes)


def test_weights_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.models.get_model", lambda name, num_classes: Small(num_classes))
    source = TorchvisionVideo("r3d_18", 400)
    torch.save(source.net.state_dict(), tmp_path / "kinetics.pth")
    net = TorchvisionVideo("r3d_18", 3, weights=str(tmp_path / "kinetics.pth"))
    for name, value in net.net.state_dict().items():
        if name.startswith("fc."):
            assert len(value) == 3
        else:
            assert torch.equal(value, source.net.state_dict()[name])


def test_mvit_takes_clips_of_any_side():
    with torch.device("meta"):
        assert TorchvisionVideo("mvit_v2_s", 3)(torch.randn(1, 3, 16, 32, 32)).shape == (1, 3)
