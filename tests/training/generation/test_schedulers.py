"""Noise and targets are those of diffusers' schedulers."""

import pytest
import torch

from ndlightnet.data.errors import DataError

pytest.importorskip("diffusers")

from ndlightnet.training.generation.schedulers import build_scheduler, check_sampling, noised


def test_flow_matching_is_a_straight_path_with_diffusers_noise():
    scheduler, x = build_scheduler("FlowMatchEulerDiscreteScheduler"), torch.randn(6, 2, 4, 3)
    noisy, t, velocity = noised(scheduler, x)
    noise = velocity + x
    torch.testing.assert_close(scheduler.scale_noise(x, t, noise), noisy)
    share = (t / 1000).view(-1, 1, 1, 1)
    torch.testing.assert_close(noisy - share * velocity, x)  # back along the path


@pytest.mark.parametrize("kind", ["epsilon", "sample", "v_prediction"])
def test_noise_prediction_is_diffusers(kind):
    scheduler = build_scheduler({"DDPMScheduler": {"prediction_type": kind}})
    assert scheduler.config.clip_sample is False
    x = torch.randn(6, 2, 5)
    noisy, t, target = noised(scheduler, x)
    alphas = scheduler.alphas_cumprod[t.long()].view(-1, 1, 1)
    noise = (noisy - alphas.sqrt() * x) / (1 - alphas).sqrt()
    velocity = alphas.sqrt() * noise - (1 - alphas).sqrt() * x
    expected = {"epsilon": noise, "sample": x, "v_prediction": velocity}[kind]
    torch.testing.assert_close(target, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "EulerDiscreteScheduler", "UniPCMultistepScheduler"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
def test_all_schedulers_of_noise_prediction_train_as_ddpm_does(name, kind):
    """Their own add_noise is for pictures to be changed, after set_timesteps."""
    x = torch.randn(6, 2, 5)
    scheduler, ddpm = (build_scheduler({one: {"prediction_type": kind}}) for one in (name, "DDPMScheduler"))
    noisy, t, target = noised(scheduler, x, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(noisy, ddpm.add_noise(x, noise, t.long()))
    torch.testing.assert_close(target, noise if kind == "epsilon" else ddpm.get_velocity(x, noise, t.long()))


@pytest.mark.parametrize(
    "scheduler, steps",
    [
        ({"FlowMatchEulerDiscreteScheduler": {"use_dynamic_shifting": True}}, 2),
        ("CogVideoXDPMScheduler", 2),
        ("DDPMScheduler", 2000),
    ],
)
def test_schedulers_that_cannot_sample_are_refused_before_a_training(scheduler, steps):
    with pytest.raises(DataError, match=rf"Scheduler cannot sample in {steps} steps \(.+\)$"):
        check_sampling(build_scheduler(scheduler), steps)


def test_a_trial_of_sampling_draws_no_random_number():
    state = torch.get_rng_state()
    for name in ("FlowMatchEulerDiscreteScheduler", "DDPMScheduler", "EulerDiscreteScheduler"):
        check_sampling(build_scheduler(name), 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_densities_of_time():
    """Logit-normal with flow matching, else uniform."""
    for name, deviation in (("FlowMatchEulerDiscreteScheduler", 0.208), ("DDIMScheduler", 12**-0.5)):
        t = noised(build_scheduler(name), torch.zeros(20_000, 1, 1))[1] / 1000
        assert t.min() >= 0 and t.max() <= 1
        assert float(t.std()) == pytest.approx(deviation, abs=0.01)


def test_draws_repeat_with_a_generator():
    scheduler, x = build_scheduler("FlowMatchEulerDiscreteScheduler"), torch.randn(3, 1, 4)
    first, again = (noised(scheduler, x, generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(
    "scheduler, message",
    [
        ("DDIMSchedular", r"model\.scheduler=DDIMSchedular: .* such as DDIMScheduler"),
        ("EDMEulerScheduler", r"model\.scheduler=EDMEulerScheduler: expected one of diffusers"),
        (
            {"DPMSolverMultistepScheduler": {"prediction_type": "flow_prediction"}},
            "prediction_type=flow_prediction, expected one of epsilon, sample, v_prediction",
        ),
        ("AutoencoderKL", r"model\.scheduler=AutoencoderKL: expected one of diffusers"),
        ({"DDIMScheduler": {"beta_stat": 1}}, "has no beta_stat; did you mean beta_st"),
        ({"DDIMScheduler": {}, "DDPMScheduler": {}}, "expected a name, or {name: arguments}"),
        ({"DDIMScheduler": {"beta_schedule": "x"}}, r"model\.scheduler: DDIMScheduler: .*x"),
    ],
)
def test_wrong_schedulers(scheduler, message):
    with pytest.raises(DataError, match=message):
        build_scheduler(scheduler)
