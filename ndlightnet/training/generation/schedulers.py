"""Schedulers of diffusers by name, and what a network is trained to predict with them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.data.errors import DataError, one_line
from ndlightnet.inference import sample
from ndlightnet.layout.spelling import did_you_mean

PREDICTIONS = ("epsilon", "sample", "v_prediction")  # prediction_type, as diffusers names them


def build_scheduler(scheduler: str | dict[str, Any]) -> Any:
    """Return a scheduler of diffusers by its name, or {name: arguments}.

    Samples are not clipped unless the arguments say so: inputs have mean 0 and variance 1, where
    diffusers expects them from -1 to 1. DataError for what is no scheduler to train with.
    """
    import diffusers  # nothing else of ndlightnet.training needs it

    entry = {scheduler: {}} if isinstance(scheduler, str) else scheduler
    if len(entry) != 1:
        raise DataError(f"model.scheduler={scheduler}: expected a name, or {{name: arguments}}")
    ((name, arguments),) = entry.items()
    kind = getattr(diffusers, name, None)
    parameters = signature(kind).parameters if isinstance(kind, type) else {}
    try:
        trains = hasattr(kind, "scale_noise") or ("beta_schedule" in parameters and hasattr(kind, "add_noise"))
    except ImportError as error:  # of a package that this scheduler needs
        raise DataError(f"model.scheduler={name}: {one_line(error)}") from error
    if not (trains and "num_train_timesteps" in parameters):
        others = [one for one in dir(diffusers) if one.endswith("Scheduler") and one != name]
        near = did_you_mean(name, others, "") or did_you_mean(f"{name}Scheduler", others, "")
        near = near or "FlowMatchEulerDiscreteScheduler"
        raise DataError(f"model.scheduler={name}: expected one of diffusers, such as {near}")
    assert kind is not None
    if wrong := [key for key in arguments or {} if key not in parameters]:
        raise DataError(f"model.scheduler: {name} has no {wrong[0]}{did_you_mean(wrong[0], parameters)}")
    usual = {"clip_sample": False} if "clip_sample" in parameters else {}
    try:
        built = kind(**usual | (arguments or {}))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise DataError(f"model.scheduler: {name}: {one_line(error)}") from error
    if not is_flow(built) and prediction(built) not in PREDICTIONS:
        raise DataError(
            f"model.scheduler: {name}: prediction_type={prediction(built)}, expected one of {', '.join(PREDICTIONS)}"
        )
    return built


class _Still(nn.Module):
    """Predicts zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, t: float, y: Tensor | None = None) -> Tensor:
        return self.weight * x


def check_sampling(scheduler: Any, steps: int) -> None:
    """Raise DataError if a scheduler cannot sample in so many steps, before a training that would end with it."""
    try:
        sample(_Still(), scheduler, (1, 1, 1), steps=steps, generator=torch.Generator())
    except Exception as error:  # its class depends on the scheduler
        name = type(scheduler).__name__
        raise DataError(f"model.scheduler: {name} cannot sample in {steps} steps ({one_line(error)})") from error


def is_flow(scheduler: Any) -> bool:
    """Return whether a scheduler is of flow matching, whose networks predict a velocity."""
    return hasattr(scheduler, "scale_noise")


def prediction(scheduler: Any) -> str:
    """Return what networks predict with a scheduler: "flow", or its prediction_type."""
    return "flow" if is_flow(scheduler) else scheduler.config.get("prediction_type", "epsilon")


def noised(scheduler: Any, x: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy samples of x (batch, channels, *space), their times (batch,), and what a network should predict from
    them, of the shape of x. With flow matching times are logit-normal, which favours the middle (arXiv 2403.03206),
    else uniform. generator: for draws that can be repeated, on x's device."""
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
    flow, count = is_flow(scheduler), scheduler.config.num_train_timesteps
    if flow:
        place = torch.randn(len(x), generator=generator, device=x.device).sigmoid()
    else:
        place = torch.rand(len(x), generator=generator, device=x.device)
    index = (place * count).long().clamp(max=count - 1)
    each = (len(x), *[1] * (x.ndim - 1))
    # not scheduler.scale_noise, which waits for the device once for each sample, nor
    # scheduler.add_noise: before set_timesteps that of DPMSolverMultistepScheduler and others has
    # its noise in reverse order, and that of EulerDiscreteScheduler is scaled later
    if flow:
        scheduler.sigmas = scheduler.sigmas.to(x.device)
        sigma = scheduler.sigmas[index]
        mixed = sigma.view(each)
        return mixed * noise + (1 - mixed) * x, sigma * count, noise - x
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(x.device)
    signal_share = scheduler.alphas_cumprod[index].view(each)
    signal, level = signal_share.sqrt(), (1 - signal_share).sqrt()
    predictions = (noise, x, signal * noise - level * x)
    target = predictions[PREDICTIONS.index(prediction(scheduler))]
    return signal * x + level * noise, index.float(), target
