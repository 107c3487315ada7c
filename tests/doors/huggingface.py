"""Doors to Hugging Face: transformers (attention, Trainer) and diffusers (attention, denoisers)."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ndlightnet.ops import lightnet_attention

from .door_models import WORDS, Case

STEPS = 2


# --------------------------------------------------------------------------------- transformers
def transformers(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if case.is_layer:
        attends_in_a_vit(case.make())
    elif case.mixer:
        mixes_in_a_vit(case.mixer)
    else:
        trains_with_the_trainer(case, tmp_path)


def tiny_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=20, patch_size=4, num_labels=3))


def attends_in_a_vit(ours: Any) -> None:
    """The layers of a ViT compute what MultiheadAttention of these weights reads."""
    import ndlightnet.integrations.transformers  # noqa: F401  registers it

    model = tiny_vit().eval()
    model.set_attn_implementation("lightnet")
    layer = model.vit.layers[0].attention
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer, name).load_state_dict(getattr(ours, name).state_dict())
    inputs: list[Tensor] = []
    layer.o_proj.register_forward_pre_hook(lambda m, i: inputs.append(i[0]))
    x = torch.randn(2, 26, 32)
    layer(x)
    torch.testing.assert_close(inputs[0], memory_read(ours, x, x))
    losses_fall(model)


def memory_read(ours: Any, x: Tensor, source: Tensor) -> Tensor:
    """What MultiheadAttention reads before its norm and gate."""

    def heads(linear: nn.Linear, x: Tensor) -> Tensor:
        return linear(x).unflatten(-1, (ours.num_heads, -1)).transpose(1, 2)

    k, v = heads(ours.k_proj, source), heads(ours.v_proj, source)
    return lightnet_attention(heads(ours.q_proj, x), k, v).transpose(1, 2).flatten(2)


def mixes_in_a_vit(mixer: Any) -> None:
    from ndlightnet.integrations import replace_attention

    model = tiny_vit().eval()
    assert len(replace_attention(model, mixer).replaced) == 2
    layer = model.vit.layers[1].attention
    assert isinstance(layer.mixer.mixer, mixer)
    computes_as_its_mixer(layer, lambda: model(pixel_values=torch.randn(2, 3, 20, 20)))
    losses_fall(model)


def computes_as_its_mixer(layer: Any, run: Callable[[], Any]) -> Any:
    """Return what the network returns, in which the layer is the mixer's own call."""
    calls: list[tuple[Tensor, Any]] = []
    layer.register_forward_hook(lambda m, i, out: calls.append((i[0], out)))
    result = run()
    ((x, y),) = calls
    torch.testing.assert_close(y[0] if isinstance(y, tuple) else y, layer.mixer.mixer(x))
    return result


def losses_fall(model: Any) -> None:
    model.train()
    images, labels = torch.randn(8, 3, 20, 20), torch.arange(8) % 3
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(3):
        loss = model(pixel_values=images, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def rows(case: Case, n: int = 8) -> list[dict[str, Tensor]]:
    """Made samples with a label for each sample, word or voxel."""
    (x,) = case.inputs(batch=n)
    if case.takes == "words":
        labels = torch.roll(x, -1, 1) % WORDS
    elif case.is_unet:
        labels = (x[:, 0] > 0).long()
    else:
        labels = (x.flatten(1).mean(1) > 0).long()
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]


def trains_with_the_trainer(case: Case, tmp_path: Path) -> None:
    """Two steps, a checkpoint after each, evaluation; resumed from the first one the second step
    is the same; the file of weights loads into a new network."""
    import transformers as hf
    from safetensors.torch import load_file

    from ndlightnet.integrations.transformers import ForTrainer

    logging.getLogger("transformers").setLevel(logging.ERROR)
    data = rows(case)

    def trained(folder: str, **options: Any) -> Any:
        hf.set_seed(1)
        quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
        steps = {"max_steps": STEPS, "save_steps": 1, "per_device_train_batch_size": 4}
        args = hf.TrainingArguments(str(tmp_path / folder), **steps, **quiet)
        net = ForTrainer(case.make())
        trainer = hf.Trainer(net, args, train_dataset=data, eval_dataset=data[:3])
        trainer.train(**options)
        return trainer

    trainer = trained("first")
    net = trainer.model.net.eval()
    again = trained("again", resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    for a, b in zip(net.parameters(), again.model.net.parameters(), strict=True):
        assert torch.equal(a, b)
    weights = load_file(tmp_path / "first" / f"checkpoint-{STEPS}" / "model.safetensors")
    fresh = case.make().eval()
    fresh.load_state_dict({k.removeprefix("net."): x for k, x in weights.items()})
    x = torch.stack([row["x"] for row in data[:3]])
    with torch.no_grad():
        expected = net(x)
        torch.testing.assert_close(fresh(x), expected)
    predicted = trainer.predict(data[:3])
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), expected)
    assert predicted.metrics["test_loss"] > 0


# ------------------------------------------------------------------------------------ diffusers
def diffusers(case: Case, tmp_path: Path) -> None:
    torch.manual_seed(0)
    if case.is_layer:
        attends_in_diffusers(case.make())
    elif case.mixer:
        mixes_in_a_dit(case.mixer)
    else:
        denoises(case)


def attends_in_diffusers(ours: Any) -> None:
    from diffusers.models.attention_processor import Attention

    from ndlightnet.integrations.diffusers import LightNetAttnProcessor

    layer = Attention(32, 32, heads=4, dim_head=8, bias=True, processor=LightNetAttnProcessor())
    for name in "qkv":
        getattr(layer, f"to_{name}").load_state_dict(getattr(ours, f"{name}_proj").state_dict())
    layer.to_out[0] = nn.Identity()
    x, source = torch.randn(2, 20, 32), torch.randn(2, 7, 32)
    torch.testing.assert_close(layer(x), memory_read(ours, x, x))
    torch.testing.assert_close(layer(x, source), memory_read(ours, x, source))


def mixes_in_a_dit(mixer: Any) -> None:
    from diffusers import DiTTransformer2DModel

    from ndlightnet.integrations import replace_attention

    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
    model = DiTTransformer2DModel(**sizes, sample_size=8, patch_size=2, num_embeds_ada_norm=10)
    assert len(replace_attention(model, mixer).replaced) == 2
    layer = model.transformer_blocks[1].attn1
    image, times, classes = torch.randn(2, 4, 8, 8), torch.tensor([1, 5]), torch.tensor([2, 3])
    y = computes_as_its_mixer(layer, lambda: model(image, timestep=times, class_labels=classes)).sample
    y.square().mean().backward()
    assert all(p.grad is not None for p in layer.parameters())


class Denoiser(nn.Module):
    """A U-Net without an input for the time: it gets the noise level as one more channel."""

    def __init__(self, net: nn.Module, steps: int) -> None:
        super().__init__()
        self.net, self.steps = net, steps

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        level = (when.float() / self.steps).reshape(-1, *[1] * (x.ndim - 1))
        return self.net(torch.cat([x, level.expand(x.shape[0], 1, *x.shape[2:])], 1))


def denoises(case: Case) -> None:
    """NDLightUNet under DDPMScheduler, 3 channels to 4: two of the sample and one of the time, to
    two of the noise and two of its variance; with diffusers' moving average of weights."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel

    steps = 5
    scheduler = DDPMScheduler(steps, variance_type="learned_range", clip_sample=False)
    model = Denoiser(case.make(), steps)
    average = EMAModel(model.parameters(), decay=0.5, min_decay=0.5)
    by_hand: list[Tensor] = []
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    clean = case.inputs(batch=4)[0][:, :2]
    for step in range(STEPS):
        when, noise = torch.randint(steps, (4,)), torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, when)
        loss = (model(noisy, when)[:, :2] - noise).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        average.step(model.parameters())
        now = [p.detach().clone() for p in model.parameters()]
        # EMAModel begins with the weights after the first step
        by_hand = [(a + p) / 2 for a, p in zip(by_hand, now, strict=True)] if step else now
    average.copy_to(model.parameters())
    torch.testing.assert_close([*model.parameters()], by_hand)

    def sample() -> Tensor:
        g = torch.Generator().manual_seed(1)
        x = torch.randn(clean.shape, generator=g)
        scheduler.set_timesteps(steps)
        for when in scheduler.timesteps:
            with torch.no_grad():
                out = model.eval()(x, when)
            x = scheduler.step(out, when, x, generator=g).prev_sample
        return x

    drawn = sample()
    assert drawn.shape == clean.shape and torch.isfinite(drawn).all()
    assert torch.equal(drawn, sample())
