"""The attention implementation "lightnet" of transformers with accelerate, in graphs, in lower precision and on CUDA. A
training of a ViT, and the Trainer, are a door of tests/doors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from ndlightnet.integrations import transformers as ours  # noqa: E402

from .hugging_face import CASES, PACKED, bart, bert, llama, mistral, padding, prepare, words  # noqa: E402


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
@pytest.mark.parametrize("make", [llama, bert, bart])
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
