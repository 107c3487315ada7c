"""Classification of clouds of points."""

from __future__ import annotations

from torch import Tensor

from ndlightnet.training.classification.answer_figures import worst_to_best
from ndlightnet.training.classification.classification_task import FileClassificationTask
from ndlightnet.training.points.cloud_figure import save_clouds

ROWS, COLUMNS = 3, 5  # clouds in test_clouds.png


class PointClsTask(FileClassificationTask):
    """Trains `net`, packed clouds -> `(batch, classes)` logits: an NDLightNet of 3 axes and channels with patches of 1,
    no MD-TPE and a mixer without an order. `predict` writes predictions.csv.

    Args: as in ClassificationTask.
    """

    samples = "clouds"
    only_float32 = True
    grid_parallel = False

    def setup(self, stage: str) -> None:
        self.expect(in_chans=3)
        if stage != "predict":  # classes come with the checkpoint
            self.expect(num_classes=len(self.data().classes))

    def sample(self, number: int) -> None:
        return None

    def save_samples(self, numbers: list[int], probabilities: Tensor, labels: Tensor) -> None:
        data, names = self.data(), self.figure_names(self.data().classes)
        panels = [
            (f"{names[labels[row]]}: {names[int(probabilities[row].argmax())]}", data.test_set[numbers[row]][0])
            for row in worst_to_best(probabilities.gather(1, labels[:, None])[:, 0], ROWS * COLUMNS)
        ]
        lines = [panels[first : first + COLUMNS] for first in range(0, len(panels), COLUMNS)]
        save_clouds(self.out() / "test_clouds.png", lines)
