"""The command `generate`: a language model continues a text, on the terminal, as it is drawn."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import torch

from ndlightnet import NDLightNet
from ndlightnet.data.errors import DataError, one_line
from ndlightnet.data.text.tokenizer import Tokenizer, load_tokenizer
from ndlightnet.inference import generate_text
from ndlightnet.inference.likelihood import in_bfloat16
from ndlightnet.training.core.options import WordsParser
from ndlightnet.training.core.runs import find_checkpoint


def open_model(path: str, device: str) -> tuple[NDLightNet, Tokenizer]:
    """Return the language model, in evaluation mode, and the tokenizer of a checkpoint, or of the best or else last one
    of a run's folder. device: of torch, or "auto": a GPU if there is one. Raises DataError."""
    checkpoint, _ = find_checkpoint(Path(path))
    tokenizer = load_tokenizer(checkpoint)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        network = NDLightNet.from_checkpoint(checkpoint).to(place)
    except (ValueError, RuntimeError, AssertionError) as error:  # torch's errors of devices are of many classes
        raise DataError(one_line(error)) from error
    if not (network.per_token and network.causal):
        raise DataError(f"{checkpoint}: the network of another task, expected a causal language model")
    return network, tokenizer


def generate(arguments: list[str]) -> int:
    """Print texts and their continuations. arguments: `--ckpt_path RUN --prompt TEXT` and the options below.

    Raises DataError for a missing or wrong checkpoint and for options out of range.
    """
    parser = WordsParser("text_lm.py generate", description="Continue texts, in constant memory.")
    add = parser.add_argument
    add("--ckpt_path", required=True, help="a checkpoint, or a run's folder")
    add("--prompt", nargs="+", default=["\n"], help="the text to continue, or several")
    add("--length", type=int, default=500, help="tokens to write at most")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top_k", type=int, help="draw from so many tokens only")
    add("--top_p", type=float, help="draw from the most likely tokens, of so much probability")
    add("--repetition_penalty", type=float, default=1.0, help="divides logits of tokens that the text has; 1: none")
    add("--stop", nargs="+", default=[], help="texts that end it")
    add("--seed", type=int, default=0, help="of the draws")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one")
    options = vars(parser.parse_args(arguments))
    network, tokenizer = open_model(options.pop("ckpt_path"), options.pop("device"))
    options["generator"] = torch.Generator().manual_seed(options.pop("seed"))
    try:
        with in_bfloat16(network):
            for prompt in options.pop("prompt"):
                texts = generate_text(network, prompt, tokenizer=tokenizer, **options)
                _show(prompt)
                for text in texts:
                    _show(text)
                _show("\n")
    except ValueError as error:
        raise DataError(error) from error
    except KeyboardInterrupt:
        _show("\n")
    return 0


def _show(text: str) -> None:
    """Print text; on a terminal with its control characters escaped, which could act on it."""
    if sys.stdout.isatty():
        text = "".join(
            x.encode("unicode_escape").decode() if unicodedata.category(x) in ("Cc", "Cf") and x not in "\n\t" else x
            for x in text
        )
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
