"""The attention implementation "lightnet" of transformers: equality with the formula by hand, with
masks made by transformers itself; caches; what is refused; training and files."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

from ndlightnet.integrations import transformers as ours  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
WORDS = {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**SIZES, **WORDS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
BART = {
    **WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip


def formula(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    is_causal: bool | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """y[t] = SiLU(q[t]) . softmax of k over the tokens that t sees, channel by channel, . v"""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    q, n = nn.functional.silu(query.double()), key.shape[2]
    seen = torch.ones(query.shape[2], n, dtype=torch.bool)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and query.shape[2] > 1:
            seen = seen.tril()
    else:
        seen = attention_mask
    logits = key[:, :, None].masked_fill(~seen[..., None], -torch.inf)
    weights = logits.softmax(-2).nan_to_num(0)  # of no tokens: 0
    y = torch.einsum("bhtc,bhtsc,bhsd->bthd", q, weights, value)
    return y.to(query.dtype), None


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, written out where it depends on the query."""
    return masking_utils.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", whole_mask)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def videomae() -> nn.Module:
    sizes = {"image_size": 8, "patch_size": 4, "num_frames": 4, "num_labels": 3}
    return transformers.VideoMAEForVideoClassification(
        transformers.VideoMAEConfig(**SIZES, **sizes)
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **WORDS))


def llama(**more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **more))


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4))


def bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))


def clip() -> nn.Module:
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**SIZES, **WORDS, eos_token_id=2))


def modernbert(window: int = 4) -> Any:
    sizes = {**SIZES, **WORDS, "local_attention": window, "cls_token_id": 1, "sep_token_id": 2}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "global_attn_every_n_layers": 2}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))


def prepare(model: Any, name: str = "lightnet") -> Any:
    """Initialise all weights widely, so that softmax and SiLU are far from linear."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation(name)
    return model.double().eval()


def words(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(left: bool, length: int = 9) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, : 3 if left else None] = 0 if left else 1
    mask[1, -2:] = 1 if left else 0
    return mask


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ViT": (vit, {"pixel_values": torch.randn(2, 3, 12, 12)}),
    "VideoMAE": (videomae, {"pixel_values": torch.randn(2, 4, 3, 8, 8)}),
    "BERT": (bert, {"input_ids": words()}),
    "BERT, padding": (bert, {"input_ids": words(), "attention_mask": padding(False)}),
    "Llama": (llama, {"input_ids": words()}),
    "Llama, right padding": (llama, {"input_ids": words(), "attention_mask": padding(False)}),
    "Llama, left padding": (llama, {"input_ids": words(), "attention_mask": padding(True)}),
    "Mistral, window": (mistral, {"input_ids": words()}),
    "Mistral, window, padding": (mistral, {"input_ids": words(), "attention_mask": padding(True)}),
    "BART": (bart, {"input_ids": words(2, 7), "decoder_input_ids": words()}),
    "BART, padding": (bart, {"input_ids": words(), "decoder_input_ids": words(2, 5),
                             "attention_mask": padding(False)}),
    "ModernBERT, window": (modernbert, {"input_ids": words()}),
    "ModernBERT, window, padding": (modernbert, {"input_ids": words(),
                                                 "attention_mask": padding(False)}),
    "ModernBERT, longer window": (partial(modernbert, 32), {"input_ids": words()}),
    "CLIP text, padding": (clip, {"input_ids": words(), "attention_mask": padding(False)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str) -> None:
    """float64: both forms add at most 9 terms of order 1 in another order, through 2 layers and
    their norms: 1e-9 is 10^6 roundings."""
    make, inputs = CASES[name]
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    model = prepare(make())
    layers: list[Tensor] = []

    def run(implementation: str) -> Any:
        layers.clear()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(**inputs)[0], [x.clone() for x in layers]

    for part in model.modules():
        if hasattr(part, "is_causal") and any(True for _ in part.children()):
            part.register_forward_hook(lambda m, i, out: layers.append(out[0]))
    got, each = run("lightnet")
    expected, each_expected = run("formula")
    assert len(each) == len(each_expected) >= 2
    assert not torch.allclose(got, run("sdpa")[0])
    for a, b in zip(each, each_expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("make", "cache"),
    [(llama, "dynamic"), (llama, "static"), (mistral, "dynamic"), (mistral, "static"),
     (bart, "dynamic")],
)  # fmt: skip
def test_generates_with_a_cache_as_without(make: Any, cache: str) -> None:
    model = prepare(make())
    told: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if make is not bart:
        told["attention_mask"] = padding(True)
    plain = model.generate(words(), **told, use_cache=False)
    assert torch.equal(model.generate(words(), **told, cache_implementation=cache), plain)
    model.set_attn_implementation("formula")
    assert torch.equal(model.generate(words(), **told, use_cache=False), plain)


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [2, 7]])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_in_chunks_equals_no_cache(
    make: Any, kind: str, chunks: list[int], padded: bool
) -> None:
    model = prepare(make())
    mask = padding(True) if padded else torch.ones(2, 9, dtype=torch.long)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    sizes = {"max_cache_len": 12} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **sizes)
    done, parts = 0, []
    with torch.no_grad():
        expected = model(words(), attention_mask=mask, position_ids=places).logits
        for n in chunks:
            at = slice(done, done + n)
            done += n
            given = {"attention_mask": mask[:, :done]} if padded else {}
            parts.append(model(
                words()[:, at], **given, position_ids=places[:, at], past_key_values=cache
            ).logits)  # fmt: skip
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[seen], expected[seen], rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing() -> None:
    model = prepare(llama())
    ids = words(1, 6)
    alone = model(ids).logits
    places = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    padded = torch.cat([words(1, 3), ids], 1)
    got = model(padded, attention_mask=mask, position_ids=places).logits[:, 3:]
    torch.testing.assert_close(got, alone, rtol=1e-9, atol=1e-9)


def test_is_set_by_from_config_and_kept_by_from_pretrained(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(**DECODER)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lightnet")
    assert model.config._attn_implementation == "lightnet"
    model.eval().save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="lightnet"
    )
    assert torch.equal(model(words()).logits, again(words()).logits)
    # files do not name an implementation: transformers chooses its own without the argument
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"


def gemma2() -> Any:
    sizes = {**DECODER, "head_dim": 8}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))


def gpt_oss() -> Any:
    sizes = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    )


def llama4() -> Any:
    sizes = {**DECODER, "attention_chunk_size": 4, "intermediate_size_mlp": 40, "head_dim": 8}
    sizes |= {"num_local_experts": 2, "layer_types": ["chunked_attention"] * 2}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
WHOLE = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "soft cap": (gemma2, {}, "softcap: Gemma2Attention asks for it"),
    "sinks": (gpt_oss, {}, "s_aux: GptOssAttention asks for it"),
    "position bias": (t5, {"decoder_input_ids": words()}, "position_bias: T5Attention asks for it"),
    "chunks": (llama4, {}, "attention in chunks: LightNet has one memory"),
    "packed": (llama, {"position_ids": PACKED, "use_cache": False}, "packed sequences: LightNet"),
    "4-D": (llama, {"attention_mask": WHOLE}, r"\(2, 1, 9, 9\): LightNet has one memory"),
    "4-D floats": (llama, {"attention_mask": WHOLE.double()}, "float64: expected bool"),
    "weights": (bert, {"output_attentions": True}, "LightNet computes no attention weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_what_it_cannot_express(name: str) -> None:
    make, inputs, reason = REFUSED[name]
    model = prepare(make())
    with pytest.raises(ValueError, match=reason):
        model(**{"input_ids": words(), **inputs})


def test_refuses_custom_masks() -> None:
    def every_other(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q - k) % 2 == 0

    with pytest.raises(ValueError, match="a custom mask: LightNet has one memory"):
        ours.mask(2, 9, 9, mask_function=every_other)
    both = masking_utils.and_masks(masking_utils.causal_mask_function, every_other)
    with pytest.raises(ValueError, match="a custom mask: LightNet has one memory"):
        ours.mask(2, 9, 9, mask_function=both)


def test_masks_without_a_place_for_the_queries_are_refused() -> None:
    layer = nn.Identity()
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="3 queries and 5 keys in a causal layer"):
        ours.attention(layer, q, k, k, None)
    y, _ = ours.attention(layer, q, k, k, None, is_causal=False)
    assert y.shape == (1, 3, 2, 4)


def test_dropout_acts_on_the_output_while_training() -> None:
    layer, q = nn.Identity(), torch.randn(2, 2, 50, 4)
    plain = ours.attention(layer, q, q, q, None)[0]
    dropped = ours.attention(layer, q, q, q, None, dropout=0.5)[0]
    gone = dropped == 0
    assert 0.3 < gone.float().mean() < 0.7  # 800 draws: 0.5 +- 0.02
    torch.testing.assert_close(dropped[~gone], 2 * plain[~gone])
    assert torch.equal(ours.attention(layer.eval(), q, q, q, None, dropout=0.5)[0], plain)


def test_vit_learns_without_norm_and_gate() -> None:
    torch.manual_seed(0)
    model = vit()
    model.set_attn_implementation("lightnet")
    labels = torch.arange(48) % 3
    images = 0.1 * torch.randn(48, 3, 12, 12)
    images[torch.arange(48), labels] += 1
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        loss = model(pixel_values=images, labels=labels).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.slow
def test_trainer_trains_saves_and_resumes(tmp_path: Any) -> None:
    data = [{"input_ids": (torch.arange(12) * (i % 5)) % 7, "labels": torch.arange(12) % 7}
            for i in range(24)]  # fmt: skip

    def trained(folder: str, **how: Any) -> Any:
        transformers.set_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**DECODER), attn_implementation="lightnet"
        )
        args = transformers.TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=8, learning_rate=3e-3, max_steps=12,
            save_steps=6, logging_steps=3, report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, args, train_dataset=data)
        trainer.train(**how)
        return trainer

    whole = trained("whole")
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    again = trained("again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_peft_trains_low_rank_parts() -> None:
    peft = pytest.importorskip("peft")
    told = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model = peft.get_peft_model(prepare(llama()).float(), told)
    optimiser = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss = model(input_ids=words(), labels=words()).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.isfinite(torch.tensor(losses)).all()


def test_accelerate_prepares_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    model.set_attn_implementation("lightnet")
    optimiser = torch.optim.AdamW(model.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimiser = accelerator.prepare(model, optimiser)
    accelerator.backward(model(input_ids=words(), labels=words()).loss)
    optimiser.step()
    assert all(x.grad is not None for x in model.parameters())


def test_gradient_checkpointing_has_the_same_gradients() -> None:
    model = prepare(llama()).train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        given = {"attention_mask": padding(True), "labels": words(), "use_cache": False}
        model(input_ids=words(), **given).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable()
    torch.testing.assert_close(gradients(), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [
    pytest.param("Llama", marks=pytest.mark.slow),
    *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("ViT", "BERT, padding",
                                                              "Mistral, window")),
])  # fmt: skip
def test_compiles_in_one_graph(name: str) -> None:
    make, inputs = CASES[name]
    model = prepare(make()).float()
    if make in (llama, mistral):
        inputs = {**inputs, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])
    if name == "Llama":  # a graph cannot tell before it runs whether sequences are packed
        with pytest.raises(RuntimeError, match="packed sequences: LightNet has one memory"):
            compiled(**inputs, position_ids=PACKED)


@pytest.mark.slow
def test_decoding_with_a_static_cache_compiles_in_one_graph() -> None:
    model = prepare(llama()).float()
    with torch.no_grad():
        expected = model(words(), use_cache=False).logits
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        model(words()[:, :5], past_key_values=cache)
        for t in range(5, 9):
            places = torch.full((2, 1), t)
            got = step(words()[:, t : t + 1], past_key_values=cache, position_ids=places).logits
            torch.testing.assert_close(got[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_float32() -> None:
    model = prepare(llama()).float()
    ids = words()
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            got = model(ids).logits.float()
    # two layers, about ten operations each, of 2^-9 relative to their results
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_for_trainer_finds_the_axis_of_the_classes() -> None:
    words_of, cells = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    each = [nn.functional.cross_entropy(words_of[i], cells[i]) for i in range(2)]
    torch.testing.assert_close(ours.class_loss(words_of, cells), sum(each) / 2)
    image, masks = torch.randn(2, 4, 3, 6), torch.randint(4, (2, 3, 6))
    expected = nn.functional.cross_entropy(image, masks)
    torch.testing.assert_close(ours.class_loss(image, masks), expected)
    scores, labels = torch.randn(3, 3), torch.tensor([0, 2, 1])  # as many samples as classes
    expected = nn.functional.cross_entropy(scores, labels)
    torch.testing.assert_close(ours.class_loss(scores, labels), expected)
    for wrong in (torch.zeros(2, 9).long(), torch.zeros(2).long()):
        with pytest.raises(ValueError, match=r"labels .*, scores \(2, 5, 7\): expected labels"):
            ours.class_loss(words_of, wrong)
    with pytest.raises(ValueError, match="give a loss"):
        ours.class_loss(torch.randn(2, 5, 5), torch.zeros(2, 5).long())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("make", [llama, bert, bart])
def test_on_cuda_as_on_the_cpu(make: Any) -> None:
    model = prepare(make()).float()
    given = {"input_ids": words(), "attention_mask": padding(make is llama)}
    seen = given["attention_mask"].bool() if make is not bart else torch.ones(2, 9).bool()

    def gradients(device: str) -> tuple[Tensor, Tensor]:
        model.to(device).zero_grad()
        out = model(**{name: x.to(device) for name, x in given.items()})[0].cpu()
        out[seen].square().sum().backward()
        grads = [x.grad.flatten().cpu() for x in model.parameters() if x.grad is not None]
        return out[seen].detach(), torch.cat(grads)

    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert (
            a - b
        ).norm() < 1e-3 * b.norm()  # float32, tensor cores off: about 1e-6 an operation


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generates_on_cuda_with_a_compiled_static_cache(dtype: torch.dtype) -> None:
    """transformers compiles the steps of a static cache on CUDA by itself."""
    model = prepare(llama()).to("cuda", dtype)
    ids, mask = words().cuda(), padding(True).cuda()
    told: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    told |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **told, use_cache=False)
    static = model.generate(ids, **told, cache_implementation="static")
    a, b = (torch.stack(x.logits).float() for x in (plain, static))
    first = (plain.sequences != static.sequences).any(0).nonzero()[:1].sum() - ids.shape[1]
    n = int(first) + 1 if first >= 0 else len(a)  # logits agree while the words do
    assert n == len(a) or dtype != torch.float32
    assert (a[:n] - b[:n]).norm() < (1e-3 if dtype == torch.float32 else 5e-2) * a[:n].norm()
