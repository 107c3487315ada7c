"""Predictions of a causal network at each frame of a video from a file or a camera."""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from torch import Tensor

from ndlightnet.data.errors import DataError, cell
from ndlightnet.data.video.video_stream import VideoStream
from ndlightnet.data.video.video_transforms import eval_frames
from ndlightnet.training.report.results import log


class StreamTrainer(L.Trainer):
    """Lightning's Trainer with one more method, `stream`."""

    def stream(
        self,
        model: Any,
        datamodule: Any,
        ckpt_path: str | None = None,
        output: str | None = None,
        fps: float | None = None,
    ) -> None:
        """Predict from all frames so far, at each frame of a video or a pipe as it arrives.

        The lines, CSV, are: seconds after the first frame, the frame's number from 0, the class and its probability,
        the probabilities of all classes. The network reads a patch of frames at a time (patch_size[0] of them), so
        their lines come together.

        Args:
            ckpt_path: checkpoint of a causal network.
            output: file for the lines; default: standard output.
            fps: frames a second that the network gets; default: all. It was trained at the frame rate of its clips,
                which is data.frames over the seconds of a training video.
        """
        net, names = self._load(model, ckpt_path)
        if datamodule.input is None:
            raise DataError("data.input: expected a video, a pipe, or - for standard input")
        count, start, damage = 0, time.monotonic(), ""
        try:
            video = VideoStream(datamodule.input, fps)
            log(video.notes)
            with self._status() as show, lines(output) as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["seconds", "frame", "class", "probability", *map(cell, names)])
                for frames, logits in self._predictions(net, video, datamodule):
                    probs = torch.softmax(logits[0].float(), 0).tolist()
                    best = max(range(len(probs)), key=probs.__getitem__)
                    cells = [f"{p:.6f}" for p in (probs[best], *probs)]
                    for number, seconds in frames:
                        writer.writerow([f"{seconds:.3f}", number, cell(names[best]), *cells])
                    file.flush()  # a camera's stream may never end
                    count += len(frames)
                    show(len(frames))
            damage = video.damage
        except KeyboardInterrupt:  # the way to end a camera's stream
            pass
        rate = count / (time.monotonic() - start)
        print(f"{count} frames, {rate:.1f} frames/s", file=sys.stderr)
        if damage:
            raise DataError(damage)

    def _load(self, model: Any, path: str | None) -> tuple[Any, list[str]]:
        """Load the checkpoint; return the network and the names of the classes."""
        if not model.causal:
            raise DataError("model.causal=False: train a causal network, with --model.causal true")
        if path is None:
            raise DataError("--ckpt_path: stream expects the checkpoint of a training, got none")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["state_dict"])
        task: Any = self.precision_plugin.convert_module(model)
        net = task.to(self.strategy.root_device).eval().net
        try:
            net.init_state(1)
        except ValueError as error:  # raised by a mixer that cannot stream
            raise DataError(f"model.net: {error}") from error
        return net, saved["names"]["classes"]

    def _predictions(self, net: Any, video: VideoStream, data: Any) -> Iterator[tuple[list[tuple[int, float]], Tensor]]:
        """Yield the numbers and times of the frames of each patch, and the logits after it."""
        plugin, stream, waiting, previous = self.precision_plugin, net.stream(), [], None
        try:
            for frame in video:
                picture = eval_frames(frame.picture[None], data.framing)[None]
                picture = picture.to(self.strategy.root_device)
                clip = data.network_input(picture, previous)
                previous = picture
                with plugin.forward_context():
                    logits = stream(plugin.convert_input(clip))
                waiting.append((frame.number, frame.time))
                if not stream.waiting[0]:
                    yield waiting, logits
                    waiting = []
        except KeyboardInterrupt:
            pass
        if waiting:  # the last patch is padded as that of a whole clip is
            with plugin.forward_context():
                logits = stream.finish()
            yield waiting, logits

    @contextmanager
    def _status(self) -> Iterator[Any]:
        """Show frames per second on a terminal; yield a function that adds frames to the count."""
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"))
        disabled = not console.is_terminal or self.progress_bar_callback is None
        to_terminal = sys.stdout.isatty()  # lines on the same terminal go above it
        progress = Progress(*columns, console=console, transient=True, disable=disabled, redirect_stdout=to_terminal)
        job = progress.add_task("waiting for frames", total=None)

        def show(frames: int) -> None:
            progress.advance(job, frames)
            task = progress.tasks[0]
            speed = f"{task.completed:.0f} frames, {task.speed or 0:.1f} frames/s"
            progress.update(job, description=speed)

        with progress:
            yield show


@contextmanager
def lines(output: str | None) -> Iterator[Any]:
    """Open the file of this name or standard output; after an error, the lines so far stay."""
    try:
        with open(output, "w", newline="", encoding="utf-8") if output else nullcontext() as file:
            yield file or sys.stdout
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        what = output or "standard output"
        raise DataError(f"{what}: cannot be written ({error.strerror or error})") from error
