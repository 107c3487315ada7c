"""Samples: with networks that are exact for a Gaussian, the sampler gives that Gaussian."""

import pytest
import torch
from torch import nn

from ndlightnet import NDLightDiT
from ndlightnet.inference import sample

diffusers = pytest.importorskip("diffusers")
MEAN, STD = torch.tensor([3.0, -1.0])[:, None], 0.5


class Gaussian(nn.Module):
    """The exact answer for data of normally distributed numbers: mean MEAN, deviation STD."""

    num_classes = 0

    def __init__(self, scheduler, kind="velocity"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.scheduler, self.kind = scheduler, kind

    def forward(self, x, t, y=None):
        if self.kind == "velocity":
            signal, noise = 1 - t / 1000, t / 1000
        else:
            kept = self.scheduler.alphas_cumprod[int(t)]
            signal, noise = kept.sqrt(), (1 - kept).sqrt()
        variance = signal**2 * STD**2 + noise**2
        gap = (x - signal * MEAN) / variance
        clean, drawn = MEAN + signal * STD**2 * gap, noise * gap  # the expected ones, given x
        if self.kind == "velocity":
            return drawn - clean
        return drawn if self.kind == "epsilon" else signal * drawn - noise * clean


SCHEDULERS = {
    "flow": (diffusers.FlowMatchEulerDiscreteScheduler(), "velocity"),
    "shifted flow": (diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), "velocity"),
    "ddim": (diffusers.DDIMScheduler(clip_sample=False), "epsilon"),
    "v": (diffusers.DDIMScheduler(clip_sample=False, prediction_type="v_prediction"), "v"),
    "ddpm": (diffusers.DDPMScheduler(clip_sample=False), "epsilon"),
    "flow heun": (diffusers.FlowMatchHeunDiscreteScheduler(), "velocity"),
    "euler": (diffusers.EulerDiscreteScheduler(), "epsilon"),
    "solver": (diffusers.DPMSolverMultistepScheduler(), "epsilon"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_distribution_of_an_exact_network_is_reproduced(name):
    scheduler, kind = SCHEDULERS[name]
    rng = torch.Generator().manual_seed(0)
    x = sample(Gaussian(scheduler, kind), scheduler, (4000, 2, 3), steps=200, generator=rng)
    assert x.shape == (4000, 2, 3) and x.dtype == torch.float32
    assert x.mean((0, 2)).tolist() == pytest.approx([3.0, -1.0], abs=0.05)
    assert x.std((0, 2)).tolist() == pytest.approx([STD, STD], abs=0.03)


def test_the_steps_of_flow_matching_are_equal():
    """A constant velocity takes one step, or any number of them, to the same place."""

    class Constant(Gaussian):
        def forward(self, x, t, y=None):
            times.append(t)
            return torch.full_like(x, 2.0)

    scheduler, ends = SCHEDULERS["flow"][0], []
    for steps in (1, 4):
        times = []
        rng = torch.Generator().manual_seed(0)
        ends.append(sample(Constant(None), scheduler, (1, 1, 3), steps=steps, generator=rng))
        assert times == pytest.approx([1000 * (1 - i / steps) for i in range(steps)])
    start = torch.randn(1, 1, 3, generator=torch.Generator().manual_seed(0))
    for end in ends:
        torch.testing.assert_close(end, start - 2)


class Labelled(Gaussian):
    """Velocity -y for class y, and 0 without one (class 9)."""

    num_classes = 9

    def forward(self, x, t, y=None):
        away = torch.where(y == 9, 0, -y).float()
        return away[:, None, None].expand_as(x)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_guidance_scales_what_a_class_changes(guidance):
    y = torch.tensor([1, 4])
    start = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(3))
    rng = torch.Generator().manual_seed(3)
    end = sample(Labelled(None), SCHEDULERS["flow"][0], (2, 1, 3), y, steps=5, guidance=guidance, generator=rng)
    torch.testing.assert_close(end, start + guidance * y[:, None, None])


def test_a_network_of_any_dtype_samples_on_any_grid_and_the_scheduler_stays():
    scheduler, steps = diffusers.DDIMScheduler(), []
    before, options = scheduler.timesteps.clone(), {"steps": 3, "guidance": 2.0, "on_step": lambda: steps.append(1)}
    for space, dtype in (((4, 4), torch.bfloat16), ((5, 7), torch.float64)):
        net = NDLightDiT(2, 1, 3, embed_dim=8, depth=1, tpe_states=4, dtype=dtype).eval()
        x = sample(net, scheduler, (2, 1, *space), torch.tensor([0, 2]), **options)
        assert x.shape == (2, 1, *space) and x.isfinite().all() and not x.requires_grad
        assert x.dtype == torch.float32
    assert len(steps) == 6 and torch.equal(scheduler.timesteps, before)


@pytest.mark.parametrize(
    "classes, options, message",
    [
        (None, {"guidance": 2.0}, r"guidance=2\.0 without classes: expected 1"),
        (torch.tensor([1]), {}, r"classes \(1,\): expected \(2,\)"),
        (torch.tensor([1, 4]), {}, r"classes \[1, 4\]: expected 0 to 3 \(no class\)"),
        (torch.tensor([-1, 0]), {}, r"classes \[-1, 0\]: expected 0 to 3 \(no class\)"),
        (None, {"steps": 0}, "steps=0: expected an int >= 1"),
    ],
)
def test_wrong_arguments(classes, options, message):
    net = NDLightDiT(1, 1, 3, embed_dim=8, depth=1, tpe_states=4)
    with pytest.raises(ValueError, match=message):
        sample(net, SCHEDULERS["flow"][0], (2, 1, 4), classes, **options)
    unconditional = NDLightDiT(1, 1, embed_dim=8, depth=1, tpe_states=4)
    with pytest.raises(ValueError, match="expected None, the network knows no classes"):
        sample(unconditional, SCHEDULERS["flow"][0], (1, 1, 4), torch.tensor([1]))
