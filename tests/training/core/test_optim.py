"""Which parameters decay, and how the learning rate goes."""

import math
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.nn.local import LocalMixing
from ndlightnet.training.core.optim import adamw_with_cosine, decayed_groups

NETS = {
    "net": lambda: NDLightNet(3, num_classes=4, patch_size=4, embed_dim=16, depth=2),
    "unet": lambda: NDLightUNet(3, in_channels=1, out_channels=3, widths=[4, 8], depths=[1, 1]),
}


@pytest.mark.parametrize("name", NETS)
def test_matrices_and_filters_decay_and_nothing_else(name):
    net = NETS[name]()
    decayed, plain = decayed_groups(net, 0.05)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.05, 0.0)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    matrices = {
        f"{prefix}.weight"
        for prefix, module in net.named_modules()
        if isinstance(module, nn.Linear | nn.Conv3d | nn.ConvTranspose3d | LocalMixing)
    }
    assert {names[id(p)] for p in decayed["params"]} == matrices
    rest = {names[id(p)] for p in plain["params"]}
    assert rest == set(names.values()) - matrices
    # what is left over: norms, biases, and the parameters of the two position codes
    assert {n.rsplit(".")[-1] for n in rest} == {"weight", "bias", "log_factor", "logit", "coef"}
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_frozen_parameters_are_left_out():
    net = NETS["net"]()
    net.head.weight.requires_grad_(False)
    kept = [p for group in decayed_groups(net, 0.1) for p in group["params"]]
    assert all(p is not net.head.weight for p in kept)
    assert len(kept) == len(list(net.parameters())) - 1


def rates(steps: int, lr: float = 0.5) -> list[float]:
    """The rate at every step of a run of `steps`, and after its last."""
    task, net = L.LightningModule(), nn.Linear(2, 2)
    task._trainer = SimpleNamespace(estimated_stepping_batches=steps)
    made = adamw_with_cosine(task, net, lr, 0.0)
    assert made["lr_scheduler"]["interval"] == "step"
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    assert all(group["lr"] == found[-1] for group in optimizer.param_groups)
    return found


def test_schedule_rises_to_the_peak_and_falls_on_a_cosine():
    found = rates(200)  # 10 steps of warm-up
    assert found[0] == pytest.approx(0.5 / 10)
    assert found[4] == pytest.approx(0.5 * 5 / 10)
    assert found[9] == found[10] == pytest.approx(0.5) == max(found)
    assert found[10 + 95] == pytest.approx(0.5 * (0.01 + 0.99 / 2))  # half way
    quarter = 0.5 * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 38 / 190)))
    assert found[10 + 38] == pytest.approx(quarter)
    assert found[-1] == pytest.approx(0.5 * 0.01)
    assert all(a > b for a, b in pairwise(found[10:]))


@pytest.mark.parametrize("steps", [1, 2, 3, 19])
def test_schedule_of_a_short_run_stays_in_bounds(steps):
    found = rates(steps)
    assert found[0] == pytest.approx(0.5)  # the warm-up is one step, at the full rate
    assert all(0.5 * 0.01 - 1e-9 <= rate <= 0.5 for rate in found)


def test_a_training_that_goes_on_for_longer_has_the_rates_of_the_longer_one():
    """What torch's CosineAnnealingLR does not do: its checkpoint holds the old end."""
    made = [
        adamw_with_cosine(
            SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=steps)),
            nn.Linear(2, 2), 0.5, 0.0,
        ) for steps in (40, 200)
    ]  # fmt: skip
    first, longer = (one["lr_scheduler"]["scheduler"] for one in made)
    for _ in range(40):
        first.optimizer.step()
        first.step()
    longer.load_state_dict(first.state_dict())
    longer.optimizer.step()
    longer.step()
    rate, _ = longer.get_last_lr()
    assert rate == pytest.approx(rates(200)[41]) and rate > 0.4


def test_optimizer_trains_every_parameter_with_the_decay_asked_for():
    task, net = L.LightningModule(), NETS["net"]()
    task._trainer = SimpleNamespace(estimated_stepping_batches=100)
    optimizer = adamw_with_cosine(task, net, 1e-3, 0.03)["optimizer"]
    assert type(optimizer).__name__ == "AdamW"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.03, 0.0]
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    assert count == len(list(net.parameters()))
