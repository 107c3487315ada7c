"""Networks of MONAI and torchvision under our constructors: shapes, deep supervision, weights."""

import pytest
import torch
from torch import nn

from ndlightnet.training.peers import DynUNet, SegResNet, SwinUNETR, TorchvisionVideo

SMALL = {DynUNet: {"strides": (2, 2)}, SegResNet: {"init_filters": 8}, SwinUNETR: {"feature_size": 12}}
# of a picture of 30 x 43: fours, eights and thirty-twos
PADDED = {DynUNet: (32, 44), SegResNet: (32, 48), SwinUNETR: (32, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("peer", SMALL)
@pytest.mark.parametrize("space", [(1, 1), (9, 7, 11)])
def test_any_size_keeps_its_size(peer, space):
    net = peer(len(space), 2, 3, **SMALL[peer]).eval()
    assert (net.in_channels, net.out_channels) == (2, 3)
    with torch.no_grad():
        y = net(torch.randn(1, 2, *space))
    assert y.shape == (1, 3, *space) and y.isfinite().all()


@pytest.mark.parametrize("peer", SMALL)
def test_padding_is_at_the_end_and_cut_off_again(peer):
    """The result is that of MONAI's network for the padded input."""
    net, x = peer(2, 1, 2, **SMALL[peer]).eval(), torch.randn(1, 1, 30, 43)
    padded = torch.zeros(1, 1, *PADDED[peer])
    padded[..., :30, :43] = x
    with torch.no_grad():
        assert torch.equal(net(x), net.net(padded)[..., :30, :43])


@pytest.mark.parametrize("strides, levels", [((2, 2, 2), 3), ((2, [2, 1]), 2)])
def test_deep_supervision_in_training_only(strides, levels):
    """A list of logits, each brought to the size of the input."""
    net, x = DynUNet(2, 1, 3, strides), torch.randn(2, 1, 17, 22)
    outputs = net.train()(x)
    assert isinstance(outputs, list) and len(outputs) == levels and all(y.shape == (2, 3, 17, 22) for y in outputs)
    assert not any(torch.equal(outputs[0], y) for y in outputs[1:])
    sum(y.square().mean() for y in outputs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert net.eval()(x).shape == (2, 3, 17, 22)
    assert DynUNet(2, 1, 3, strides, deep_supervision=False).train()(x).shape == (2, 3, 17, 22)


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


class Small(nn.Module):
    """With the names of torchvision's networks."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv3d(3, 4, 3), nn.Linear(4, num_classes)


def test_torchvisions_video_networks(tmp_path, monkeypatch):
    """With other channels the first convolution is new; clips of any side are taken; weights are read but for the
    output."""
    net, x = TorchvisionVideo("r3d_18", 3, in_chans=6).eval(), torch.randn(2, 6, 4, 24, 20)
    assert (net.in_chans, net.num_classes, net.net.stem[0].in_channels) == (6, 3, 6)
    assert net(x).shape == (2, 3)
    rgb = TorchvisionVideo("r3d_18", 3).eval()
    torch.testing.assert_close(rgb(x[:, :3]), rgb.net(x[:, :3]))
    with torch.device("meta"):
        assert TorchvisionVideo("mvit_v2_s", 3)(torch.randn(1, 3, 16, 32, 32)).shape == (1, 3)
    monkeypatch.setattr("torchvision.models.get_model", lambda name, num_classes: Small(num_classes))
    source = TorchvisionVideo("r3d_18", 400).net.state_dict()
    torch.save(source, tmp_path / "kinetics.pth")
    net = TorchvisionVideo("r3d_18", 3, weights=str(tmp_path / "kinetics.pth"))
    for name, value in net.net.state_dict().items():
        assert len(value) == 3 if name.startswith("fc.") else torch.equal(value, source[name])
