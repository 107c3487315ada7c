"""How close samples are to real ones, in the features of a classifier or in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, one_line, readable
from ndlightnet.models import NDLightNet
from ndlightnet.models.weights import load_weights, read_checkpoint
from ndlightnet.training.core.checkpoints import network_difference

ROWS = 1024  # rows of a matrix of distances that are held at once


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Return the Frechet distance of the Gaussians with the means and covariances of two sets of
    features, (n, dim) and (m, dim), in float64.

    The trace of the root of the product of covariances is the sum of the singular values of A B^T,
    where A and B are the centred features: no covariance is held, and nothing is complex.
    """
    a, b = a.double(), b.double()
    roots = []
    for x in (a, b):
        centred = (x - x.mean(0)) / max(1, len(x) - 1) ** 0.5
        # the same covariance in at most `dim` rows
        roots.append(torch.linalg.qr(centred, mode="r")[1])
    first, second = roots
    trace = first.square().sum() + second.square().sum()
    shared = torch.linalg.svdvals(first @ second.T).sum()
    return float((a.mean(0) - b.mean(0)).square().sum() + trace - 2 * shared)


def precision_and_recall(real: Tensor, drawn: Tensor, k: int = 3) -> tuple[float, float]:
    """Return the fraction of drawn samples in the manifold of the real ones, and the other way
    round (arXiv 1904.06991). A manifold is the union of balls about its samples, (n, dim) features,
    that reach to the k-th nearest other one."""
    return _covered(real, drawn, k), _covered(drawn, real, k)


def _covered(manifold: Tensor, points: Tensor, k: int) -> float:
    """Return the fraction of points inside a ball of the manifold."""
    k = min(k, len(manifold) - 1)
    radii = torch.cat([torch.cdist(chunk, manifold).kthvalue(k + 1).values for chunk in manifold.split(ROWS)])
    inside = [(torch.cdist(chunk, manifold) <= radii).any(1) for chunk in points.split(ROWS)]
    return float(torch.cat(inside).float().mean())


class Features:
    """Maps samples (batch, channels, *space) to what they are compared by, (batch, dim) float32:
    the input of the last linear map of a classifier, or without one the numbers themselves.

    Samples are normalised as the generator's data are: the classifier was trained on the same.
    """

    def __init__(self, net: nn.Module | None) -> None:
        self.net = None if net is None else net.eval().requires_grad_(False)
        self.name = "pixels" if net is None else f"features of {type(net).__name__}"
        self.held = torch.empty(0)
        if net is not None:
            maps = [module for module in net.modules() if isinstance(module, nn.Linear)]
            if not maps:
                raise DataError(f"model.features={type(net).__name__}: has no nn.Linear at its end")
            maps[-1].register_forward_pre_hook(self._hold)

    def _hold(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.held = inputs[0]

    @torch.no_grad()
    def __call__(self, x: Tensor, real: bool | None = None) -> Tensor:
        if self.net is None:
            return x.flatten(1).float()
        try:
            with torch.autocast(x.device.type, enabled=False):  # as exact for samples as for tests
                self.net.to(x.device)(x.float())
        except (RuntimeError, ValueError) as error:
            problem = f"cannot take samples {tuple(x.shape)} ({one_line(error)})"
            raise DataError(f"model.features={type(self.net).__name__}: {problem}") from error
        return self.held.flatten(1)

    def scores(self, samples: Tensor) -> dict[str, float]:
        """Return what published tables have of samples with these features, of Inception."""
        return {}


class Inception(Features):
    """Maps images (batch, 1 or 3, height, width) to what Inception v3 has before its logits, (batch, 2048) float32.

    path: its weights, as torch-fidelity and pytorch-fid have them; DataError for others. data: of the images. A call
    with `real`, True for training images, False for samples, counts them for `scores`: FID, sFID by the first 7
    channels of Mixed_6d (arXiv 2103.03841), and the Inception score in 10 splits (arXiv 1606.03498).
    """

    def __init__(self, path: str, data: Any) -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance

        try:
            from torch_fidelity import FeatureExtractorInceptionV3
        except ModuleNotFoundError as error:
            raise DataError("model.inception: needs another package: pip install torch-fidelity") from error
        with readable(Path(path)):
            torch.load(path, weights_only=True)  # torch-fidelity would run code that a file has
            net = FeatureExtractorInceptionV3("inception", ["logits"], path)
        super().__init__(net)
        net.register_forward_pre_hook(lambda _, inputs: data.to_pixels(*inputs).expand(-1, 3, -1, -1))
        net.Mixed_6d.register_forward_hook(self._hold_spatial)
        self.weight, distance = net.fc.weight, partial(FrechetInceptionDistance, nn.Identity(), normalize=True)
        self.distances = {"fid": distance(input_img_size=(1, 1, 2048)), "sfid": distance(input_img_size=(1, 1, 2023))}

    def _hold_spatial(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.spatial = output[:, :7].flatten(1)

    def __call__(self, x: Tensor, real: bool | None = None) -> Tensor:
        pooled = super().__call__(x)
        for distance, features in zip(self.distances.values(), (pooled, self.spatial), strict=True):
            if real is not None:
                distance.to(x.device).update(features, real=real)
        return pooled

    def scores(self, samples: Tensor) -> dict[str, float]:
        from torch_fidelity.metric_isc import isc_features_to_metric

        logits = (samples @ self.weight.T).cpu()  # without biases, as published
        score = isc_features_to_metric(logits, splits=min(10, len(logits)))["inception_score_mean"]
        return {name: float(one.compute()) for name, one in self.distances.items()} | {"inception_score": score}


def load_features(net: nn.Module | None, checkpoint: str | None, inception: Any = None, data: Any = None) -> Features:
    """Return the Features of a classifier with the weights of a checkpoint of `image_cls fit`, or of Inception.

    net: any network; None: the NDLightNet that the checkpoint describes. Without a checkpoint net is as it is.
    inception, data: see Inception. DataError for a checkpoint that is missing or of another network.
    """
    if inception is not None:
        return Inception(inception, data)
    if checkpoint is None:
        return Features(net)
    try:
        if net is None:
            return Features(NDLightNet.from_checkpoint(Path(checkpoint)))
        saved, weights = read_checkpoint(checkpoint)
        if difference := network_difference(net, saved):
            raise DataError(f"{checkpoint}: {difference}")
        load_weights(net, weights, checkpoint)
    except (ValueError, FileNotFoundError) as error:
        raise DataError(f"model.features_checkpoint: {error}") from error
    return Features(net)


class Neighbour(NamedTuple):
    """A training sample near another one: its pixels (channels, *space) uint8."""

    distance: float
    label: int
    pixels: Tensor


class Nearest:
    """The nearest training samples of some others, found batch by batch.

    Args:
        queries: features (n, dim).
        chosen: numbers of the queries of which the nearest samples are stored.
        count: the number of these samples.

    distances, labels: of the nearest sample of each query, (n,). near: for each chosen query, up to
    `count` samples, the nearest first.
    """

    def __init__(self, queries: Tensor, chosen: Sequence[int], count: int = 6) -> None:
        self.queries, self.chosen, self.count = queries, chosen, count
        self.distances = queries.new_full((len(queries),), torch.inf)
        self.labels = torch.full((len(queries),), -1, device=queries.device)
        self.near: list[list[Neighbour]] = [[] for _ in chosen]

    def update(self, features: Tensor, labels: Tensor, pixels: Tensor) -> None:
        """Take a batch of training samples: features (batch, dim), labels, pixels (batch, ...)."""
        gaps = torch.cat([torch.cdist(chunk, features) for chunk in self.queries.split(ROWS)])
        at = gaps.argmin(1)
        # again, exactly: large matrices of distances come from a product, which leaves a copy of a
        # training sample at a distance above 0
        best = (self.queries - features[at]).norm(dim=1)
        self.labels = torch.where(best < self.distances, labels[at], self.labels)
        self.distances = best.minimum(self.distances)
        for query, near in zip(self.chosen, self.near, strict=True):
            index = gaps[query].topk(min(self.count, len(features)), largest=False).indices
            exact = (self.queries[query] - features[index]).norm(dim=1)
            near += map(Neighbour, exact.tolist(), labels[index].tolist(), pixels[index].cpu())
            near.sort(key=lambda one: one.distance)
            del near[self.count :]
