"""Seq2Seq: an encoder reads a text as a whole, a decoder that reads its output writes another, word by word."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ndlightnet.layout.abstract import check_integers
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.config import Configured, recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.nn.block import init_network
from ndlightnet.nn.cross_block import CrossBlock, CrossState
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories, Mixer, layer_factories, reads_context
from ndlightnet.nn.position import TPE, build_tpe
from ndlightnet.ops.dtypes import check_tensors
from ndlightnet.parallel import refuse_shards


class DecoderState(NamedTuple):
    """State of a decoder after the tokens so far, with a row for each sample."""

    position: Tensor  # (batch,) int64: tokens so far
    tpe: Tensor | None  # (batch, dim, states)
    layers: tuple[CrossState, ...]

    def rows(self, index: Tensor) -> DecoderState:
        """Return the state with these rows, int64 (rows,), which may repeat: beams of a sample, or beams that others
        take the place of."""
        picked: DecoderState = tree_map(lambda x: x[index] if isinstance(x, Tensor) else x, self)
        return picked


class Decoder(Configured):
    """Tokens on one axis -> MD-TPE -> causal blocks that read a context -> norm.

    Arguments are Seq2Seq's.
    """

    tpe: Any
    blocks: Any

    def __init__(
        self, depth: int, mixer: Factories, cross: Factories, embed_dim: int, tpe: TPE, tpe_states: int, dropout: float
    ) -> None:
        super().__init__()
        mixers = layer_factories("decoder_mixer", mixer, depth, dims=1, causal=True)
        # without `dims`: a layer that reads another source mixes nothing locally
        crosses = layer_factories("cross", cross, depth, dims=None)
        self.tpe = build_tpe(tpe, 1, embed_dim, tpe_states, causal=True)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.blocks = nn.ModuleList(
            CrossBlock(embed_dim, *pair, dropout=dropout) for pair in zip(mixers, crosses, strict=True)
        )
        for block in self.blocks:
            if not (isinstance(block.cross, Mixer) and reads_context(block.cross)):
                raise ValueError(f"cross: {type(block.cross).__name__} has no cross form, expected a mixer with one")
            reach = getattr(block.cross, "reach", 0)
            if reach is None:
                raise ValueError(
                    "cross: its reach=None depends on the length of the target, which is not known while it is "
                    "written; expected a number, such as {'CosformerAttention': {'reach': 4096}}"
                )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        init_network(self)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None = None) -> Tensor:
        """Map tokens (batch, length, dim) and a context (batch, source length, dim) to features (batch, length, dim).
        context_mask: bool (batch, source length), False = padding. No token sees a later one."""
        x = self.drop(x if self.tpe is None else self.tpe(x))
        for block in self.blocks:
            x = block(x, context, context_mask)
        return self.norm(x)

    def init_state(self, context: Tensor, context_mask: Tensor | None = None) -> DecoderState:
        """Return the state before the first token, for `advance`."""
        batch, device = len(context), context.device
        count = torch.zeros(batch, dtype=torch.int64, device=device)
        tpe = None if self.tpe is None else self.tpe.init_state(batch, (), device)
        return DecoderState(count, tpe, tuple(block.before(context, context_mask) for block in self.blocks))

    def advance(self, x: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Map the next tokens (batch, length, dim) to the features of `forward`, and return the next state. It grows
        only by mixers that cannot advance, such as softmax attention."""
        tpe, layers = state.tpe, []
        if self.tpe is not None:
            x, tpe = self.tpe.advance(x, tpe)
        x = self.drop(x)
        for block, before in zip(self.blocks, state.layers, strict=True):
            x, after = block.advance(x, before, state.position)
            layers.append(after)
        return self.norm(x), state._replace(position=state.position + x.shape[1], tpe=tpe, layers=tuple(layers))


def mixer_of_decoder(mixer: Factories, decoder_mixer: Factories | None) -> Factories:
    """Return `decoder_mixer`, by default the encoder's. ValueError if that is a list for the encoder's layers."""
    if decoder_mixer is None and isinstance(mixer, list | tuple):
        raise ValueError("decoder_mixer=None: expected one beside a list for the encoder's layers")
    return mixer if decoder_mixer is None else decoder_mixer


class Seq2Seq(Pretrained):
    """Map a text to another (Vaswani et al. 2017): an NDLightNet reads the source, not causally; a decoder of causal
    blocks with cross attention predicts each word of the target from those before it. One table of words is the
    embedding of both and, transposed, the head.

    Args:
        vocab_size: words, of source and target.
        embed_dim, depth, decoder_depth: width and numbers of blocks.
        mixer: of the encoder, as in NDLightNet. decoder_mixer: of the decoder's causal form; default: as the encoder's.
            cross: how the decoder's layers read the encoder's output, a mixer with a cross form; default: LightNet
            attention without a position code, as positions of a source and a target have nothing in common.
        tpe, tpe_states: of the MD-TPE after both embeddings, as in NDLightNet.
        dropout: of the embedded tokens and of each branch of a block.
        device, dtype: as in NDLightNet.
    """

    pipeline_tag: str | None = "summarization"
    encoder: Any
    decoder: Any

    @recorded
    def __init__(
        self,
        vocab_size: int,
        *,
        embed_dim: int = 512,
        depth: int = 6,
        decoder_depth: int = 6,
        mixer: Factories = LightNetAttention,
        decoder_mixer: Factories | None = None,
        cross: Factories | None = None,
        tpe: TPE = True,
        tpe_states: int = 128,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, decoder_depth=decoder_depth)
        self.vocab_size, self.embed_dim = vocab_size, embed_dim
        options: Any = dict(embed_dim=embed_dim, tpe=tpe, tpe_states=tpe_states, dropout=dropout)
        self.encoder = NDLightNet(1, num_classes=0, vocab_size=vocab_size, depth=depth, mixer=mixer, **options)
        later = mixer_of_decoder(mixer, decoder_mixer)
        cross = partial(LightNetAttention, lrpe=None) if cross is None else cross
        self.decoder = Decoder(decoder_depth, later, cross, **options)

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map words (batch, source length), int64, to what the decoder reads, (batch, source length, embed_dim). mask:
        bool (batch, source length), False = padding."""
        features: Tensor = self.encoder.forward_features(source, mask)
        return features

    def forward(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits (batch, target length, vocab_size) of the word after each word of the target.

        source: (batch, source length), int64; mask: bool of the same shape, False = padding: each sample gets what it
        gets alone. target: (batch, target length), int64, whose padding is at the end, where no word sees it.
        Raises ValueError for other shapes and for words outside the vocabulary.
        """
        refuse_shards("Seq2Seq")
        context = self.encode(source, mask)
        return self._logits(self.decoder(self._embed("target", target, len(context)), context, mask))

    def init_state(self, source: Tensor, mask: Tensor | None = None) -> DecoderState:
        """Read a source (batch, source length) and return the state before the first word of its target."""
        state: DecoderState = self.decoder.init_state(self.encode(source, mask), mask)
        return state

    def advance(self, words: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Map the next words (batch, length) of targets to the logits of `forward`, and return the next state."""
        x = self._embed("words", words, len(state.position))
        if not words.shape[1]:
            raise ValueError(f"words {tuple(words.shape)}: expected one word or more")
        features, state = self.decoder.advance(x, state)
        return self._logits(features), state

    def _embed(self, name: str, words: Tensor, batch: int) -> Tensor:
        check_tensors(**{name: words})
        if words.ndim != 2 or len(words) != batch or words.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} {tuple(words.shape)} {words.dtype}: expected words ({batch}, length), int64")
        x: Tensor = self.encoder.embed(words)
        return x

    def _logits(self, features: Tensor) -> Tensor:
        return nn.functional.linear(features, self.encoder.embed.weight)
