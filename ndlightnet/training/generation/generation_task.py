"""Generation of images, clips and volumes: diffusion by flow matching or by noise prediction."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from ndlightnet.data.errors import DataError, file_name
from ndlightnet.data.sampling import linspace_indices, mixed
from ndlightnet.inference import sample
from ndlightnet.layout import per_axis
from ndlightnet.training.core.options import check
from ndlightnet.training.core.task import Task
from ndlightnet.training.generation.fidelity import Nearest, frechet_distance, load_features, precision_and_recall
from ndlightnet.training.generation.latents import Latents, Pixels, cached_latents
from ndlightnet.training.generation.sample_sheets import is_clip, save_animation, save_nearest, save_sample, save_sheet
from ndlightnet.training.generation.schedulers import build_scheduler, check_sampling, noised, prediction
from ndlightnet.training.report.results import write_metrics

ROWS, COLUMNS = 10, 10  # of a sheet
NEIGHBOURS = 12  # samples whose nearest training samples are shown
OURS = re.compile(r"\d{5,}(_.*)?\.(png|gif|nii\.gz|npy)")  # files of samples
FEWEST = 50  # training samples, about, for a Frechet distance of their own


class GenerationTask(Task):
    """Trains `net` to generate samples like those of the data, by class if it knows classes:
    (noisy samples (batch, channels, *space), times (batch,), classes (batch,)) -> the shape of the
    samples. Data are labelled, on any number of axes.

    `test` draws `samples` samples of the classes of the test data, compares them with the test
    data, and shows the training samples that are nearest. `predict` writes `samples` of them.

    Args:
        net: the network, such as an NDLightDiT.
        scheduler: of diffusers, by its name or as {name: arguments}. With that of flow matching the
            network predicts the velocity of straight paths; with DDIMScheduler, DDPMScheduler and
            the like what their prediction_type says.
        guidance: factor in sampling on what a class changes (classifier-free guidance); 1: none.
        sampling_steps: steps from noise to a sample.
        samples: how many `test` and `predict` draw.
        classes: predict: draw these by their names, in turn; default: all.
        size: predict: sizes of the samples, a number or one for each axis; default: the data's.
        seed: of the noise that samples begin with.
        autoencoder: folder of an AutoencoderKL of diffusers: the network generates its latents.
        latents: folder that keeps those of the training images, encoded once, for data without augmentation but hflip.
        features: test: a classifier, trained on the same data, in whose features samples are
            compared; default: the NDLightNet of features_checkpoint, if any, or else pixels.
        features_checkpoint: the classifier's checkpoint, of `image_cls fit`.
        inception: test: compare in the features of Inception v3 with the weights of this file instead, with FID and
            sFID to all training images and the Inception score; pt_inception-2015-12-05-6726825d.pth.
        others: as in Task.
    """

    saved = (*Task.saved, "space", "prediction")
    only_float32 = True

    def __init__(
        self,
        net: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        scheduler: str | dict[str, Any] = "FlowMatchEulerDiscreteScheduler",
        guidance: float = 1.0,
        sampling_steps: int = 50,
        samples: int = 1000,
        classes: list[str] | None = None,
        size: int | list[int] | None = None,
        seed: int = 0,
        autoencoder: str | None = None,
        latents: str | None = None,
        features: nn.Module | None = None,
        features_checkpoint: str | None = None,
        inception: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(net, lr=lr, weight_decay=weight_decay, **kwargs)
        self.scheduler = build_scheduler(scheduler)
        self.guidance, self.sampling_steps, self.samples = guidance, sampling_steps, samples
        self.class_names, self.size, self.seed = classes, size, seed
        self.autoencoder, self.latents = autoencoder, latents
        check("model.inception", inception, not (inception and (features or features_checkpoint)), "null with features")
        # in a tuple, so not registered as a submodule: it is no part of a checkpoint
        self.classifier = (features, features_checkpoint, inception)

    def setup(self, stage: str) -> None:
        data, kind = self.data(), type(self.data()).__name__
        inputs = ("noisy samples", "times", "classes")[: 2 + self.conditional]
        expected = f"a network that takes {', '.join(inputs)}, such as NDLightDiT"
        check("model.net", type(self.net).__name__, accepts(self.net, inputs), expected)
        check("model.sampling_steps", self.sampling_steps, self.sampling_steps > 0, "1 or more")
        check_sampling(self.scheduler, self.sampling_steps)
        check("model.samples", self.samples, self.samples > 1, "2 or more")
        guided = self.guidance == 1 or self.conditional
        check("model.guidance", self.guidance, guided, "1: model.net has num_classes=0")
        if stage == "test":  # the training samples are compared in one process
            check("trainer.devices", self.trainer.world_size, self.trainer.world_size == 1, "1")
        self.codec = Pixels(data) if self.autoencoder is None else Latents(data, self.autoencoder)
        if stage != "predict":
            if not hasattr(data, "space"):
                raise DataError(f"data={kind}: expected data whose samples have one size")
            self.space = tuple(data.space)
            self.codec.shape(self.space)
        self.expect(in_chans=self.codec.channels(data.channels))
        if stage == "predict":  # classes and sizes come with the checkpoint
            numbers = DataLoader(range(self.samples), batch_size=data.batch_size)  # type: ignore
            # the data's own predict reads files; samples need none
            data.predict_dataloader = lambda: numbers
            data.on_after_batch_transfer = lambda batch, _: batch
            return
        labels = not (getattr(data, "mixup", 0) or getattr(data, "cutmix", 0))
        check("data.mixup, data.cutmix", "above 0", labels, "0: mixed images are no samples")
        pixels = getattr(data, "pixels", "rgb")
        check("data.pixels", pixels, pixels == "rgb", "rgb, which is what is generated")
        self.expect(dims=len(self.space))
        if self.conditional:
            self.expect(num_classes=len(data.classes))
        if stage == "fit" and self.latents is not None:
            good = self.autoencoder is not None and getattr(data, "only_flips", False)
            check("model.latents", self.latents, good, "null without an autoencoder, or with augmentation but hflip")
            data.train_set = cached_latents(Path(self.latents), self.codec, self.trainer)

    @property
    def conditional(self) -> bool:
        """Whether the network knows classes."""
        return getattr(self.net, "num_classes", 0) > 0

    def example_inputs(self) -> tuple[Tensor, ...]:
        count = self.data().batch_size
        with self.device:
            inputs = torch.zeros(count, *self.latent_shape(self.space)), torch.zeros(count)
            labels = torch.zeros(count, dtype=torch.int64)
        return (*inputs, labels) if self.conditional else inputs

    def latent_shape(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the channels and sizes of what the network generates for samples of a space."""
        channels: Any = self.net.in_chans
        return (channels, *self.codec.shape(space))

    def loss(
        self, net: Callable[..., Tensor], batch: tuple[Any, ...], generator: torch.Generator | None = None
    ) -> Tensor:
        """Return the mean squared error of what the network predicts from noisy samples."""
        x, labels, *_numbers = batch
        x = self.codec.encode(first_clips(x, self.space), generator)
        noisy, t, target = noised(self.scheduler, x, generator)
        inputs = (noisy, t, labels) if self.conditional else (noisy, t)
        return mse_loss(net(*inputs).float(), target)

    def training_step(self, batch: tuple[Any, ...], _: int) -> Tensor:
        loss = self.loss(self, batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch[0]))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Write a small sheet of samples. (Averaged weights are swapped in here, and swapped out
        before the end of the epoch.)"""
        trainer = self.trainer
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        rows = len(self.data().classes) if self.conditional else 1
        labels = torch.tensor([label for label in linspace_indices(min(rows, ROWS), rows) for _ in range(COLUMNS // 2)])
        sheet = self.by_class(labels, self.generate(labels, self.space))
        save_sheet(self.out() / "samples" / f"epoch_{trainer.current_epoch + 1:04d}.png", sheet)

    def validation_step(self, batch: tuple[Any, ...], number: int) -> None:
        if not len(batch[0]):  # no file of the batch could be read
            return
        # the same noise each time
        rng = torch.Generator(self.device).manual_seed(mixed(self.seed, number))
        loss = self.loss(self.net, batch, rng)
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch[0]), sync_dist=True)
        self.log("val_score", -loss, batch_size=len(batch[0]), sync_dist=True)

    @torch.no_grad()
    def generate(
        self, labels: Tensor, space: Sequence[int], first: int = 0, on_step: Callable[[], object] | None = None
    ) -> Tensor:
        """Return samples of classes (n,) as pixels (n, channels, *space) uint8 on the CPU. The
        noise follows from `seed` and from the number of the first sample."""
        rng = torch.Generator().manual_seed(mixed(self.seed, first))
        plugin: Any = self.trainer.precision_plugin
        with plugin.forward_context():
            latents = sample(
                self.net,
                self.scheduler,
                (len(labels), *self.latent_shape(space)),
                labels if self.conditional else None,
                steps=self.sampling_steps,
                guidance=self.guidance,
                generator=rng,
                on_step=on_step,
            )
            return self.codec.decode(latents).cpu()

    def by_class(self, labels: Tensor, pixels: Tensor) -> list[tuple[str, list[Tensor]]]:
        """Return the rows of a sheet: the name of a class, and the first of its samples."""
        if not self.conditional:
            return [("", list(row)) for row in pixels[: ROWS * COLUMNS].split(COLUMNS)]
        present = labels.unique().tolist()
        names = self.figure_names(self.data().classes)
        return [
            (names[label], list(pixels[labels == label][:COLUMNS]))
            for label in (present[i] for i in linspace_indices(min(ROWS, len(present)), len(present)))
        ]

    def save_sheets(self, name: str, labels: Tensor, pixels: Tensor) -> None:
        """Write NAME.png and, of clips, NAME.gif."""
        rows = self.by_class(labels, pixels)
        save_sheet(self.out() / f"{name}.png", rows)
        if is_clip(pixels[0]):
            least = min(len(samples) for _, samples in rows)
            clips = [clip for _, samples in rows for clip in samples[:least]]
            save_animation(self.out() / f"{name}.gif", clips, least)

    def on_test_epoch_start(self) -> None:
        self.measured = load_features(*self.classifier, self.data())
        self.tested: dict[int, tuple[Tensor, int]] = {}  # features and label of each test sample

    def test_step(self, batch: tuple[Any, ...], _: int) -> None:
        x, labels, numbers = batch
        if not len(x):  # no file of the batch could be read
            return
        features = self.measured(first_clips(x, self.space)).cpu()
        pairs = zip(features, labels.tolist(), strict=True)
        self.tested |= dict(zip(numbers.tolist(), pairs, strict=True))

    def on_test_epoch_end(self) -> None:
        real = torch.stack([features for features, _ in self.tested.values()]).to(self.device)
        of_test = sorted(label for _, label in self.tested.values())
        labels = torch.tensor([of_test[i] for i in linspace_indices(self.samples, len(of_test))])
        start = time.perf_counter()
        pixels = self.draw(labels)
        seconds = time.perf_counter() - start
        data = self.data()
        batches = pixels.split(data.batch_size)
        features = torch.cat([self.measured(data.from_pixels(x.to(self.device)), real=False) for x in batches])
        chosen = linspace_indices(min(NEIGHBOURS, len(pixels)), len(pixels))
        nearest, train = self.compare_with_training(torch.cat([features, real]), chosen, max(len(pixels), FEWEST))
        precision, recall = precision_and_recall(real, features)
        of_samples, of_real = nearest.distances.split([len(features), len(real)])
        agree = (nearest.labels[: len(labels)].cpu() == labels).float().mean()
        metrics = {
            "frechet": frechet_distance(features, real),
            "frechet_train": frechet_distance(train, real),
            **self.measured.scores(features),
            "precision": precision,
            "recall": recall,
            "nearest_has_class": float(agree) if self.conditional else None,
            "nearest_distance": float(of_samples.median()),
            "nearest_distance_test": float(of_real.median()),
            "compared_in": self.measured.name,
            "samples": len(labels),
            "test_samples": len(real),
            "train_samples": len(train),
            "sampling_steps": self.sampling_steps,
            "guidance": self.guidance,
            "sampled_per_second": len(labels) / seconds,
            **self.costs(),
        }
        write_metrics(self.out(), metrics)
        self.save_sheets("samples", labels, pixels)
        classes = self.figure_names(self.data().classes) if self.conditional else []
        drawn = [(int(labels[i]), pixels[i]) for i in chosen]
        save_nearest(self.out() / "nearest.png", drawn, nearest.near, classes)
        self.summary = (
            f"Frechet distance {metrics['frechet']:.3g} (of {len(train)} training samples "
            f"{metrics['frechet_train']:.3g}), precision {precision:.3f}, recall {recall:.3f}, in "
            f"{self.measured.name}, {len(labels)} samples against {len(real)} of the test; see "
            f"{self.out()}"
        )

    def draw(self, labels: Tensor) -> Tensor:
        """Return samples of classes (n,) as pixels, in batches of the data's size."""
        from rich.progress import Progress

        size, quiet = self.data().batch_size, self.trainer.progress_bar_callback is None
        batches, drawn = labels.split(size), []
        with Progress(transient=True, disable=quiet) as bar:
            task = bar.add_task("sampling", total=len(batches) * self.sampling_steps)
            for number, batch in enumerate(batches):
                drawn.append(self.generate(batch, self.space, number * size, lambda: bar.advance(task)))
        return torch.cat(drawn)

    def compare_with_training(self, features: Tensor, chosen: Sequence[int], count: int) -> tuple[Nearest, Tensor]:
        """Return the training samples that are nearest to those with these features (n, dim), and the features of
        about `count` training samples, at random. chosen: see Nearest."""
        data = self.data()
        data.setup("fit")
        loader = data.plain_train_dataloader()
        nearest, drawn_features, failed = Nearest(features, chosen), [], len(self.failures)
        rng = torch.Generator().manual_seed(self.seed)
        share = count / (len(loader) * data.batch_size)
        for batch in loader:
            x, labels, *_ = data.on_after_batch_transfer(data.transfer_batch_to_device(batch, self.device, 0), 0)
            if not len(x):
                continue
            batch_features = self.measured(x, real=True)
            nearest.update(batch_features, labels, data.to_pixels(x))
            drawn_features.append(batch_features[torch.rand(len(x), generator=rng) < share])
        # the training did without these files, too
        self.notes += [f"{line}; left out" for line in self.failures[failed:]]
        del self.failures[failed:]
        return nearest, torch.cat(drawn_features)

    def on_predict_start(self) -> None:
        classes = self.data().classes
        if not hasattr(self, "space"):
            raise DataError("--ckpt_path: predict expects the checkpoint of a training, got none")
        try:
            self.space = self.space if self.size is None else per_axis("model.size", self.size, len(self.space))
        except ValueError as error:
            raise DataError(error) from error
        self.codec.shape(self.space)
        for name in self.class_names or ():
            check("model.classes", name, self.conditional, "none: model.net has num_classes=0")
            check("model.classes", name, name in classes, f"one of {', '.join(classes)}")
        names = self.class_names or classes
        self.turns = torch.tensor([classes.index(name) for name in names] or [0])
        self.predicted: dict[int, Tensor] = {}
        if self.trainer.is_global_zero:  # no sample of an earlier run stays beside those of this
            for file in (self.out() / "predictions").glob("*"):
                if OURS.fullmatch(file.name):
                    file.unlink()
        self.trainer.strategy.barrier()

    def predict_step(self, batch: Tensor, _: int) -> None:
        numbers = batch.cpu()
        labels = self.turns[numbers % len(self.turns)]
        pixels = self.generate(labels, self.space, int(numbers[0]))
        classes = self.data().classes
        for number, label, one in zip(numbers.tolist(), labels.tolist(), pixels, strict=True):
            name = f"{number:05d}" + (f"_{file_name(classes[label])}" if self.conditional else "")
            save_sample(self.out() / "predictions" / name, one)
            if number < ROWS * COLUMNS:
                self.predicted[number] = one

    def on_predict_end(self) -> None:
        predicted = self.gathered(self.predicted)
        if self.trainer.is_global_zero:
            labels = self.turns[torch.tensor(list(predicted)) % len(self.turns)]
            self.save_sheets("predictions", labels, torch.stack(list(predicted.values())))
        self.summary = f"{self.samples} samples are in {self.out() / 'predictions'}"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["space"] = list(self.space)
        checkpoint["prediction"] = prediction(self.scheduler)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        saved, ours = checkpoint["prediction"], prediction(self.scheduler)
        expected = f"one with which networks predict {saved}, as in the training, not {ours}"
        check("model.scheduler", type(self.scheduler).__name__, saved == ours, expected)
        if not hasattr(self, "space"):
            self.space = tuple(checkpoint["space"])


def accepts(net: nn.Module, inputs: Sequence[str]) -> bool:
    """Return whether a network has `in_chans` and can be called with so many inputs."""
    try:
        signature(net.forward).bind(*inputs)
    except TypeError:
        return False
    return hasattr(net, "in_chans")


def first_clips(x: Tensor, space: Sequence[int]) -> Tensor:
    """Return samples (batch, channels, *space), the first of each where videos have several."""
    return x[:, 0] if x.ndim > len(space) + 2 else x
