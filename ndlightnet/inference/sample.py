"""Samples of a diffusion network: from noise, step by step, by a scheduler of diffusers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ndlightnet.layout.abstract import check_integers


@torch.no_grad()
def sample(
    network: Any,
    scheduler: Any,
    shape: Sequence[int],
    classes: Tensor | None = None,
    *,
    steps: int = 50,
    guidance: float = 1.0,
    generator: torch.Generator | None = None,
    on_step: Callable[[], object] | None = None,
) -> Tensor:
    """Return samples (batch, channels, *space), float32, on the device of the network.

    network: an NDLightDiT in eval mode, or what is called like one: network(x, t, y). scheduler: of diffusers, with the
    prediction that the network was trained for (flow matching, or its prediction_type): another one gives no error, and
    no samples worth seeing; it is copied, not changed. Samples are normalised as the training data were. shape: of the
    samples, on a grid of any size. classes: int64 (batch,); None: no class. guidance: the output is that without a
    class plus `guidance` times what the class changes (classifier-free guidance); 1: that of the class alone.
    generator: for samples that can be repeated; its device is the network's or the CPU. on_step: called after every
    step.

    Raises ValueError for classes of another shape, outside 0 to network.num_classes (no class) or
    of a network that knows none, for guidance other than 1 without classes, and for steps below 1.
    """
    check_integers(1, steps=steps)
    shape, num_classes = tuple(shape), getattr(network, "num_classes", None)
    if classes is not None and (num_classes == 0 or tuple(classes.shape) != shape[:1]):
        expected = "None, the network knows no classes" if num_classes == 0 else f"({shape[0]},)"
        raise ValueError(f"classes {tuple(classes.shape)}: expected {expected}")
    if classes is not None and num_classes and not ((classes >= 0) & (classes <= num_classes)).all():
        raise ValueError(f"classes {classes.tolist()}: expected 0 to {num_classes} (no class)")
    if guidance != 1 and (classes is None or num_classes is None):
        raise ValueError(f"guidance={guidance} without classes: expected 1")
    weight = next(network.parameters())
    device = weight.device
    place = device if generator is None else generator.device
    scheduler = type(scheduler).from_config(scheduler.config)
    takes = signature(scheduler.set_timesteps).parameters
    if hasattr(scheduler, "scale_noise") and "sigmas" in takes:
        # flow matching: the last step is as long as the others
        scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    else:
        scheduler.set_timesteps(steps)
    draws = {"generator": generator} if "generator" in signature(scheduler.step).parameters else {}
    x = torch.randn(shape, generator=generator, device=place).to(device)
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)
    y = None if classes is None else classes.to(device)
    if guidance != 1 and y is not None:
        y = torch.cat([torch.full_like(y, num_classes or 0), y])
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        scaled = scaled.to(weight.dtype)
        if guidance == 1:
            out = network(scaled, float(t), y).float()
        else:
            without, of_class = network(torch.cat([scaled] * 2), float(t), y).float().chunk(2)
            out = without + guidance * (of_class - without)
        x = scheduler.step(out, t, x, **draws, return_dict=False)[0]
        if on_step is not None:
            on_step()
    return x
