"""LightNet in diffusers, as a processor and as a backend: equality with the formula by hand in place of torch's
attention; masks; what is refused; files."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch  # noqa: E402
from diffusers.models.attention_processor import Attention, AttnProcessor2_0  # noqa: E402

from ndlightnet.integrations import replace_attention  # noqa: E402
from ndlightnet.integrations.diffusers import LightNetAttnProcessor, attend, backend  # noqa: E402
from ndlightnet.integrations.tokens import padding  # noqa: E402


def formula(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    """y[t] = SiLU(q[t]) . softmax of k over the source, channel by channel, . v"""
    logits = key if attn_mask is None else key + attn_mask[..., 0, :, None]
    groups = query.shape[1] // key.shape[1]
    memory = torch.einsum("bhsc,bhsd->bhcd", logits.softmax(-2), value)
    memory = memory.repeat_interleave(groups, 1)
    return torch.einsum("bhtc,bhcd->bhtd", nn.functional.silu(query), memory)


UNET: dict[str, Any] = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
UNET |= {"layers_per_block": 1, "attention_head_dim": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 8}


def blocks(kind: str) -> dict[str, tuple[str, str]]:
    return {
        "down_block_types": ("DownBlock2D", f"{kind}DownBlock2D"),
        "up_block_types": (f"{kind}UpBlock2D", "UpBlock2D"),
    }


def unet() -> Any:
    sizes = {"cross_attention_dim": 12, "transformer_layers_per_block": 1}
    return diffusers.UNet2DConditionModel(**UNET, **blocks("CrossAttn"), **sizes)


def unet_plain() -> Any:
    """Its layers are called with images, with group norm and residual."""
    return diffusers.UNet2DModel(**UNET, **blocks("Attn"))


def dit() -> Any:
    sizes = {"in_channels": 4, "num_layers": 2, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10}
    return diffusers.DiTTransformer2DModel(**HEADS, **sizes)


def transformer() -> Any:
    sizes = {"in_channels": 16, "norm_num_groups": 4, "num_layers": 2, "cross_attention_dim": 12}
    return diffusers.Transformer2DModel(**HEADS, **sizes)


def flux() -> Any:
    sizes = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": 8}
    heads = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 12, "axes_dims_rope": (4, 4, 8)}
    return diffusers.FluxTransformer2DModel(**sizes, **heads)


def wide(model: Any) -> Any:
    """Initialise all weights widely, so that softmax and SiLU are far from linear."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


TEXT = torch.randn(2, 5, 12).double()
SEEN = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
STEP = torch.tensor([3, 7])
PADDED = {"encoder_hidden_states": TEXT, "encoder_attention_mask": SEEN}
PLACES = torch.cat([torch.zeros(16, 1), torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0))], 1)
FLUX = {"pooled_projections": torch.randn(2, 8), "img_ids": PLACES, "txt_ids": torch.zeros(5, 3)}
FLUX |= {"encoder_hidden_states": TEXT, "timestep": torch.tensor([0.3, 0.7])}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "UNet": (unet, {"sample": torch.randn(2, 4, 8, 8), "timestep": STEP, "encoder_hidden_states": TEXT}),
    "UNet, padding": (unet, {"sample": torch.randn(2, 4, 8, 8), "timestep": STEP, **PADDED}),
    "UNet without text": (unet_plain, {"sample": torch.randn(2, 3, 8, 8), "timestep": STEP}),
    "DiT": (dit, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": STEP, "class_labels": torch.tensor([1, 2])}),
    "Transformer2D, padding": (transformer, {"hidden_states": torch.randn(2, 16, 4, 4), **PADDED}),
    "Flux": (flux, {"hidden_states": torch.randn(2, 16, 4), **FLUX}),
}


def doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}


def select(layer: Any, lightnet: bool) -> None:
    """Diffusers' older layers take a processor, its newer ones a backend."""
    if isinstance(layer, Attention):
        layer.set_processor(LightNetAttnProcessor() if lightnet else AttnProcessor2_0())
    else:
        layer.set_attention_backend("lightnet" if lightnet else "native")


@pytest.mark.parametrize("name", CASES)
def test_processor_and_backend_equal_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float64; the network is the same but for torch's attention, which the formula replaces.
    1e-9 is 10^6 roundings; a bias of -10000 hides a key in both, exactly."""
    make, inputs = CASES[name]
    model = wide(make())
    layers = [m for m in model.modules() if isinstance(m, Attention) or type(m).__name__ == "FluxAttention"]
    each: list[Any] = []
    for layer in layers:
        layer.register_forward_hook(lambda m, i, out: each.append(out))

    def run(lightnet: bool) -> Any:
        each.clear()
        for layer in layers:
            select(layer, lightnet)
        with torch.no_grad():
            return model(**doubled(inputs)).sample, list(each)

    softmax = run(lightnet=False)[0]
    actual, outputs = run(lightnet=True)
    assert not torch.allclose(actual, softmax)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", formula)
    expected, expected_outputs = run(lightnet=False)
    assert len(outputs) == len(layers) >= 2
    torch.testing.assert_close(outputs, expected_outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_gradients_and_grouped_heads() -> None:
    layer = Attention(12, heads=4, kv_heads=2, dim_head=6, processor=LightNetAttnProcessor())
    layer(torch.randn(2, 7, 12)).square().sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in layer.parameters())
    q, k, v = torch.randn(2, 7, 4, 6), torch.randn(2, 5, 2, 6), torch.randn(2, 5, 2, 3)
    expected = formula(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(attend(q, k, v, None), expected)


def call(mask: Tensor | None = None, **options: Any) -> Tensor:
    layer = Attention(12, heads=2, dim_head=6, processor=LightNetAttnProcessor(), **options)
    return layer(torch.randn(2, 7, 12), attention_mask=mask)


def test_refuses_by_name_what_it_cannot_express() -> None:
    one_memory = r"attention_mask \(.*: LightNet has one memory"
    for message, options in (
        (one_memory, {"mask": -1e4 * torch.ones(2, 7, 7).triu(1)}),
        (one_memory, {"mask": torch.zeros(2, 1, 5)}),
        (one_memory, {"mask": torch.zeros(4, 1, 7)}),
        ("expected 0, or -10000 and less for padding", {"mask": torch.full((2, 1, 7), -1.5)}),
        ("joins two streams", {"added_kv_proj_dim": 8, "context_pre_only": False}),
        ("the layer is causal", {"is_causal": True}),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)


def test_masks_repeated_for_heads_are_padding() -> None:
    """The second axis of four is that of the heads, also where there are as many samples."""
    q, k = torch.randn(2, 3, 2, 6), torch.randn(2, 4, 2, 6)
    same = torch.tensor([1, 1, 1, 0]).bool()
    each = torch.stack([same, ~same])
    expected = attend(q, k, k, same.expand(2, -1))
    for mask in (same.expand(1, 2, 1, 4), same.expand(2, 2, 1, 4), same.expand(1, 1, 1, 4)):
        assert torch.equal(backend(q, k, k, attn_mask=mask), expected)
    bias = torch.where(each, 0.0, -10000.0)[:, None, None].expand(2, 2, 1, 4)
    assert torch.equal(backend(q, k, k, attn_mask=bias), attend(q, k, k, each))
    for mask in (each[None, :, None], each[None, :, None].expand(2, 2, 1, 4)):
        with pytest.raises(ValueError, match=r"attn_mask \(., 2, 1, 4\): LightNet has one memory"):
            backend(q, k, k, attn_mask=mask)
    with pytest.raises(ValueError, match=r"attn_mask \(2, 1, 4, 4\): LightNet has one memory"):
        causal = torch.ones(2, 1, 4, 4).tril().bool()
        attention_dispatch.dispatch_attention_fn(k, k, k, attn_mask=causal, backend="lightnet")
    with pytest.raises(ValueError, match=r"\(2, 3, 1, 4\): LightNet has one memory.*, of \(2, 4\) keys$"):
        padding(same.expand(2, 3, 1, 4), 2, 4, heads=2)


def test_ltx_video_hides_padding() -> None:
    sizes = {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 16, "num_layers": 1, "caption_channels": 12}
    model = diffusers.LTXVideoTransformer3DModel(**HEADS, **sizes)
    assert len(replace_attention(wide(model)).replaced) == 2
    video, text = torch.randn(2, 8, 4).double(), TEXT.clone()
    sizes = {"num_frames": 2, "height": 2, "width": 2}
    expected = model(video, text, STEP, SEEN, **sizes).sample
    assert not torch.equal(model(video, text, STEP, None, **sizes).sample, expected)
    text[1, 3:] = 9
    assert torch.equal(model(video, text, STEP, SEEN, **sizes).sample, expected)


def test_the_whole_model_takes_the_backend() -> None:
    model = flux()
    active = attention_dispatch._AttentionBackendRegistry._active_backend
    assert active != "lightnet"  # which an import only adds
    try:
        model.set_attention_backend("lightnet")
        assert {p._attention_backend for p in model.attn_processors.values()} == {"lightnet"}
    finally:  # diffusers selects it for the whole process
        attention_dispatch._AttentionBackendRegistry.set_active_backend(active)


def test_files_keep_the_model_and_not_the_processor(tmp_path: Any) -> None:
    model = wide(unet()).float()
    model.set_attn_processor(LightNetAttnProcessor())
    model.save_pretrained(tmp_path)
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).eval()
    inputs = torch.randn(2, 4, 8, 8), STEP, TEXT.float()
    assert not torch.allclose(again(*inputs).sample, model(*inputs).sample)
    again.set_attn_processor(LightNetAttnProcessor())
    torch.testing.assert_close(again(*inputs).sample, model(*inputs).sample)
