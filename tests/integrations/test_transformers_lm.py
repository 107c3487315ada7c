"""NDLightNet as models of transformers: rows of a batch as alone, caches, generation, files, Trainer, what is refused.
float64 at 1e-10: both sides add the same terms of order 1 in another order, which is 10^6 roundings."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.24")

from transformers import Trainer, TrainingArguments  # noqa: E402

from ndlightnet import NDLightNet  # noqa: E402
from ndlightnet.integrations import transformers_lm as ours  # noqa: E402

EXACT, WORDS = 1e-10, 40
STREAMING = ("text", "LightNet", "GLA")
MIXERS: dict[str, Any] = {
    "text": {"text_mixer": {"window": 4}},
    "LightNet": "LightNetAttention",
    "GLA": "GLA",
    "softmax": "SoftmaxAttention",
}
LEFT, RIGHT = [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8], [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]


def config(mixer: str = "text", **options: Any) -> Any:
    small = {"vocab_size": WORDS, "embed_dim": 32, "depth": 3, "tpe_states": 4, "causal": True, "pad_token_id": 0}
    return ours.NDLightNetConfig(**{**small, "mixer": MIXERS[mixer], **options})


def build(mixer: str = "text", kind: Any = ours.NDLightNetForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(config(mixer, **options)).double().eval()


def words(*shape: int) -> Tensor:
    return torch.randint(2, WORDS, shape, generator=torch.Generator().manual_seed(1))


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("mixer", STREAMING)
def test_a_batch_of_two_lengths_equals_each_alone(mixer: str, mask: list[list[int]], close: Any) -> None:
    model, ids, real = build(mixer), words(2, 8), torch.tensor(mask)
    rows = [ids[i : i + 1, real[i].bool()] for i in range(2)]
    both, alone = model(ids, attention_mask=real, labels=ids), [model(row, labels=row) for row in rows]
    for i, one in enumerate(alone):
        close(both.logits[i, real[i].bool()], one.logits[0], EXACT)
    # the mean over 4 + 7 predictions
    loss = (4 * alone[0].loss + 7 * alone[1].loss) / 11
    close(both.loss, loss, EXACT)
    pairs = zip(gradients(model, both.loss), gradients(model, loss), strict=True)
    scale = max(g.abs().max().item() for g in gradients(model, model(ids, labels=ids).loss))
    assert max((a - b).abs().max().item() for a, b in pairs) < EXACT * scale
    # the states of a padded prompt are those of its rows, too
    with torch.no_grad():
        prompts = model(ids, attention_mask=real, use_cache=True)
        after = model(words(2, 3), cache=prompts.cache).logits
        for i, row in enumerate(rows):
            close(prompts.logits[i, real[i].bool()], alone[i].logits[0].detach(), EXACT)
            close(after[i], model(torch.cat([row[0], words(2, 3)[i]])[None], use_cache=False).logits[0, -3:], EXACT)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("mixer", STREAMING)
@torch.no_grad()
def test_pieces_equal_the_text_at_once(mixer: str, static: bool, close: Any) -> None:
    """Also steps of several tokens after a cache, which nine models of transformers got wrong (#45513)."""
    model, ids = build(mixer), words(2, 12)

    def empty() -> Any:
        if static:
            return transformers.StaticCache(config=model.config, max_cache_len=12)
        return transformers.DynamicCache(config=model.config)

    expected, states = model(ids, use_cache=False).logits, []
    for sizes in ([12], [5, 7], [6, 1, 5], [1] * 12, [7, *[1] * 5]):
        cache = empty()
        pieces = [model(piece, cache=cache).logits for piece in ids.split(sizes, 1)]
        close(torch.cat(pieces, 1), expected, EXACT)
        assert not cache.is_croppable
        states.append([x.clone() for layer in cache.layers for x in layer.recurrent_states.values() if x is not None])
        cache.reset()  # to zeros, which are not the state before the first token
        close(model(ids, cache=cache).logits, expected, EXACT)
    assert len(states[0]) >= 3 * 3
    for state in states[1:]:
        for one, at_once in zip(state, states[0], strict=True):
            close(one.double(), at_once.double(), EXACT)
    assert set(model(ids, past_key_values=empty()).keys()) == {"logits", "cache"}
    assert "cache" not in model(ids, use_cache=False)


def test_gradients_end_at_the_cache(close: Any) -> None:
    """A call that reads and writes a cache has the gradients of the same call with a constant state."""
    model, ids = build(), words(2, 9)
    net = model.net
    with torch.no_grad():
        cache = model(ids[:, :4]).cache
        _, state = net.advance(ids[:, :4], net.init_state(2))
    ours_now = gradients(model, model(ids[:, 4:], cache=cache).logits.square().sum())
    expected = gradients(model, net.head(net.advance(ids[:, 4:], state)[0]).square().sum())
    for a, b in zip(ours_now, expected, strict=True):
        close(a, b, EXACT)


@pytest.mark.parametrize("mixer", ["text", "LightNet"])
def test_generation_of_a_padded_batch(mixer: str) -> None:
    model, ids, real = build(mixer), words(2, 8), torch.tensor(LEFT)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    both = model.generate(ids, attention_mask=real, **greedy)
    for i, row in enumerate((ids[:1, 3:], ids[1:])):
        assert torch.equal(both[i, 8:], model.generate(row, **greedy)[0, row.shape[1] :])
    static = model.generate(ids, attention_mask=real, cache_implementation="static", **greedy)
    assert torch.equal(static, both)
    for beams in (3, 4):
        options = {**greedy, "num_beams": beams, "num_return_sequences": 2}
        cached, plain = (model.generate(ids, attention_mask=real, use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached, plain)
    drawn = []
    for use in (True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, attention_mask=real, max_new_tokens=8, do_sample=True, use_cache=use))
    assert torch.equal(*drawn)


def test_logits_to_keep_and_counted_items(close: Any) -> None:
    model, ids = build(), words(2, 6)
    out = model(ids, labels=ids.where(ids > 9, -100), num_items_in_batch=torch.tensor(5))
    logits = model(ids).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids.where(ids > 9, -100)[:, 1:].flatten(), reduction="sum"
    )
    close(out.loss, expected / 5, EXACT)
    close(model(ids, logits_to_keep=2).logits, logits[:, -2:], EXACT)
    nothing = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=5).loss
    assert nothing == 0 and nothing.requires_grad
    assert model.train()(ids, labels=ids).logits is None


def same_weights(model: Any, net: NDLightNet) -> None:
    state, expected = model.net.state_dict(), net.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_folders_go_both_ways(dtype: torch.dtype, tmp_path: Path, close: Any) -> None:
    mixer = MIXERS["text"]
    net = NDLightNet(1, vocab_size=WORDS, embed_dim=64, depth=3, tpe_states=4, mixer=mixer, causal=True, dtype=dtype)
    ids = words(2, 7)
    net.save_pretrained(tmp_path / "a")
    for kind in (ours.NDLightNetForCausalLM, transformers.AutoModelForCausalLM):
        model = kind.from_pretrained(tmp_path / "a")
        assert type(model) is ours.NDLightNetForCausalLM and model.dtype == dtype and not model.training
        same_weights(model, net)
        assert model.net.head.weight is model.net.embed.weight
        assert torch.equal(model(ids).logits, net.eval()(ids))  # with its constants, too
    model.save_pretrained(tmp_path / "b")
    again = NDLightNet.from_pretrained(tmp_path / "b")
    same_weights(model, again)
    assert again.config == net.config and torch.equal(again(ids), net(ids))
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    same_weights(third, net)
    features = transformers.AutoModel.from_pretrained(tmp_path / "b")
    assert torch.equal(features(ids).last_hidden_state, net.forward_features(ids))


def test_a_new_head_is_drawn_and_the_rest_is_loaded(tmp_path: Path) -> None:
    model = build(dims=1).float()
    model.save_pretrained(tmp_path)
    fine = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert fine.net.head.weight.shape == (3, 32) and not fine.net.head.bias.any()
    assert 0 < fine.net.head.weight.abs().max() <= (6 / 35) ** 0.5  # Xavier's limit
    for name, x in model.net.blocks.state_dict().items():
        assert torch.equal(x, fine.net.blocks.state_dict()[name])
    fine.save_pretrained(tmp_path / "fine")
    assert NDLightNet.from_pretrained(tmp_path / "fine").num_classes == 3
    assert transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "fine").config.num_labels == 3


def test_an_untied_head_and_an_image_network(tmp_path: Path) -> None:
    model = build(tied=False).float()
    model.save_pretrained(tmp_path / "text")
    same_weights(model, NDLightNet.from_pretrained(tmp_path / "text"))
    same_weights(ours.NDLightNetForCausalLM.from_pretrained(tmp_path / "text"), model.net)
    net = NDLightNet(2, 3, 5, patch_size=4, embed_dim=32, depth=2, tpe_states=4)
    net.save_pretrained(tmp_path / "image")
    image = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "image")
    same_weights(image, net)
    assert image.config.num_labels == 5 and image.config.hidden_size == 32 and image.config.num_hidden_layers == 2
    x = torch.randn(2, 3, 9, 12)
    assert torch.equal(image(x).logits, net.eval()(x))
    features = transformers.AutoModel.from_pretrained(tmp_path / "image")(pixel_values=x)
    assert features.last_hidden_state.shape == (2, 3 * 3, 32)
    video = ours.NDLightNetForImageClassification(ours.NDLightNetConfig(dims=3, patch_size=4, embed_dim=32, depth=1))
    assert video(torch.randn(2, 3, 4, 8, 8), labels=torch.tensor([0, 1])).loss.isfinite()


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
def test_padding_changes_no_encoder(mask: list[list[int]], close: Any) -> None:
    ids, real = words(2, 8), torch.tensor(mask)
    masked = build("LightNet", ours.NDLightNetForMaskedLM, causal=False)
    labels = ids.where(real.bool() & (ids % 2 == 0), -100)
    both = masked(ids, attention_mask=real, labels=labels)
    classes = build("LightNet", ours.NDLightNetForSequenceClassification, causal=False, num_labels=3)
    scores, losses = classes(ids, attention_mask=real).logits, []
    for i in range(2):
        row, picked = ids[i : i + 1, real[i].bool()], labels[i : i + 1, real[i].bool()]
        one = masked(row, labels=picked)
        close(both.logits[i, real[i].bool()], one.logits[0], EXACT)
        losses.append(one.loss * (picked != -100).sum())
        close(scores[i], classes(row).logits[0], EXACT)
    close(both.loss, sum(losses) / (labels != -100).sum(), EXACT)


@pytest.mark.parametrize(
    "labels",
    [torch.tensor([0, 2]), torch.eye(3, dtype=torch.float64)[:2], torch.linspace(-1, 2, 6).double().view(2, 3)],
    ids=["one of several", "several of several", "values"],
)
def test_problem_types(labels: Tensor) -> None:
    kind = "regression" if (labels % 1).any() else None
    model = build(kind=ours.NDLightNetForSequenceClassification, num_labels=3, problem_type=kind)
    model(words(2, 5), labels=labels).loss.backward()
    assert model.net.head.weight.grad.isfinite().all() and model.net.head.weight.grad.any()


@pytest.mark.slow
def test_compiled(close: Any) -> None:
    """float32: 1e-5 is 100 roundings of a graph whose sums have other orders."""
    model, ids, real = build("LightNet", depth=1).float(), words(2, 8), torch.tensor(LEFT)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    close(compiled(ids, attention_mask=real).logits[1], model(ids, attention_mask=real).logits[1], 1e-5)
    with torch.no_grad():
        cache, other = (model(ids, attention_mask=real, use_cache=True).cache for _ in range(2))
        for token in words(2, 3).split(1, 1):
            close(compiled(token, cache=cache).logits, model(token, cache=other).logits, 1e-5)


def test_gradient_checkpointing(close: Any) -> None:
    model, ids = build().train(), words(2, 8)
    plain = gradients(model, model(ids, labels=ids).loss)
    model.activation_checkpointing_enable()
    assert model.net.grad_checkpointing and model.is_activation_checkpointing
    for a, b in zip(gradients(model, model(ids, labels=ids).loss), plain, strict=True):
        close(a, b, 1e-8)
    model.activation_checkpointing_disable()
    assert not model.net.grad_checkpointing


def train(model: Any, rows: list[dict[str, Tensor]], folder: Path, **options: Any) -> list[float]:
    settings = {"per_device_train_batch_size": 4, "learning_rate": 3e-3, "max_steps": 4, "logging_steps": 1}
    arguments = TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_steps=2, **{**settings, **options}
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=bool(list(folder.glob("checkpoint-*"))))
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_trainer_of_texts_and_images(tmp_path: Path) -> None:
    ids = words(1, 8)[0]
    text = build().float().train()
    losses = train(text, [{"input_ids": ids, "labels": ids}] * 16, tmp_path / "text", gradient_accumulation_steps=2)
    assert losses[-1] < losses[0]
    assert abs(losses[0] - torch.log(torch.tensor(WORDS)).item()) < 1  # a mean, not a sum
    # a training that goes on reads the weights of the checkpoint
    again = build(vocab_size=WORDS).float()
    torch.nn.init.zeros_(again.net.embed.weight)
    more = train(again, [{"input_ids": ids, "labels": ids}] * 16, tmp_path / "text", max_steps=6)
    assert more[-1] < losses[-1]
    image = ours.NDLightNetForImageClassification(
        ours.NDLightNetConfig(dims=2, in_chans=1, patch_size=4, embed_dim=32, depth=2, tpe_states=4, num_labels=2)
    )
    rows = [{"pixel_values": torch.full((1, 8, 8), float(i % 2)), "labels": i % 2} for i in range(16)]
    losses = train(image, rows, tmp_path / "image", logging_steps=2)
    assert losses[-1] < losses[0]
    image(rows[0]["pixel_values"][None], labels=torch.tensor([0])).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in image.parameters())


def test_errors() -> None:
    model, ids = build("LightNet", depth=1), words(1, 4)
    for text, call in (
        ("padding between real tokens", lambda: model(ids, attention_mask=torch.tensor([[1, 0, 1, 1]]))),
        (r"attention_mask \(1, 3\): expected \(1, 4\)", lambda: model(ids, attention_mask=torch.ones(1, 3))),
        ("inputs_embeds: expected None", lambda: model(None, inputs_embeds=torch.zeros(1, 4, 32))),
        ("position_ids: expected None", lambda: model(ids, position_ids=torch.arange(4)[None])),
        ("output_hidden_states: expected None", lambda: model(ids, output_hidden_states=True)),
        ("cache=.*expected one for this config", lambda: model(ids, cache=transformers.DynamicCache())),
        ("stateful models", lambda: model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=2)),
        ("causal=False, vocab_size=40: .*ForCausalLM expected", lambda: build(causal=False, mixer="LightNet")),
        ("causal=True, vocab_size=40: .*ForMaskedLM expected", lambda: build(kind=ours.NDLightNetForMaskedLM)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    softmax = build("softmax", depth=1)
    with torch.no_grad():
        assert softmax(ids).logits.shape == (1, 4, WORDS)
        with pytest.raises(ValueError, match="SoftmaxAttention has no method advance"):
            softmax(ids, use_cache=True)
    assert softmax.generate(ids, max_new_tokens=2, use_cache=False).shape[1] <= 6


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.modeling_outputs.CausalLMOutputWithPast, "cache")
    with pytest.raises(ImportError, match=r"transformers .+: expected 5\.24 or newer"):
        importlib.reload(ours)
