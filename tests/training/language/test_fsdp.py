"""Language models whose parameters are split among processes (FSDP2) train as on one, and leave its checkpoints."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from ndlightnet import NDLightNet
from ndlightnet.training import TextData, TextTask, run
from tests.training.conftest import last, options
from tests.training.forked import run_forked

LR, EPS = 1e-3, 2**-23
CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, devices: 1, log_every_n_steps: 1, gradient_clip_val: 0.5, enable_progress_bar: false}
model:
  lr: 1.0e-3
  schedule: inverse_sqrt
  step_tokens: 256
  net:
    class_path: ndlightnet.NDLightNet
    init_args: {dims: 1, vocab_size: 300, causal: true, embed_dim: 64, depth: 3, mixer: ndlightnet.nn.mixers.text_mixer}
data:
  class_path: ndlightnet.training.TextData
  init_args: {root: nowhere, length: 32, windows: 8, lengths: [32], test_tokens: 64, workers: 0}
"""
STRATEGY = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"save_distributed_checkpoint": False},
}


class Watched(TextTask):
    """Saves the gradients of a step, before they are clipped, in one file for each process."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = {name: p.grad for name, p in self.net.named_parameters()}
        assert all(isinstance(p, DTensor) for p in grads.values()) == (self.trainer.world_size > 1)
        full = {name: p.full_tensor() if isinstance(p, DTensor) else p.clone() for name, p in grads.items()}
        torch.save(full, self.out() / f"{self.global_step}_{self.global_rank}.pt")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(last(out), weights_only=True)["state_dict"]


def logged(out: Path) -> list[dict[str, str]]:
    with (out / "logs/version_0/metrics.csv").open() as file:
        return [*csv.DictReader(file)]


def command(*words: str) -> int:
    return run(Watched, TextData, Path("no default"), None, list(words))


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    (tmp_path / "text").write_bytes(text.numpy().tobytes())
    one, two, half, rest, last_alone = (tmp_path / name for name in ("one", "two", "half", "rest", "last"))

    def call(name: str, out: Path, count: int, epochs: int = 2, ckpt: Path | None = None, **model: object) -> list[int]:
        trainer = {"max_epochs": epochs} | ({"devices": 2, "strategy": STRATEGY} if count > 1 else {})
        paths = {"out": out, "root": tmp_path / "text"} | ({"ckpt": ckpt} if ckpt else {})
        words = options(**paths, data={"batch_size": 4 // count}, model=model, trainer=trainer)
        return run_forked(tmp_path / "log", command, name, f"--config={tmp_path}/c.yaml", *words, count=count)

    assert call("fit", one, 1) == [0]
    assert call("fit", two, 2, grad_checkpointing=True) == [0, 0]
    assert call("fit", half, 2, epochs=1) == [0, 0]
    alone, *split = (torch.load(file) for file in (one / "0_0.pt", two / "0_0.pt", two / "0_1.pt", half / "0_0.pt"))
    for name, grad in alone.items():  # sums over 256 tokens and of 3 layers, in another order
        for grads in split:
            assert (grads[name] - grad).abs().max() <= 64 * EPS * grad.abs().max(), name

    net, saved = NDLightNet.from_checkpoint(last(half)), weights(half)
    assert type(net) is NDLightNet and net.head.weight is net.embed.weight
    assert all(torch.equal(x, saved[f"net.{name}"]) for name, x in net.state_dict().items())

    # the second step, with the moments of a checkpoint, on as many processes and on one
    assert call("fit", rest, 2, ckpt=last(half)) == [0, 0]
    assert call("fit", last_alone, 1, ckpt=last(half)) == [0]
    expected = weights(two)
    assert all(torch.equal(x, expected[name]) for name, x in weights(rest).items())
    for name, x in expected.items():
        for out in (one, last_alone):  # AdamW divides by gradients: few are so near 0 that rounding changes the step
            assert (weights(out)[name] - x).abs().mean() <= LR * 2**-12, name

    words = options(trainer={"strategy": STRATEGY}, root=tmp_path / "text", out=tmp_path / "wrong", ckpt=last(one))
    assert run_forked(tmp_path / "log", command, "fit", f"--config={tmp_path}/c.yaml", *words) == [1]
    assert "expected one of a training with ModelParallelStrategy" in (tmp_path / "log").read_text()
    assert call("test", tmp_path / "tested", 1, ckpt=last(two)) == [0]
    losses = [float(row["val_loss"]) for out in (one, two) for row in logged(out) if row["val_loss"]]
    assert losses[:2] == pytest.approx(losses[2:], rel=64 * EPS) and len(losses) == 4
