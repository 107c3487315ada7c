"""Completion of clouds of points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ndlightnet.data.errors import file_name
from ndlightnet.data.points.clouds import placed, write_cloud
from ndlightnet.layout import Packed
from ndlightnet.training.classification.answer_figures import worst_to_best
from ndlightnet.training.core.task import Task
from ndlightnet.training.points.cloud_figure import save_clouds
from ndlightnet.training.report.results import mean_scores, write_csv, write_metrics

NEAR = 0.05  # of the F-score, in radii of the cloud
SHOWN = 6  # clouds in test_clouds.png, evenly spaced from the worst on


def nearest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each point of clouds a (batch, n, 3) its distance from the nearest one of b (batch, m, 3), (batch, n),
    and the same of b, (batch, m). Distances are float32 or wider, not from products, which lose small ones."""
    exact = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(exact), b.to(exact)
    with torch.no_grad():  # of all pairs: only those of the nearest have gradients, in a few operations
        # on a card torch.cdist has a block of threads for each pair
        squares = a.new_zeros(len(a), a.shape[1], b.shape[1])
        difference = torch.empty_like(squares)
        for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
            torch.sub(x[:, :, None], y[:, None], out=difference)
            squares.addcmul_(difference, difference)
        pairs = squares.argmin(2), squares.argmin(1)
    of_a, of_b = (y.gather(1, index[..., None].expand(-1, -1, 3)) for y, index in zip((b, a), pairs, strict=True))
    return torch.linalg.vector_norm(a - of_a, dim=-1), torch.linalg.vector_norm(b - of_b, dim=-1)


def chamfer(a: Tensor, b: Tensor) -> Tensor:
    """Return the Chamfer distance L1 of clouds, (batch,): the mean distance of points of either from the nearest one
    of the other, averaged over both."""
    return torch.stack([distance.mean(1) for distance in nearest(a, b)]).mean(0)


def completion_scores(answer: Tensor, truth: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """Return the measures of PoinTr (arXiv 2108.08839) of each cloud, (batch,): Chamfer distances L1, the mean of both
    directions' distances, and L2, the sum of both directions' squared ones, and the F-score, the harmonic mean of the
    shares of points that are nearer than NEAR to the other cloud. unit: (batch,), by which distances are multiplied."""
    to_truth, to_answer = (distance * unit[:, None] for distance in nearest(answer, truth))
    precision, recall = ((distance < NEAR).to(distance).mean(1) for distance in (to_truth, to_answer))
    return {
        "chamfer_l1": (to_truth.mean(1) + to_answer.mean(1)) / 2,
        "chamfer_l2": to_truth.square().mean(1) + to_answer.square().mean(1),
        "f_score": 2 * precision * recall / (precision + recall).clamp(min=1e-12),
    }


def _beside(part: Packed, predicted: Tensor) -> Tensor:
    """Return the points that were seen, of as many a cloud, and those predicted, (batch, points, 3) float32."""
    return torch.cat([part.values.unflatten(0, (len(part), -1)), predicted], 1).float()


class CompletionTask(Task):
    """Trains `net`, a PointCompletion, on the Chamfer distances L1 of its coarse clouds and of its answers, what it
    predicts beside the part that was seen. `test` measures Chamfer distances and F-score, in radii of the cloud as a
    whole, and those of the part that was seen, taken for the answer: metrics.json, test.csv, test_clouds.png; `predict`
    writes predictions/NAME.ply, all points of a file and those predicted, each with a picture.

    Args: as in Task.
    """

    only_float32 = True

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        part, truth, _share, _numbers = batch
        coarse, predicted = self(part)
        loss = chamfer(coarse, truth).mean() + chamfer(_beside(part, predicted), truth).mean()
        self.log("loss", loss, prog_bar=True, batch_size=len(truth))
        return loss

    def validation_step(self, batch: tuple[Any, ...], _: int) -> None:
        part, truth, share, _numbers = batch
        distance = (chamfer(_beside(part, self.net(part)[1]), truth) * share).mean()
        self.log("val_chamfer", distance, prog_bar=True, batch_size=len(truth), sync_dist=True)
        self.log("val_score", -distance, batch_size=len(truth), sync_dist=True)

    def on_test_epoch_start(self) -> None:
        self.tested: dict[int, dict[str, dict[str, float]]] = {}  # of each cloud, measures of the answer and the part
        self.clouds: dict[int, tuple[Tensor, ...]] = {}  # part, answer, truth

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        part, truth, share, numbers = batch
        answer, parts = _beside(part, self.net(part)[1]), part.unpack()
        for row, number in enumerate(numbers.tolist()):
            pair = {"net": answer[row : row + 1], "input": parts[row][None]}
            scores = {
                who: completion_scores(cloud, truth[row : row + 1], share[row : row + 1]) for who, cloud in pair.items()
            }
            self.tested[number] = {who: {name: float(x) for name, x in each.items()} for who, each in scores.items()}
            self.clouds[number] = tuple(x.float().cpu() for x in (parts[row], answer[row], truth[row]))

    def on_test_epoch_end(self) -> None:
        tested, clouds = self.gathered(self.tested), self.gathered(self.clouds)
        if not self.trainer.is_global_zero:
            return
        means = {who: mean_scores(each[who] for each in tested.values()) for who in ("net", "input")}
        write_metrics(self.out(), {**means["net"], "input": means["input"], "clouds": len(tested), **self.costs()})
        lines = [
            (self.data().sample_name(number), *(f"{x:.6f}" for x in each["net"].values()))
            for number, each in tested.items()
        ]
        write_csv(self.out() / "test.csv", ("file", *means["net"]), lines)
        numbers, distances = [*tested], [each["net"]["chamfer_l1"] for each in tested.values()]
        rows = []
        for place in worst_to_best(-torch.tensor(distances), SHOWN):
            titles = ("seen", f"answer, Chamfer {distances[place]:.3f}", "truth")
            rows.append([*zip(titles, clouds[numbers[place]], strict=True)])
        save_clouds(self.out() / "test_clouds.png", rows)
        self.summary = (
            f"Chamfer distance {means['net']['chamfer_l1']:.4f}, F-score {means['net']['f_score']:.3f} over "
            f"{len(tested)} clouds, in radii (the part that was seen: {means['input']['chamfer_l1']:.4f}, "
            f"{means['input']['f_score']:.3f}); see {self.out()}"
        )

    def on_predict_epoch_start(self) -> None:
        self.written: dict[int, str] = {}

    def predict_step(self, batch: tuple[Any, ...], _: int) -> None:
        data, (parts, _labels, numbers) = self.data(), batch
        answers = self.net(parts)[1].double().cpu()
        for answer, number in zip(answers, numbers.tolist(), strict=True):
            cloud = data.clouds_to_predict[number]
            where = placed(cloud)
            answer = torch.cat([cloud, answer * where.radius + where.centre])
            path = self.out() / "predictions" / f"{file_name(data.names_to_predict[number])}.ply"
            write_cloud(path, answer)
            save_clouds(
                path.with_suffix(".png"), [[("seen", where.points), ("answer", (answer - where.centre) / where.radius)]]
            )
            self.written[number] = path.name

    def on_predict_epoch_end(self) -> None:
        self.gather_lines()
        self.summary = f"{len(self.gathered(self.written))} clouds are in {self.out() / 'predictions'}"
