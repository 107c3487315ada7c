"""replace_attention in networks of transformers and diffusers."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers")

from ndlightnet import mixers  # noqa: E402
from ndlightnet.integrations import replace_attention  # noqa: E402
from ndlightnet.integrations.diffusers import LightNetAttnProcessor  # noqa: E402

from .hugging_face import SIZES, bart, bert, clip, gpt_oss, llama, llama4, modernbert, padding, t5, videomae, vit, words  # noqa: E402
from .test_diffusers import flux, unet, unet_plain, wide  # noqa: E402

PIXELS = torch.randn(2, 3, 12, 12)
FILMS = torch.randn(2, 4, 3, 8, 8)


def other(kind: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SIZES, image_size=12, patch_size=4, **more)
    return getattr(transformers, f"{kind}Model")(config)


def swin() -> Any:
    sizes = {"image_size": 12, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
    return transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=3))


@pytest.mark.parametrize("mixer", [None, mixers.GLA, mixers.SoftmaxAttention])
@pytest.mark.parametrize(
    ("make", "inputs", "grid"),
    [
        (partial(other, "DeiT"), {"pixel_values": PIXELS}, "a grid (3, 3) behind 2 tokens"),
        (partial(other, "Beit"), {"pixel_values": PIXELS}, "a grid (3, 3) behind 1 token"),
        (partial(other, "CLIPVision"), {"pixel_values": PIXELS}, "a grid (3, 3) behind 1 token"),
        (partial(other, "Dinov2"), {"pixel_values": PIXELS}, "a set of tokens"),
        (vit, {"pixel_values": PIXELS}, "a grid (3, 3) behind 1 token"),
        (videomae, {"pixel_values": FILMS}, "a grid (2, 2, 2)"),
        (bert, {"input_ids": words()}, "the sequence of tokens"),
    ],
)
def test_encoders_get_mixers(make: Any, inputs: dict[str, Any], grid: str, mixer: Any) -> None:
    model = make()
    before = model(**inputs)[0]
    report = replace_attention(model, mixer)
    assert len(report.replaced) == 2 and not report.left
    if mixer is None:
        assert all(f"LightNetAttention on {grid}" in x for x in report.replaced.values())
    layers = [x for x in model.modules() if type(x).__name__ == "EncoderMixer"]
    heard: list[tuple[Tensor, Tensor]] = []

    def hear(_: Any, inputs: Any, options: Any, out: Any) -> None:
        heard.append((inputs[0] if inputs else options["hidden_states"], out[0]))

    for layer in layers:
        layer.register_forward_hook(hear, with_kwargs=True)
    after = model.eval()(**inputs)[0]
    assert after.shape == before.shape and not torch.allclose(after, before)
    for layer, (x, y) in zip(layers, heard, strict=True):
        torch.testing.assert_close(y, layer.mixer(x))
    after.square().sum().backward()
    assert all(x.grad is not None for layer in layers for x in layer.parameters())


@pytest.mark.parametrize(
    ("make", "implementation"), [(bert, "sdpa"), (bert, "eager"), (bert, "lightnet"), (modernbert, "lightnet")]
)
def test_padding_is_hidden(make: Any, implementation: str) -> None:
    """From the mixers of BERT, and by the window both ways of ModernBERT."""
    model = make().eval()
    replace_attention(model)
    model.set_attn_implementation(implementation)
    ids, mask = words(), padding(False)
    padded = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(padded[1:, :7], model(input_ids=ids[1:, :7]).logits)
    triangle = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention_mask \(2, 1, 9, 9\)"):
        model(input_ids=ids, attention_mask=triangle)


def test_weights_are_the_start_where_shapes_agree() -> None:
    model = vit()
    old = model.vit.layers[0].attention
    report = replace_attention(model, start="weights")
    new = model.vit.layers[0].attention.mixer.mixer
    assert all(x.endswith("starting from q, k, v, o") for x in report.replaced.values())
    for part in "qkvo":
        a, b = (getattr(x, f"{part}_proj").weight for x in (old, new))
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "reason"), [(llama, "as it takes"), (clip, "as it is causal"), (modernbert, "as it takes")]
)
def test_layers_with_a_cache_or_a_causal_mask_get_the_implementation(make: Any, reason: str) -> None:
    model, same = make().eval(), make().eval()
    same.load_state_dict(model.state_dict())
    report = str(replace_attention(model))
    assert "attention implementation 'lightnet'" in report and reason in report
    same.set_attn_implementation("lightnet")
    inputs = {"input_ids": words(), "attention_mask": padding(False)}
    assert torch.equal(model(**inputs)[0], same(**inputs)[0])


def test_a_model_with_caches_generates_and_is_switched_as_one() -> None:
    model = llama().eval()
    replace_attention(model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(words(), **options, use_cache=False)
    assert torch.equal(model.generate(words(), **options), plain)
    with pytest.raises(ValueError, match=r"where=.*layers that are switched with all others"):
        replace_attention(llama(), where="*layers.0.*")
    assert len(replace_attention(bart()).replaced) == 6


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("GPT2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, "attention implementation"),
        ("DistilBert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 40}, "LightNetAttention on the sequence"),
    ],
)
def test_projections_of_other_names(kind: str, sizes: dict[str, int], expected: str) -> None:
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes, **tokens))
    report = replace_attention(model)
    assert len(report.replaced) == 2 and not report.left and expected in str(report)
    assert torch.isfinite(model(input_ids=words(), attention_mask=padding(False))[0]).all()


@pytest.mark.parametrize(
    ("make", "mixer", "reason"),
    [
        (llama, mixers.GLA, "it takes (past_key_values|cache), position_embeddings, and a mixer"),
        (bart, mixers.GLA, "it takes key_value_states, and a mixer has no such thing"),
        (clip, "GLA", "it is causal, and a mixer has no such thing"),
        (swin, None, "it has a bias on its scores, which LightNet attention cannot have"),
        (partial(other, "Beit", use_relative_position_bias=True), mixers.GLA, "a bias on its scores"),
        (t5, None, "it has a bias on its scores, which LightNet attention cannot have"),
        (llama4, None, "it has attention in chunks, or other layers of its model have it, which Light"),
        (gpt_oss, None, "it has sinks, which LightNet attention cannot have"),
        (flux, mixers.GLA, "a processor of its own computes queries and keys"),
        (unet_plain, mixers.GLA, "it has group_norm"),
    ],
)
def test_what_cannot_be_replaced_is_named(make: Any, mixer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace_attention(make(), mixer)


def test_prefixes_and_second_calls_that_change_nothing_are_named() -> None:
    with pytest.raises(ValueError, match=r"its network has a grid \(3, 3\) and prefix 1, and grid=None, prefix=2"):
        replace_attention(vit(), prefix=2)
    with pytest.raises(ValueError, match=r"its network has a grid \(9, 1\) and prefix 1, and grid=\(9, 1\), prefix=2"):
        replace_attention(vit(), grid=(9, 1), prefix=2)
    for options in ({"grid": (9, 1)}, {"grid": (9, 1), "prefix": 1}):
        assert "a grid (9, 1) behind 1 token" in str(replace_attention(vit(), **options))
    for model, again in ((vit(), None), (unet(), None), (unet(), mixers.GLA)):
        replace_attention(model)
        with pytest.raises(ValueError, match=r"found nothing to replace in .*it has ndlightnet's attention already$"):
            replace_attention(model, again)


@pytest.mark.parametrize("mixer", [None, mixers.LightNetAttention, mixers.Mamba])
def test_siglip2_pools_without_padding(mixer: Any) -> None:
    """Its head is torch's layer: one learned query, and a mask repeated for all heads."""
    config = transformers.Siglip2VisionConfig(**SIZES, num_patches=16, patch_size=4)
    model = transformers.Siglip2VisionModel(config).eval()
    report = replace_attention(model, mixer)
    assert ("head.attention" in report.left) is (mixer is mixers.Mamba)
    patches, shapes = torch.randn(2, 6, 48), torch.tensor([[2, 3], [2, 2]])
    masks = {"pixel_attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}
    padded = model(pixel_values=patches, spatial_shapes=shapes, **masks).pooler_output
    masks = {"pixel_attention_mask": torch.ones(1, 4, dtype=torch.long)}
    alone = model(pixel_values=patches[1:, :4], spatial_shapes=shapes[1:], **masks).pooler_output
    torch.testing.assert_close(padded[1:], alone)


def test_one_part_of_clip() -> None:
    """The texts' layers are switched together, and those of the images are none of them."""
    text = {**SIZES, "vocab_size": 50, "max_position_embeddings": 64}
    config = transformers.CLIPConfig(
        text_config={**text, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**SIZES, "image_size": 12, "patch_size": 4},
        projection_dim=16,
    )
    for where, expected in (("text_model*", "as it is causal"), ("vision_model*", "a grid (3, 3)")):
        model = transformers.CLIPModel(config).eval()
        before = model(input_ids=words(), pixel_values=PIXELS)
        report = replace_attention(model, where=where)
        assert len(report.replaced) == len(report.left) == 2
        assert all(expected in what for what in report.replaced.values())
        after = model(input_ids=words(), pixel_values=PIXELS)
        for part in ("text", "vision"):
            same = (x[f"{part}_model_output"].last_hidden_state for x in (before, after))
            assert torch.equal(*same) is not where.startswith(part)
    with pytest.raises(ValueError, match=r"it leaves text_model.encoder.layers.1.self_attn$"):
        replace_attention(transformers.CLIPModel(config), where="text_model.encoder.layers.0.*")


def lora(model: Any, *targets: str) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=[*targets], r=2))


@pytest.mark.parametrize(("make", "targets"), [(bert, ["query", "value"]), (llama, ["q_proj"])])
def test_layers_with_parts_of_peft_keep_them(make: Any, targets: list[str]) -> None:
    model = lora(make(), *targets)
    report = str(replace_attention(model))
    assert f"attention implementation 'lightnet' of its model, {KEEPS}{', '.join(targets)}" in report
    model(input_ids=words(), labels=words()).loss.backward()
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)


KEEPS = "with its weights, without norm and gate, as peft wraps its "
ENCODER = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)


@pytest.mark.parametrize("start", ["fresh", "weights"])
@pytest.mark.parametrize(
    ("make", "mixer", "targets", "reason"),
    [
        (bert, mixers.LightNetAttention, ["query", "key"], "peft wraps its query, key: expected repl"),
        (partial(nn.TransformerEncoder, ENCODER, 1), None, ["self_attn"], "peft's, around a layer: e"),
        (unet, mixers.LightNetAttention, ["to_q"], "peft wraps its to_q: expected replace_attention"),
    ],
)
def test_parts_of_peft_are_not_dropped(make: Any, mixer: Any, targets: list[str], reason: str, start: Any) -> None:
    with pytest.raises(ValueError, match=reason):
        replace_attention(lora(make(), *targets), mixer, start=start)


def test_unet_gets_processors_or_mixers() -> None:
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 5, 12)
    model, same = wide(unet()).float(), wide(unet()).float()
    report = replace_attention(model)
    assert len(report.replaced) == 8 and not report.left
    same.set_attn_processor(LightNetAttnProcessor())
    assert torch.equal(model(*inputs).sample, same(*inputs).sample)
    assert [*model.state_dict()] == [*same.state_dict()]
    report = replace_attention(wide(unet()).float(), mixers.GLA)
    assert len(report.replaced) == len(report.left) == 4
    assert all("it reads another source" in x for x in report.left.values())


def test_mixers_in_a_unet_see_no_padding() -> None:
    from ndlightnet.integrations.tokens import HiddenStatesMixer

    model = unet()
    replace_attention(model, mixers.GLA)
    layer = next(x for x in model.modules() if isinstance(x, HiddenStatesMixer))
    x = torch.randn(2, 9, 16)
    bias = torch.zeros(2, 1, 9)
    bias[:, :, 6:] = -10000
    torch.testing.assert_close(layer(x, attention_mask=bias)[:, :6], layer(x[:, :6]))
    with pytest.raises(ValueError, match="encoder_hidden_states: a mixer takes hidden states"):
        layer(x, encoder_hidden_states=x)
    with pytest.raises(ValueError, match="encoder_hidden_states: a mixer takes hidden states"):
        layer(x, x)  # as diffusers' image projections call it


def test_one_layer_of_flux() -> None:
    model = flux()
    old = model.transformer_blocks[0].attn.processor  # which other layers may share
    report = replace_attention(model, where="transformer_blocks.*")
    assert [*report.replaced] == ["transformer_blocks.0.attn"]
    backends = [x.processor._attention_backend for x in model.modules() if hasattr(x, "processor")]
    assert backends == ["lightnet", None] and old._attention_backend is None
    assert isinstance(model.transformer_blocks[0].attn, nn.Module)
