"""The LM Evaluation Harness: its scores are those of `evaluate`, and what it asks a model for."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from ndlightnet import NDLightNet, SoftmaxAttention, mixers
from ndlightnet.data.text.tokenizer import ByteTokenizer, train_tokenizer
from ndlightnet.inference import generate_text
from ndlightnet.inference.likelihood import rolling_log_likelihood
from ndlightnet.integrations.lm_eval import NDLightNetLM
from ndlightnet.integrations.transformers_lm import NDLightNetForCausalLM
from ndlightnet.training.language.evaluate_command import evaluate
from tests.training.conftest import save_language_model

COMMON = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
"""
CHOICE_METRICS = """
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""
YAML = {
    "choices": "output_type: multiple_choice\ndoc_to_text: '{{query}}'\ndoc_to_choice: choices\ndoc_to_target: gold"
    + CHOICE_METRICS,
    # winogrande's form: the answers are contexts, and the text is the number of the right one
    "schema": "output_type: multiple_choice\ndoc_to_text: gold\ndoc_to_choice: context_options\n"
    "doc_to_target: '{{continuation}}'" + CHOICE_METRICS,
    "pairs": "output_type: multiple_choice\ndoc_to_text: ''\ndoc_to_target: 0\n"
    "doc_to_choice: '{{[sentence_good, sentence_bad]}}'" + CHOICE_METRICS,  # BLiMP's form
    "continued": "output_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: ' {{continuation}}'\n"
    "target_delimiter: ''\nmetric_list:\n  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}\n"
    "  - {metric: acc, aggregation: mean, higher_is_better: true}\n",
}
SUBJECTS = ["the cat", "a dog", "Sarah", "数学", "the old man", "ça"]
VERBS = ["sat on", "saw", "wrote about", "is"]


def documents():
    """Texts of 24 subjects and verbs: contexts that end in a space or a line, answers of several lengths."""
    lines = {"choices": [], "schema": [], "pairs": [], "continued": []}
    for n, (subject, verb) in enumerate((a, b) for a in SUBJECTS for b in VERBS):
        answers = [f"{x}{'!' * (n % 3)}" for x in SUBJECTS[n % 3 : n % 3 + 2 + n % 4]]
        query = f"Question: who {verb} {subject}?" + ("", " ", "\n")[n % 3]
        lines["choices"].append({"query": query, "choices": answers, "gold": n % len(answers)})
        options = [f"{x} {verb} it because {x}" for x in SUBJECTS[:2]]
        lines["schema"].append({"context_options": options, "continuation": f"{verb} {subject}.", "gold": n % 2})
        pair = {"sentence_good": f"{subject} {verb} it", "sentence_bad": f"{verb} {subject} it"}
        lines["pairs"].append({**pair, "linguistics_term": "order"})
        lines["continued"].append({"context": f"{subject} {verb}{' ' * (n % 2)}", "continuation": SUBJECTS[n % 5]})
    return lines


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokenizer = train_tokenizer([f"{a} {b}. who, because?" for a in SUBJECTS for b in VERBS], 320)
    sizes = {"vocab_size": tokenizer.vocab_size, "embed_dim": 16, "depth": 3, "tpe_states": 4, "causal": True}
    net = NDLightNet(1, **sizes, mixer=mixers.text_mixer)
    with torch.no_grad():
        net.embed.weight.mul_(20)
    return net.eval(), tokenizer


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_language_model(folder, *model)
    return folder


def request(*args):
    return SimpleNamespace(args=args)


@pytest.mark.slow
def test_the_harness_and_evaluate_agree_to_the_digit(model, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    files, tasks = [], tmp_path / "tasks"
    tasks.mkdir()
    for name, lines in documents().items():
        files.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
        common = COMMON.replace("NAME", f"local_{name}").replace("FILE", files[-1])
        (tasks / f"{name}.yaml").write_text(common + YAML[name], "utf-8")
    assert evaluate([str(run), *files, "--out", str(tmp_path / "out.json"), "--device=cpu"]) == 0
    ours = json.loads((tmp_path / "out.json").read_text())["results"]
    ours["pairs"] = ours["BLiMP"]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    options = {"tasks": [f"local_{name}" for name in YAML], "task_manager": manager, "bootstrap_iters": 0}
    options |= {"model": "ndlightnet", "device": "cpu", "batch_size": 8}
    for arguments in (f"pretrained={run}", {"pretrained": model[0], "tokenizer": model[1], "budget": 50}):
        theirs = lm_eval.simple_evaluate(model_args=arguments, **options)["results"]
        for name in YAML:
            assert ours[name]["accuracy"] == theirs[f"local_{name}"]["acc,none"]
            assert ours[name]["n"] == 24
        assert ours["choices"]["acc_norm"] == theirs["local_choices"]["acc_norm,none"]
        close = 0 if isinstance(arguments, str) else 1e-6  # packs of other sizes
        assert ours["continued"]["perplexity"] == pytest.approx(
            theirs["local_continued"]["perplexity,none"], rel=close, abs=0
        )
    model[0].save_pretrained(tmp_path / "model")
    fast = PreTrainedTokenizerFast(tokenizer_object=model[1].tokenizer, eos_token="<|endoftext|>", pad_token="<|mask|>")
    harness = HFLM(NDLightNetForCausalLM.from_pretrained(tmp_path / "model"), tokenizer=fast, batch_size=8)
    theirs = lm_eval.simple_evaluate(**{**options, "model": harness})["results"]  # in batches padded at the left
    for name in YAML:
        assert ours[name]["accuracy"] == theirs[f"local_{name}"]["acc,none"]
    assert ours["choices"]["acc_norm"] == theirs["local_choices"]["acc_norm,none"]
    perplexity = theirs["local_continued"]["perplexity,none"]
    assert ours["continued"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)  # sums in float32 in another order
    stderrs = lm_eval.simple_evaluate(model_args=f"pretrained={run}", **{**options, "bootstrap_iters": 10})["results"]
    assert ours["choices"]["stderr"] == pytest.approx(stderrs["local_choices"]["acc_stderr,none"], rel=1e-12)
    assert 0 < ours["choices"]["accuracy"] < 1  # no trivial agreement


def test_documents_and_empty_contexts(model):
    net, tokenizer = model
    harness = NDLightNetLM(net, tokenizer)
    text = "the cat sat on 数学. " * 20
    tokens = tokenizer.encode([text])[0]
    expected = rolling_log_likelihood(net, tokens, tokenizer.end)
    scores = harness.loglikelihood_rolling([request(text), request("")], disable_tqdm=True)
    assert scores == [pytest.approx(expected), 0]
    (joint, _), (spaces, _) = harness.loglikelihood([request("", text), request(" ", text)], disable_tqdm=True)
    assert joint == pytest.approx(expected, rel=1e-5) and spaces < 0
    softmax = NDLightNet(1, vocab_size=256, embed_dim=8, depth=1, causal=True, mixer=SoftmaxAttention)
    with pytest.raises(ValueError, match=r"^the network cannot read a document as a stream"):
        NDLightNetLM(softmax, ByteTokenizer()).loglikelihood_rolling([request("ab")], disable_tqdm=True)


def test_continuations_are_those_of_generate_text(model):
    net, tokenizer = model
    harness = NDLightNetLM(net, tokenizer, max_gen_toks=7)
    context = "the cat"
    greedy = "".join(generate_text(net, context, 7, tokenizer=tokenizer, temperature=0))
    longer = "".join(generate_text(net, context, 20, tokenizer=tokenizer, temperature=0))
    end = longer[3:5]
    requests = [
        request(context, {"until": []}),
        request(context, {"until": ["", "#####"], "max_gen_toks": 20, "do_sample": False, "temperature": 0.9}),
        request(context, {"until": end, "max_gen_toks": 20}),
        request(
            context, {"until": [], "do_sample": True, "temperature": 5.0, "top_p": 1e-6, "repetition_penalty": 1.0}
        ),
    ]
    texts = harness.generate_until(requests, disable_tqdm=True)
    assert texts == [greedy, longer, longer.partition(end)[0], greedy]
    with pytest.raises(ValueError, match=r"^generation_kwargs num_beams: expected repetition_penalty, temperature"):
        harness.generate_until([request(context, {"until": [], "num_beams": 3})], disable_tqdm=True)


def test_how_a_model_is_made(model, run):
    net, tokenizer = model
    for made in (
        NDLightNetLM.create_from_arg_string(f"pretrained={run},budget=100", {"batch_size": "auto", "device": "cpu"}),
        NDLightNetLM.create_from_arg_obj({"pretrained": run / "checkpoints" / "best.ckpt"}, {"max_batch_size": 3}),
        NDLightNetLM(net, tokenizer),
    ):
        assert made.eot_token_id == made.prefix_token_id == tokenizer.end and made.device.type in ("cpu", "cuda")
        assert made.tok_encode("the cat", add_special_tokens=True) == tokenizer.encode(["the cat"])[0]
        assert torch.equal(made.network.embed.weight.cpu(), net.embed.weight)
        with pytest.raises(ValueError, match=r"^chat_template=True: expected none"):
            made.chat_template(True)
    with pytest.raises(ValueError, match=r"^tokenizer=None: expected that of the network"):
        NDLightNetLM(net)
    with pytest.raises(FileNotFoundError, match=r"^gone: no such checkpoint"):
        NDLightNetLM("gone")


@pytest.mark.slow
def test_the_harness_own_command_line_knows_the_model():
    done = subprocess.run(
        [sys.executable, "-m", "ndlightnet.integrations.lm_eval", "run", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--model_args" in done.stdout, done.stderr
