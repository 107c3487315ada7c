"""Tiny models of Hugging Face transformers, with wide weights, and their inputs."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**SIZES, **WORDS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
BART = {**WORDS, "d_model": 32, "bos_token_id": 1, "decoder_start_token_id": 1}
BART |= {"eos_token_id": None, "forced_eos_token_id": None}
for _half in ("encoder", "decoder"):
    BART |= {f"{_half}_layers": 2, f"{_half}_ffn_dim": 40, f"{_half}_attention_heads": 4}


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def videomae() -> nn.Module:
    sizes = {"image_size": 8, "patch_size": 4, "num_frames": 4, "num_labels": 3}
    return transformers.VideoMAEForVideoClassification(transformers.VideoMAEConfig(**SIZES, **sizes))


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


def gemma2() -> Any:
    sizes = {**DECODER, "head_dim": 8}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes))


def gpt_oss() -> Any:
    sizes = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))


def t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, vocab_size=50, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def llama4() -> Any:
    sizes = {**DECODER, "attention_chunk_size": 4, "intermediate_size_mlp": 40, "head_dim": 8}
    sizes |= {"num_local_experts": 2, "layer_types": ["chunked_attention"] * 2}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
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
    "BART, padding": (bart, {"input_ids": words(), "decoder_input_ids": words(2, 5), "attention_mask": padding(False)}),
    "ModernBERT, window": (modernbert, {"input_ids": words()}),
    "ModernBERT, window, padding": (modernbert, {"input_ids": words(), "attention_mask": padding(False)}),
    "ModernBERT, longer window": (partial(modernbert, 32), {"input_ids": words()}),
    "CLIP text, padding": (clip, {"input_ids": words(), "attention_mask": padding(False)}),
}
