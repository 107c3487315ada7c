"""The attention implementation "lightnet" of transformers: equality with the formula by hand, with masks made by
transformers itself; caches; what is refused; files; accelerate, graphs, lower precision and CUDA. A training of a ViT,
and the Trainer, are a door of tests/doors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils  # noqa: E402

from ndlightnet.integrations import transformers as ours  # noqa: E402

from . import hugging_face as models  # noqa: E402
from .hugging_face import CASES, DECODER, PACKED, bart, llama, mistral, padding, prepare, words  # noqa: E402


def formula(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, is_causal: Any = None, **_: Any
) -> tuple[Tensor, None]:
    """y[t] = SiLU(q[t]) . softmax of k over the tokens that t sees, channel by channel, . v"""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    q, n = nn.functional.silu(query.double()), key.shape[2]
    visible = torch.ones(query.shape[2], n, dtype=torch.bool)
    if attention_mask is not None:
        visible = attention_mask
    elif (getattr(module, "is_causal", True) if is_causal is None else is_causal) and query.shape[2] > 1:
        visible = visible.tril()
    logits = key[:, :, None].masked_fill(~visible[..., None], -torch.inf)
    weights = logits.softmax(-2).nan_to_num(0)  # of no tokens: 0
    y = torch.einsum("bhtc,bhtsc,bhsd->bthd", q, weights, value)
    return y.to(query.dtype), None


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers, written out where it depends on the query."""
    return masking_utils.sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register("formula", formula)
AttentionMaskInterface.register("formula", whole_mask)


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

    for layer in model.modules():
        if hasattr(layer, "is_causal") and any(True for _ in layer.children()):
            layer.register_forward_hook(lambda m, i, out: layers.append(out[0]))
    got, each = run("lightnet")
    expected, each_expected = run("formula")
    assert len(each) == len(each_expected) >= 2
    assert not torch.allclose(got, run("sdpa")[0])
    for a, b in zip(each, each_expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("make", "cache"), [(llama, "static"), (mistral, "dynamic"), (bart, "dynamic")])
def test_generates_with_a_cache_as_without(make: Any, cache: str) -> None:
    model = prepare(make())
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    if make is not bart:
        options["attention_mask"] = padding(True)
    plain = model.generate(words(), **options, use_cache=False)
    assert torch.equal(model.generate(words(), **options, cache_implementation=cache), plain)
    model.set_attn_implementation("formula")
    assert torch.equal(model.generate(words(), **options, use_cache=False), plain)


@pytest.mark.parametrize("make", [llama, mistral])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 3, 1], [2, 7]])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_in_chunks_equals_no_cache(make: Any, kind: str, chunks: list[int], padded: bool) -> None:
    model = prepare(make())
    mask = padding(True) if padded else torch.ones(2, 9, dtype=torch.long)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    sizes = {"max_cache_len": 12} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **sizes)
    done, logits = 0, []
    with torch.no_grad():
        expected = model(words(), attention_mask=mask, position_ids=places).logits
        for n in chunks:
            at = slice(done, done + n)
            done += n
            masked = {"attention_mask": mask[:, :done]} if padded else {}
            logits.append(model(words()[:, at], **masked, position_ids=places[:, at], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()], rtol=1e-9, atol=1e-9)


def test_is_set_by_from_config_and_kept_by_from_pretrained(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(**DECODER)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="lightnet")
    assert model.config._attn_implementation == "lightnet"
    model.eval().save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="lightnet")
    assert torch.equal(model(words()).logits, again(words()).logits)
    # files do not name an implementation: transformers chooses its own without the argument
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"


WHOLE = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "soft cap": (models.gemma2, {}, "softcap: Gemma2Attention asks for it"),
    "sinks": (models.gpt_oss, {}, "s_aux: GptOssAttention asks for it"),
    "position bias": (models.t5, {"decoder_input_ids": words()}, "position_bias: T5Attention asks for it"),
    "chunks": (models.llama4, {}, "attention in chunks: LightNet has one memory"),
    "packed": (llama, {"position_ids": PACKED, "use_cache": False}, "packed sequences, blocks or a custom mask"),
    "4-D": (llama, {"attention_mask": WHOLE}, r"\(2, 1, 9, 9\): LightNet has one memory"),
    "4-D floats": (llama, {"attention_mask": WHOLE.double()}, "float64: expected bool"),
    "weights": (models.bert, {"output_attentions": True}, "LightNet computes no attention weights"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_what_it_cannot_express(name: str) -> None:
    make, inputs, reason = REFUSED[name]
    model = prepare(make())
    with pytest.raises(ValueError, match=reason):
        model(**{"input_ids": words(), **inputs})


@pytest.mark.parametrize("cells", [1, 2**24])
def test_compares_mask_functions_with_what_they_should_be(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, also one at a time: a mask that differs in the last one only is another one."""
    monkeypatch.setattr(ours, "CELLS", cells)

    def no_first_key(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (q < 8) | (k > 0)

    window = masking_utils.sliding_window_causal_mask_function(4)
    assert ours.mask(2, 9, 9, mask_function=window, local_size=4).shape == (2, 1, 2, 9)
    causal = masking_utils.causal_mask_function
    for function, size in (
        (no_first_key, None),
        (masking_utils.and_masks(causal, no_first_key), None),
        (window, 5),
        (window, None),
        (masking_utils.sliding_window_bidirectional_mask_function(4), 4),
    ):
        with pytest.raises(ValueError, match="a custom mask: LightNet has one memory"):
            ours.mask(2, 9, 9, mask_function=function, local_size=size)
    both = masking_utils.sliding_window_bidirectional_mask_function(4)
    options = {"local_size": 4, "allow_is_bidirectional_skip": True}
    assert ours.mask(2, 9, 9, mask_function=both, **options).shape == (2, 1, 7, 9)
    with pytest.raises(ValueError, match="a custom mask: LightNet has one memory"):
        ours.mask(2, 9, 9, mask_function=both, use_vmap=True, **options)


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


@pytest.mark.parametrize("place", [2, 3, 6])
def test_a_token_behind_a_cache_reads_the_keys_of_its_window(place: int) -> None:
    """A window of three: the token's own key and the two before it, of eight that the cache holds."""
    function = masking_utils.sliding_window_causal_mask_function(3)
    visible = ours.mask(2, 1, 8, place, mask_function=function, local_size=3)
    expected = torch.tensor([max(0, place - 2) <= key <= place for key in range(8)])
    assert visible is not None and torch.equal(visible, expected.expand(2, 1, 1, 8))


# ----------------------------------------------------------------------------- training, graphs, CUDA


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
        masked = {"attention_mask": padding(True), "use_cache": False}
        model(input_ids=words(), labels=words(), **masked).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable()
    torch.testing.assert_close(gradients(), plain, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Llama", "BERT, padding", "Mistral, window"])
def test_compiles_in_one_graph(name: str) -> None:
    make, inputs = CASES[name]
    model = prepare(make()).float()
    if make in (llama, mistral):
        inputs = {**inputs, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs)[0], model(**inputs)[0])
    if name == "Llama":  # a graph cannot tell before it runs whether sequences are packed
        with pytest.raises(RuntimeError, match="packed sequences, blocks or a custom mask"):
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
    for scores, labels in (  # the last has as many samples as classes
        (torch.randn(2, 4, 3, 6), torch.randint(4, (2, 3, 6))),
        (torch.randn(3, 3), torch.tensor([0, 2, 1])),
    ):
        expected = nn.functional.cross_entropy(scores, labels)
        torch.testing.assert_close(ours.class_loss(scores, labels), expected)
    for wrong in (torch.zeros(2, 9).long(), torch.zeros(2).long()):
        with pytest.raises(ValueError, match=r"labels .*, scores \(2, 5, 7\): expected labels"):
            ours.class_loss(words_of, wrong)
    with pytest.raises(ValueError, match="give a loss"):
        ours.class_loss(torch.randn(2, 5, 5), torch.zeros(2, 5).long())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("make", [llama, models.bert, bart])
def test_on_cuda_as_on_the_cpu(make: Any) -> None:
    model = prepare(make()).float()
    inputs = {"input_ids": words(), "attention_mask": padding(make is llama)}
    visible = inputs["attention_mask"].bool() if make is not bart else torch.ones(2, 9).bool()

    def gradients(device: str) -> tuple[Tensor, Tensor]:
        model.to(device).zero_grad()
        out = model(**{name: x.to(device) for name, x in inputs.items()})[0].cpu()
        out[visible].square().sum().backward()
        grads = [x.grad.flatten().cpu() for x in model.parameters() if x.grad is not None]
        return out[visible].detach(), torch.cat(grads)

    for a, b in zip(gradients("cuda"), gradients("cpu"), strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()  # float32, tensor cores off: about 1e-6 an operation


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generates_on_cuda_with_a_compiled_static_cache(dtype: torch.dtype) -> None:
    """transformers compiles the steps of a static cache on CUDA by itself."""
    model = prepare(llama()).to("cuda", dtype)
    ids, mask = words().cuda(), padding(True).cuda()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    plain = model.generate(ids, **options, use_cache=False)
    static = model.generate(ids, **options, cache_implementation="static")
    a, b = (torch.stack(x.logits).float() for x in (plain, static))
    first = (plain.sequences != static.sequences).any(0).nonzero()[:1].sum() - ids.shape[1]
    n = int(first) + 1 if first >= 0 else len(a)  # logits agree while the words do
    assert n == len(a) or dtype != torch.float32
    assert (a[:n] - b[:n]).norm() < (1e-3 if dtype == torch.float32 else 5e-2) * a[:n].norm()
