"""Which parameters decay, and how the learning rate goes."""

import math
from itertools import pairwise
from types import SimpleNamespace

import lightning as L
import pytest
from torch import nn

from ndlightnet import NDLightNet, NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.nn.depthwise import LocalMixing
from ndlightnet.training import ImageTask
from ndlightnet.training.core.optim import adamw_with_cosine, decayed_groups, layer_numbers

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


def rates(steps: int, lr: float = 0.5, **options: float) -> list[float]:
    """The rate at every step of a run of `steps`, and after its last; 10 steps an epoch."""
    task, net = L.LightningModule(), nn.Linear(2, 2)
    task._trainer = SimpleNamespace(
        estimated_stepping_batches=steps, num_training_batches=20, accumulate_grad_batches=2
    )
    made = adamw_with_cosine(task, net, lr, 0.0, **options)
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
            SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=steps)), nn.Linear(2, 2), 0.5, 0.0
        )
        for steps in (40, 200)
    ]
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


def test_warmup_and_the_last_rate_are_as_asked_for():
    found = rates(200, warmup_epochs=3, min_lr=0.1)
    assert found[0] == pytest.approx(0.5 / 30) and found[29] == found[30] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.1) and all(a > b for a, b in pairwise(found[30:]))
    assert rates(200, warmup_epochs=0.55)[4] == pytest.approx(0.5 * 5 / 6)
    found = rates(20, warmup_epochs=0, min_lr=0)
    assert found[0] == 0.5 and found[-1] == pytest.approx(0)
    found = rates(20, warmup_epochs=4)  # a warm-up that is longer than the training
    assert found[-2] == pytest.approx(0.5 * 20 / 40)


def test_rates_decay_by_layer():
    """As in timm: the embedding has the lowest rate, the head that of the schedule."""
    net = NETS["net"]()
    layers = layer_numbers(net)
    assert {name.split(".")[0] for name, n in layers.items() if n == 0} == {"embed", "tpe"}
    assert {name.split(".")[1] for name, n in layers.items() if n == 1} == {"0"}
    assert {name.split(".")[0] for name, n in layers.items() if n == 2} == {"blocks", "norm"}
    assert {name for name, n in layers.items() if n == 3} == {"head.weight", "head.bias"}
    task = L.LightningModule()
    task._trainer = SimpleNamespace(estimated_stepping_batches=1)
    optimizer = adamw_with_cosine(task, net, 0.8, 0.05, layer_decay=0.5)["optimizer"]
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    seen = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            seen.add(name)
            assert group["initial_lr"] == pytest.approx(0.8 * 0.5 ** (3 - layers[name])), name
    assert seen == set(names.values())
    plain = decayed_groups(net, 0.05)[1]["params"]
    free = [p for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]]
    assert {id(p) for p in plain} == {id(p) for p in free}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet18", "ndlightnet_tiny"])
def test_layers_of_timm_are_those_that_timm_finds(name):
    timm = pytest.importorskip("timm")
    pytest.importorskip("ndlightnet.integrations.timm")
    net = timm.create_model(name)
    found = timm.models.group_parameters(net, net.group_matcher(coarse=False), reverse=True)
    assert layer_numbers(net) == found and max(found.values()) > 3


def test_a_network_without_layers_in_order_is_refused():
    task = L.LightningModule()
    with pytest.raises(DataError, match=r"model\.layer_decay: NDLightUNet does not tell"):
        adamw_with_cosine(task, NETS["unet"](), 1e-3, 0.05, layer_decay=0.7)


@pytest.mark.parametrize(
    "options, line",
    [
        ({"lr": 0.0}, r"model\.lr: 0\.0, expected a number above 0"),
        ({"weight_decay": -1.0}, r"model\.weight_decay: -1\.0, expected 0 or more"),
        ({"label_smoothing": 2.0}, r"model\.label_smoothing: 2\.0, expected a fraction from 0 to 1"),
        ({"warmup_epochs": -1}, r"model\.warmup_epochs: -1, expected 0 or more epochs"),
        ({"lr": 1e-4, "min_lr": 1e-3}, r"model\.min_lr: 0\.001, expected 0 to model\.lr=0\.0001"),
        ({"layer_decay": 1.5}, r"model\.layer_decay: 1\.5, expected a fraction above 0"),
        ({"compile": True, "cuda_graph": True}, r"model\.cuda_graph: True, expected false with mo"),
    ],
)
def test_options_of_a_task_that_cannot_be(options, line):
    with pytest.raises(DataError, match=line):
        ImageTask(NETS["net"](), **options)


@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_nothing_replaces_the_recipe(classify, tmp_path, name):
    """LightningCLI would train without these groups, rates and schedule."""
    done = classify("fit", f"--{name}=torch.optim.SGD")
    assert done.status == 2 and len(done.err.splitlines()) == 1 and name in done.err


def test_a_config_that_lightning_has_saved_is_read(classify, tmp_path):
    (tmp_path / "c.yaml").write_text("optimizer: null\nlr_scheduler: null\n")
    places = (f"--trainer.default_root_dir={tmp_path}", f"--data.root={tmp_path / 'gone'}")
    done = classify("fit", "--config", tmp_path / "c.yaml", *places)
    assert (done.status, done.errors) == (1, [f"error: {tmp_path / 'gone'}: no such folder"])
