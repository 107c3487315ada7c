"""From a network to a prediction: the whole grid or windows of it, and the mean over clips."""

import pytest
import torch
from torch import nn

from ndlightnet import NDLightUNet
from ndlightnet.inference import predict_clips, predict_volume


def test_windows_have_the_shape_asked_for_and_overlap():
    """Each cell's answer is its own, so that the windows and their blending must not show."""
    windows = []

    def net(x):
        windows.append(x)
        return x

    image = torch.arange(2 * 10.0 * 6 * 4).reshape(2, 1, 10, 6, 4)
    for overlap, count in ((0.5, 3), (0.25, 2)):  # from 0, 3 and 4; from 0 and 4
        windows.clear()
        torch.testing.assert_close(predict_volume(net, image, (6, 6, 4), overlap), image, rtol=1e-5, atol=1e-4)
        assert all(x.shape[1:] == (1, 6, 6, 4) for x in windows)
        assert sum(len(x) for x in windows) == 2 * count
    # where an axis is shorter than the window, it is padded and cut back
    torch.testing.assert_close(predict_volume(net, image, (8, 8, 8), 0.25), image, rtol=1e-5, atol=1e-4)
    windows.clear()
    assert torch.equal(predict_volume(net, image), image) and [x.shape for x in windows] == [image.shape]


@pytest.mark.parametrize("window", [None, (4, 4, 4)])
def test_logits_are_float32_under_autocast_and_of_bfloat16(window):
    net = NDLightUNet(3, in_channels=1, out_channels=2, widths=[4, 8], depths=[0, 1]).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = predict_volume(net, torch.randn(1, 1, 6, 5, 4), window)
    assert out.dtype == torch.float32 and out.shape == (1, 2, 6, 5, 4) and out.isfinite().all()
    image = torch.randn(1, 1, 6, 5, 4).bfloat16()
    out = predict_volume(nn.Identity(), image, window)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, image.float(), rtol=2e-2, atol=1e-2)


def test_clips_are_averaged_as_probabilities():
    """The mean of softmax, not the softmax of the mean: one sure clip does not outvote two."""
    logits = torch.tensor([[[0.0, 100.0], [2.0, 0.0], [2.0, 0.0]], [[0.0, 0.0]] * 3])
    net = nn.Flatten()  # a clip holds its logits
    out = predict_clips(net, logits[..., None, None])
    sure = 1 / (1 + torch.exp(torch.tensor(-2.0)))
    expected = torch.tensor([[2 * sure / 3, 1 - 2 * sure / 3], [0.5, 0.5]])
    torch.testing.assert_close(out, expected)
    assert out[0, 0] > 0.5 > logits[0].mean(0).softmax(0)[0]


@pytest.mark.parametrize("batch, clips", [(1, 1), (2, 3), (3, 2)])
def test_clips_of_a_video_stay_together(batch, clips):
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 4 * 4, 5))
    x = torch.randn(batch, clips, 3, 2, 4, 4)
    out = predict_clips(net, x)
    expected = torch.stack([net(video).softmax(-1).mean(0) for video in x])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(out.sum(-1), torch.ones(batch))
