"""The LM Evaluation Harness (lm-eval): networks of this library as its model "ndlightnet".

    python -m ndlightnet.integrations.lm_eval run --model ndlightnet --model_args pretrained=runs/x --tasks piqa

is its own command line; in Python, importing this module registers the name for `lm_eval.simple_evaluate`, which takes
`NDLightNetLM(network, tokenizer)` as well. Contexts have any length: nothing is cut off, and a document of
`loglikelihood_rolling` is one stream from its first token to its last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from ndlightnet.data.text.tokenizer import Tokenizer, load_tokenizer
from ndlightnet.inference.generate import generate_text
from ndlightnet.inference.likelihood import in_bfloat16, log_likelihoods, rolling_log_likelihood
from ndlightnet.models import NDLightNet

DRAWS = {"temperature", "top_k", "top_p", "repetition_penalty"}


@register_model("ndlightnet")
class NDLightNetLM(TemplateLM):  # type: ignore[misc]
    """A causal language model of ndlightnet.

    Args:
        pretrained: a checkpoint, the folder of a run (its best or else last checkpoint), or an NDLightNet.
        tokenizer: of an NDLightNet; a checkpoint has its own.
        device: of torch; default: a GPU if there is one; of an NDLightNet where it is.
        budget: tokens that are packed end to end and read at once.
        max_gen_toks: tokens to generate at most, where a task does not say.
        batch_size, max_batch_size: as the harness passes them; not used, as packs are of `budget` tokens.

    On a GPU it computes in bfloat16 autocast, logits in float32. Raises ValueError for what is no such checkpoint.
    """

    def __init__(
        self,
        pretrained: str | Path | NDLightNet,
        tokenizer: Tokenizer | None = None,
        device: str | torch.device | None = None,
        budget: int = 2**14,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, NDLightNet):
            folder = Path(pretrained)
            names = (folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
            path = next((name for name in names if name.is_file()), folder)
            pretrained = NDLightNet.from_checkpoint(path)
            tokenizer = load_tokenizer(path)
            device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if tokenizer is None:
            raise ValueError("tokenizer=None: expected that of the network")
        self.network = pretrained.to(device).eval()
        self.codec, self.budget, self.max_gen_toks = tokenizer, budget, max_gen_toks
        self._device = next(self.network.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.codec.end

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        raise ValueError(f"chat_template={chat_template}: expected none, --apply_chat_template is for other models")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text, without special ones in any case."""
        return self.codec.encode([string])[0]

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any) -> Any:
        """Return (log-likelihood, whether greedy) of each ((context, continuation), their tokens ...)."""
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        with tqdm(total=len(pairs), desc="Log-likelihoods", disable=disable_tqdm) as bar, in_bfloat16(self.network):
            return log_likelihoods(self.network, pairs, self.budget, bar.update)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each document, with all of its tokens before as the context of each."""
        with in_bfloat16(self.network):
            return [
                rolling_log_likelihood(self.network, self.tok_encode(request.args[0]), self.prefix_token_id)
                for request in tqdm(requests, desc="Documents", disable=disable_tqdm)
            ]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, with the arguments until, max_gen_toks, do_sample, temperature,
        top_k, top_p and repetition_penalty of its request. Raises ValueError for others."""
        texts = []
        for request in tqdm(requests, desc="Continuations", disable=disable_tqdm):
            context, options = request.args
            options = normalize_gen_kwargs(options, self.max_gen_toks)
            length, until = options.pop("max_gen_toks"), [end for end in options.pop("until") if end]
            options.setdefault("temperature", float(options.pop("do_sample")))
            if unknown := options.keys() - DRAWS:
                raise ValueError(f"generation_kwargs {', '.join(sorted(unknown))}: expected {', '.join(sorted(DRAWS))}")
            with in_bfloat16(self.network):
                pieces = generate_text(self.network, context, length, tokenizer=self.codec, stop=until, **options)
                texts.append("".join(pieces))
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
