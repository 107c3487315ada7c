"""The measures of samples on sets whose answers are known."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError
from ndlightnet.training.generation.fidelity import (
    Features,
    Inception,
    Nearest,
    frechet_distance,
    load_features,
    precision_and_recall,
)


def test_frechet_distance_of_known_gaussians():
    torch.manual_seed(0)
    a = torch.randn(20_000, 3, dtype=torch.float64)
    mean, scale = torch.tensor([1.0, -2, 0.5]), torch.tensor([2.0, 0.5, 1.0])
    b = torch.randn(20_000, 3, dtype=torch.float64) * scale + mean
    expected = mean.square().sum() + (scale - 1).square().sum()
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=0.02)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-9)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-9)
    turned = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    assert frechet_distance(a @ turned, b @ turned) == pytest.approx(frechet_distance(a, b), rel=1e-9)


@pytest.mark.parametrize("count", [12, 300])
def test_frechet_distance_is_that_of_torchmetrics(count):
    """With fewer features than dimensions, too, where covariances are singular."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    torch.manual_seed(0)
    a, b = torch.randn(count, 40), 1.5 * torch.randn(count + 3, 40) + 0.3
    theirs = FrechetInceptionDistance(nn.Identity(), normalize=True, input_img_size=(40,))
    theirs.set_dtype(torch.float64)
    theirs.update(a, real=True)
    theirs.update(b, real=False)
    assert frechet_distance(a, b) == pytest.approx(float(theirs.compute()), rel=1e-3)


def test_frechet_distance_is_that_of_its_formula():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(60, 7)) @ rng.normal(size=(7, 7)), rng.normal(size=(50, 7)) + 0.3
    (first, second), gap = (np.cov(x, rowvar=False) for x in (a, b)), a.mean(0) - b.mean(0)
    expected = gap @ gap + np.trace(first + second - 2 * scipy.linalg.sqrtm(first @ second)).real
    assert frechet_distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_scores_of_inception_are_those_of_their_formulas(inception_weights):
    """FID and sFID, by features from the network itself, and a naive loop for the Inception score."""
    from torch_fidelity import FeatureExtractorInceptionV3

    data = SimpleNamespace(to_pixels=lambda x: (x * 255).round().byte())
    rng = torch.Generator().manual_seed(0)
    train, drawn = (torch.rand(15, 1, 6, 8, generator=rng) * top for top in (1, 0.6))
    inception = Inception(str(inception_weights), data)
    features = torch.cat([inception(x, real=False) for x in drawn.split(10)])
    for x in train.split(10):
        inception(x, real=True)
    inception(train[:3])  # counts nothing
    net, spatial = FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], str(inception_weights)), []
    net.Mixed_6d.branch1x1.register_forward_hook(lambda _, __, y: spatial.append(y[:, :7].reshape(len(y), 2023)))
    pooled, logits = zip(*(net(data.to_pixels(x).repeat(1, 3, 1, 1)) for x in (drawn, train)), strict=True)
    torch.testing.assert_close(features, pooled[0])
    torch.testing.assert_close(features @ net.fc.weight.T, logits[0])
    probs = (features @ net.fc.weight.T).double().softmax(1)[np.random.RandomState(2020).permutation(15)].tolist()
    scores = []
    for split in range(10):
        part = probs[split * 15 // 10 : (split + 1) * 15 // 10]
        mean = [sum(column) / len(part) for column in zip(*part, strict=True)]
        divergences = [sum(p * np.log(p / m) for p, m in zip(row, mean, strict=True)) for row in part]
        scores.append(np.exp(sum(divergences) / len(part)))
    assert np.mean(scores) > 1.02  # else nothing is tested
    values = inception.scores(features)
    assert values["inception_score"] == pytest.approx(np.mean(scores), rel=1e-9)
    assert values["fid"] == pytest.approx(frechet_distance(*pooled), rel=1e-3)
    assert values["sfid"] == pytest.approx(frechet_distance(*spatial), rel=1e-3)
    with pytest.raises(DataError, match=r"FeatureExtractorInceptionV3: cannot take samples \(2, 1, 9\)"):
        inception(torch.rand(2, 1, 9))


def test_inception_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(DataError, match=r"^model.inception: needs another package: pip install torch-fidelity"):
        load_features(None, None, "weights.pth")


def test_wrong_weights_of_inception(tmp_path):
    pytest.importorskip("torch_fidelity")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pth")  # an object, which only its code can build
    for name in ("other.pth", "code.pth", "missing.pth"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read \("):
            load_features(None, None, str(tmp_path / name))


def test_precision_and_recall_of_known_sets():
    """Real: a line from 0 to 1; drawn: half of it, and as many points far away."""
    real = torch.linspace(0, 1, 2001)[:, None]
    inside = torch.linspace(0, 0.5, 1000)[:, None]
    drawn = torch.cat([inside, torch.linspace(90, 91, 1000)[:, None]])
    assert precision_and_recall(real, drawn, k=3) == (0.5, pytest.approx(0.5, abs=0.01))
    assert precision_and_recall(real, real) == (1.0, 1.0)
    assert precision_and_recall(real, real + 10) == (0.0, 0.0)
    assert precision_and_recall(real[:2], real[:2], k=3) == (1.0, 1.0)  # fewer than k


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_are_those_of_the_definition(k):
    torch.manual_seed(0)
    sets = torch.randn(60, 4).double(), 1.3 * torch.randn(50, 4).double() + 0.5

    def covered(manifold, points):
        radii = [sorted((a - b).norm() for b in manifold)[k] for a in manifold]  # [0] is itself
        inside = [any((p - a).norm() <= r for a, r in zip(manifold, radii, strict=True)) for p in points]
        return sum(inside) / len(points)

    expected = covered(*sets), covered(*reversed(sets))
    assert precision_and_recall(*sets, k=k) == pytest.approx(expected)
    assert min(expected) > 0.1 and max(expected) < 1


def test_nearest_is_found_batch_by_batch():
    torch.manual_seed(0)
    queries, train = torch.randn(7, 4), torch.randn(30, 4)
    labels, pixels = torch.arange(30), torch.arange(30)[:, None]
    nearest = Nearest(queries, chosen=[0, 5, 2], count=4)
    for batch in (slice(0, 3), slice(3, 20), slice(20, 30)):
        nearest.update(train[batch], labels[batch], pixels[batch])
    gaps = torch.cdist(queries, train)
    assert torch.equal(nearest.labels, gaps.argmin(1))
    assert torch.allclose(nearest.distances, gaps.amin(1))
    expected = gaps.argsort(1)[[0, 5, 2], :4]
    assert [[int(one.pixels) for one in row] for row in nearest.near] == expected.tolist()
    assert [[one.label for one in row] for row in nearest.near] == expected.tolist()
    distances = torch.tensor([[one.distance for one in row] for row in nearest.near])
    assert torch.allclose(distances, gaps[[0, 5, 2]].sort(1).values[:, :4])


def test_features_are_what_the_last_linear_map_gets():
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=16, depth=1).eval()
    x = torch.randn(5, 1, 8, 8)
    features = Features(net)
    values = features(x)
    assert values.shape == (5, 16) and features.name == "features of NDLightNet"
    torch.testing.assert_close(net.head(values), net(x))
    assert not any(p.requires_grad for p in net.parameters())
    assert torch.equal(Features(None)(x), x.flatten(1))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 2))
    assert Features(plain)(x).shape == (5, 5) and Features(plain)(x).min() >= 0
    with pytest.raises(DataError, match=r"features=Sequential: cannot take samples \(5, 1, 9\)"):
        Features(plain)(torch.randn(5, 1, 9))
    with pytest.raises(DataError, match=r"model\.features=Flatten: has no nn\.Linear"):
        Features(nn.Flatten())


def test_features_of_a_checkpoint(tmp_path):
    net = NDLightNet(2, 1, 3, patch_size=2, embed_dim=16, depth=1).eval()
    path, x = tmp_path / "last.ckpt", torch.randn(5, 1, 8, 8)
    weights = {f"net.{key}": value for key, value in net.state_dict().items()}
    torch.save({"state_dict": weights, "network": net.description()}, path)
    for network in (None, NDLightNet(2, 1, 3, patch_size=2, embed_dim=16, depth=1)):
        torch.testing.assert_close(load_features(network, str(path))(x), Features(net)(x))
    with pytest.raises(DataError, match=r"model\.features_checkpoint: .*no such checkpoint"):
        load_features(None, str(tmp_path / "missing.ckpt"))
    for options in ({"num_classes": 4}, {"tpe": "published"}):
        changed = NDLightNet(
            **{"dims": 2, "in_chans": 1, "num_classes": 3, "patch_size": 2, "embed_dim": 16, "depth": 1} | options
        )
        with pytest.raises(DataError, match=f"another network: {next(iter(options))} is"):
            load_features(changed, str(path))


def test_a_copy_of_a_training_sample_is_at_distance_0():
    """Although features are large, and many, when torch computes distances by a product."""
    train = 30 + torch.randn(60, 3000, generator=torch.Generator().manual_seed(0))
    queries = torch.cat([train[:30], train[:30] + 1])
    assert torch.cdist(queries, train)[:30].diagonal().max() > 0  # else nothing is tested
    nearest = Nearest(queries, chosen=[0])
    nearest.update(train, torch.arange(60), torch.zeros(60, 1, 2, 2, dtype=torch.uint8))
    assert not nearest.distances[:30].any() and nearest.labels[:30].tolist() == [*range(30)]
