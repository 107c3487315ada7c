"""Which parameters decay, and how the learning rate goes."""

import math
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.training import ImageTask
from ndlightnet.training.core.optim import decayed_groups, layer_numbers
from ndlightnet.training.core.task import Task

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
    # norms, biases, and the parameters of the two position codes
    assert {n.rsplit(".")[-1] for n in rest} == {"weight", "bias", "log_factor", "logit", "coef"}
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    frozen = next(iter(decayed["params"])).requires_grad_(False)
    trained = [p for group in decayed_groups(net, 0.1) for p in group["params"]]
    assert all(p is not frozen for p in trained) and len(trained) == len(names) - 1


def optimizer_of(net: nn.Module, steps: int, **options: float) -> tuple:
    """AdamW and its schedule for a training of `steps`; 10 steps an epoch."""
    task = Task(net, **{"lr": 0.5, "weight_decay": 0.03} | options)
    task._trainer = SimpleNamespace(
        estimated_stepping_batches=steps, num_training_batches=20, accumulate_grad_batches=2
    )
    configured = task.configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    return configured["optimizer"], configured["lr_scheduler"]["scheduler"]


def rates(steps: int, **options: float) -> list[float]:
    """The rate at every step of a run of `steps`, and after its last."""
    optimizer, schedule = optimizer_of(nn.Linear(2, 2), steps, **options)
    assert type(optimizer).__name__ == "AdamW"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.03, 0.0]
    values = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        values.append(optimizer.param_groups[0]["lr"])
        assert all(group["lr"] == values[-1] for group in optimizer.param_groups)
    return values


def test_schedule_rises_to_the_peak_and_falls_on_a_cosine():
    values = rates(200)  # 10 steps of warm-up
    quarter = 0.5 * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 38 / 190)))
    for step, rate in ((0, 0.5 / 10), (4, 0.5 * 5 / 10), (10 + 95, 0.5 * (0.01 + 0.99 / 2)), (10 + 38, quarter)):
        assert values[step] == pytest.approx(rate)
    assert values[9] == values[10] == pytest.approx(0.5) == max(values)
    assert values[-1] == pytest.approx(0.5 * 0.01) and all(a > b for a, b in pairwise(values[10:]))
    values = rates(200, warmup_epochs=3, min_lr=0.1)
    assert values[0] == pytest.approx(0.5 / 30) and values[29] == values[30] == pytest.approx(0.5)
    assert values[-1] == pytest.approx(0.1) and all(a > b for a, b in pairwise(values[30:]))
    assert rates(200, warmup_epochs=0.55)[4] == pytest.approx(0.5 * 5 / 6)
    values = rates(20, warmup_epochs=0, min_lr=0)
    assert values[0] == 0.5 and values[-1] == pytest.approx(0)
    assert rates(20, warmup_epochs=4)[-2] == pytest.approx(0.5 * 20 / 40)  # longer than the training


def test_the_inverse_square_root_of_the_step_after_the_warm_up():
    """As in the paper of the Transformer: (step / warmup) ** -0.5, whatever the number of steps is."""
    values = rates(200, schedule="inverse_sqrt", warmup_epochs=2)
    assert values[:20] == pytest.approx([0.5 * step / 20 for step in range(1, 21)])
    assert values[20:] == pytest.approx([0.5 * math.sqrt(20 / step) for step in range(21, 202)])
    assert values[79] == pytest.approx(0.25)
    assert rates(100, schedule="inverse_sqrt", warmup_epochs=2) == pytest.approx(values[:101])


def test_a_constant_rate_falls_over_the_last_fifth():
    values = rates(200, schedule="constant_decay", min_lr=0.1)
    assert values[:10] == pytest.approx([0.5 * step / 10 for step in range(1, 11)])
    assert values[10:161] == pytest.approx([0.5] * 151)
    assert values[160:] == pytest.approx([0.5 - 0.4 * step / 40 for step in range(41)])
    assert all(0 < rate <= 0.5 for rate in rates(3, schedule="constant_decay"))
    late = rates(20, schedule="constant_decay", warmup_epochs=1.8, min_lr=0.1)  # a warm-up into the last fifth
    assert max(late) == pytest.approx(0.5) and late[-1] == pytest.approx(0.1)


def test_minutes_set_the_rate_by_the_clock(monkeypatch):
    """The steps do not count: those of a slow training get the rates of its time, and those before it was resumed
    have taken some of it."""
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    net = nn.Linear(2, 2)
    task = Task(net, lr=0.5, weight_decay=0.03, minutes=2, schedule="constant_decay", min_lr=0.1)
    shares = []
    task._trainer = SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: (shares.append(value), value)[1]))
    schedule = task.configure_optimizers()["lr_scheduler"]["scheduler"]

    def rate_at(seconds):
        clock[0] = 1000 + seconds
        schedule.optimizer.step()
        schedule.step()
        return schedule.get_last_lr()[0]

    assert task.timer.time_elapsed() == 0
    task.timer.on_train_start(None, None)
    for seconds, rate in ((3, 0.25), (6, 0.5), (60, 0.5), (96, 0.5), (108, 0.3), (120, 0.1), (500, 0.1)):
        assert rate_at(seconds) == pytest.approx(rate, abs=2e-3)
    assert len(schedule.optimizer.param_groups) == 2 and len(shares) == 1 + 7  # once a step for all groups
    task.timer.load_state_dict({"time_elapsed": {"train": 60.0}})
    assert rate_at(48) == pytest.approx(0.3, abs=2e-3)


def test_betas_are_those_of_the_optimizer():
    optimizer, _ = optimizer_of(nn.Linear(2, 2), 10, betas=(0.8, 0.95))
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.95)}


def test_the_update_is_one_launch_after_clipping_in_every_precision():
    """Of 16-mixed, too: with its fused optimizers Lightning refuses to clip what is not unscaled yet."""
    net = nn.Linear(2, 2)
    (optimizer, _), scaler = optimizer_of(net, 10), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert optimizer.defaults["fused"]
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    clipped = []

    def clip(optimizer, model):
        plugin.clip_gradients(optimizer, 0.5)
        clipped.append(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())

    plugin._after_closure = lambda model, optimizer: clip(optimizer, model)
    before = net.weight.detach().clone()
    loss = net(torch.ones(3, 2)).square().sum()
    plugin.optimizer_step(
        optimizer, SimpleNamespace(automatic_optimization=True), lambda: scaler.scale(loss).backward() or loss
    )
    assert clipped[0] == pytest.approx(0.5, rel=1e-5) and not torch.equal(net.weight, before)


@pytest.mark.parametrize("schedule", ["cosine", "inverse_sqrt", "constant_decay"])
@pytest.mark.parametrize("steps", [1, 2, 3, 19])
def test_schedule_of_a_short_run_stays_in_bounds(steps, schedule):
    values = rates(steps, schedule=schedule)
    assert values[0] == pytest.approx(0.5)  # the warm-up is one step, at the full rate
    assert all(0.5 * 0.01 - 1e-9 <= rate <= 0.5 for rate in values)


def test_a_training_that_goes_on_for_longer_has_the_rates_of_the_longer_one():
    """What torch's CosineAnnealingLR does not do: its checkpoint holds the old end."""
    (_, first), (_, longer) = (optimizer_of(nn.Linear(2, 2), steps) for steps in (40, 200))
    for _ in range(40):
        first.optimizer.step()
        first.step()
    longer.load_state_dict(first.state_dict())
    longer.optimizer.step()
    longer.step()
    rate, _ = longer.get_last_lr()
    assert rate == pytest.approx(rates(200)[41]) and rate > 0.4


def test_rates_decay_by_layer():
    """As in timm: the embedding has the lowest rate, the head that of the schedule."""
    net = NETS["net"]()
    layers = layer_numbers(net)
    first = [{name.split(".")[0] for name, n in layers.items() if n == layer} for layer in range(4)]
    assert first == [{"embed", "tpe"}, {"blocks"}, {"blocks", "norm"}, {"head"}]
    assert {name.split(".")[1] for name, n in layers.items() if n == 1} == {"0"}
    optimizer, _ = optimizer_of(net, 1, lr=0.8, layer_decay=0.5)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    for group in optimizer.param_groups:
        for name in [names.pop(id(parameter)) for parameter in group["params"]]:
            assert group["initial_lr"] == pytest.approx(0.8 * 0.5 ** (3 - layers[name])), name
    assert not names  # each parameter once
    plain = decayed_groups(net, 0.03)[1]["params"]
    free = [p for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]]
    assert {id(p) for p in plain} == {id(p) for p in free}
    with pytest.raises(DataError, match=r"model\.layer_decay: NDLightUNet does not tell"):
        optimizer_of(NETS["unet"](), 1, layer_decay=0.7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet18", "ndlightnet_tiny"])
def test_layers_of_timm_are_those_that_timm_reads(name):
    timm = pytest.importorskip("timm")
    pytest.importorskip("ndlightnet.integrations.timm")
    net = timm.create_model(name)
    layers = timm.models.group_parameters(net, net.group_matcher(coarse=False), reverse=True)
    assert layer_numbers(net) == layers and max(layers.values()) > 3


@pytest.mark.parametrize(
    "options, line",
    [
        ({"lr": 0.0}, r"model\.lr: 0\.0, expected a number above 0"),
        ({"weight_decay": -1.0}, r"model\.weight_decay: -1\.0, expected 0 or more"),
        ({"label_smoothing": 2.0}, r"model\.label_smoothing: 2\.0, expected a fraction from 0 to 1"),
        ({"warmup_epochs": -1}, r"model\.warmup_epochs: -1, expected 0 or more epochs"),
        ({"minutes": 0}, r"model\.minutes: 0, expected a number above 0"),
        ({"schedule": "inverse_sqrt", "min_lr": 0}, r"model\.min_lr: 0, expected null with inverse_sqrt"),
        ({"minutes": 2, "warmup_epochs": 1}, r"model\.warmup_epochs: 1, expected null with model\.minutes"),
        ({"betas": (0.9, 1.0)}, r"model\.betas: \(0\.9, 1\.0\), expected two numbers from 0 to below 1"),
        ({"lr": 1e-4, "min_lr": 1e-3}, r"model\.min_lr: 0\.001, expected 0 to model\.lr=0\.0001"),
        ({"layer_decay": 1.5}, r"model\.layer_decay: 1\.5, expected a fraction above 0"),
        *(
            ({name: True, "cuda_graph": True}, rf"model\.cuda_graph: True, expected false with model\.{name}=True")
            for name in ("compile", "grad_checkpointing", "offload")
        ),
    ],
)
def test_options_of_a_task_that_cannot_be(options, line):
    with pytest.raises(DataError, match=line):
        ImageTask(NETS["net"](), **options)


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_nothing_replaces_the_recipe(classify, tmp_path, name):
    """LightningCLI would train without these groups, rates and schedule; it saves them as null."""
    done = classify("fit", f"--{name}=torch.optim.SGD")
    assert done.status == 2 and len(done.err.splitlines()) == 1 and name in done.err
    (tmp_path / "c.yaml").write_text(f"{name}: null\n")
    done = classify("fit", "--config", tmp_path / "c.yaml", out=tmp_path, root=tmp_path / "gone")
    assert done.status == 1 and done.errors[0].startswith(f"error: {tmp_path / 'gone'}: no such file or folder")
