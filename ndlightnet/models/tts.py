"""Text to speech: networks that map a text to the spectrum of its recording, some frames a step or all at once."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from ndlightnet.layout.abstract import check_integers
from ndlightnet.models.backbone import NDLightNet
from ndlightnet.models.config import recorded
from ndlightnet.models.hub import Pretrained
from ndlightnet.models.seq2seq import Seq2Seq, mixer_of_decoder
from ndlightnet.nn.block import init_network
from ndlightnet.nn.initial import Device
from ndlightnet.nn.mixers import LightNetAttention
from ndlightnet.nn.mixers.base import Factories
from ndlightnet.nn.position import TPE
from ndlightnet.ops.dtypes import check_tensors
from ndlightnet.parallel import refuse_shards


class Frames(NamedTuple):
    """What AutoregressiveTTS predicts: spectra (batch, frames, bands), and logits of the end (batch, steps)."""

    spectra: Tensor
    stop: Tensor


class AlignedFrames(NamedTuple):
    """What ParallelTTS predicts: spectra (batch, frames, bands); of each letter the mean of its frames (batch, length,
    bands) and log(1 + frames) (batch, length); and the numbers of frames that the search gave it (batch, length)."""

    spectra: Tensor
    means: Tensor
    log_durations: Tensor
    durations: Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of x (batch, length, ...) where mask (batch, length) is True."""
    x = x.flatten(2).mean(2) if x.ndim > 2 else x
    return (x * mask).sum() / mask.sum()


def _check_spectra(spectra: Tensor, batch: int, bands: int) -> None:
    check_tensors(spectra=spectra)
    shape = (batch, max(1, spectra.shape[1]), bands) if spectra.ndim == 3 else None
    if tuple(spectra.shape) != shape or not spectra.is_floating_point():
        expected = f"floats ({batch}, frames, bands={bands}), one frame or more"
        raise ValueError(f"spectra {tuple(spectra.shape)} {spectra.dtype}: expected {expected}")


class AutoregressiveTTS(Seq2Seq):
    """Map a text to the spectrum of its recording, some frames a step after those before, as Transformer-TTS does
    (arXiv 1809.08895): the decoder of Seq2Seq reads the last frame through three layers with dropout of 0.5, and
    predicts the next ones and whether they are the last. It has no network behind it that refines them.

    Args:
        vocab_size: letters. bands: of a spectrum. frames_per_step: frames that are predicted at once.
        others: as in Seq2Seq.
    """

    pipeline_tag = "text-to-speech"
    learns_alignment = True

    @recorded
    def __init__(self, vocab_size: int = 256, bands: int = 80, frames_per_step: int = 4, **kwargs: Any) -> None:
        check_integers(1, bands=bands, frames_per_step=frames_per_step)
        super().__init__(vocab_size, **kwargs)
        self.bands, self.frames_per_step, dim = bands, frames_per_step, self.embed_dim
        layers = (nn.Linear(bands, dim), nn.ReLU(), nn.Dropout(0.5), nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(0.5))
        self.prenet = nn.Sequential(*layers, nn.Linear(dim, dim))
        self.head = nn.Linear(dim, frames_per_step * bands + 1)
        init_network(self.prenet, self.head)

    def forward(  # type: ignore[override]
        self, text: Tensor, spectra: Tensor, mask: Tensor | None = None, frame_mask: Tensor | None = None
    ) -> Frames:
        """Predict every step's frames from the recorded ones before it.

        text: letters (batch, length), int64; mask: bool of its shape, False = padding. spectra: (batch, frames, bands),
        whose padding, False in frame_mask, is at the end, where no frame sees it. ValueError for other shapes.
        """
        refuse_shards("AutoregressiveTTS")
        _check_spectra(spectra, len(text), self.bands)
        return self._decoded(spectra, self.encode(text, mask), mask)

    def _decoded(self, spectra: Tensor, context: Tensor, mask: Tensor | None) -> Frames:
        steps = math.ceil(spectra.shape[1] / self.frames_per_step)
        before = self.prenet(spectra[:, self.frames_per_step - 1 :: self.frames_per_step][:, : steps - 1])
        tokens = torch.cat([self._begin(context).to(before.dtype), before], 1)
        predicted, stop = self._frames(self.decoder(tokens, context, mask))
        return Frames(predicted[:, : spectra.shape[1]], stop)

    def _begin(self, context: Tensor) -> Tensor:
        """Return the token before the first frame: letter 0. A token of zeros is where norms have no gradient."""
        letter = torch.zeros(len(context), 1, dtype=torch.int64, device=context.device)
        token: Tensor = self.encoder.embed(letter)
        return token

    def _frames(self, features: Tensor) -> tuple[Tensor, Tensor]:
        frames, stop = self.head(features).split([self.frames_per_step * self.bands, 1], -1)
        return frames.unflatten(2, (-1, self.bands)).flatten(1, 2), stop[..., 0]

    def losses(self, predicted: Frames, spectra: Tensor, mask: Tensor, frame_mask: Tensor) -> dict[str, Tensor]:
        """Return the mean absolute error of the spectra and the cross-entropy of the last step, means over what the
        masks, of letters and of frames, let through."""
        steps = frame_mask[:, :: self.frames_per_step]
        last = steps & ~pad(steps[:, 1:], (0, 1))
        stop = binary_cross_entropy_with_logits(predicted.stop.float(), last.float(), reduction="none")
        return {
            "spectrum_loss": masked_mean((predicted.spectra - spectra).abs().float(), frame_mask),
            "stop_loss": masked_mean(stop, steps),
        }

    @torch.no_grad()
    def synthesize(self, text: Tensor, most: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return spectra (batch, frames, bands) of texts (batch, length), step by step, and how many frames each has,
        (batch,), at most `most`."""
        check_integers(1, most=most)
        state, pieces = self.init_state(text, mask), list[Tensor]()
        token = self._begin(text)
        steps = torch.zeros(len(text), dtype=torch.int64, device=text.device)
        goes_on = torch.ones_like(steps, dtype=torch.bool)
        while len(pieces) * self.frames_per_step < most and goes_on.any():
            features, state = self.decoder.advance(token, state)
            piece, stop = self._frames(features)
            steps, goes_on, token = steps + goes_on, goes_on & (stop[:, -1] <= 0), self.prenet(piece[:, -1:])
            pieces.append(piece)
        return torch.cat(pieces, 1)[:, :most], (steps * self.frames_per_step).clamp(max=most)

    def alignment(
        self, text: Tensor, spectra: Tensor, mask: Tensor | None = None, frame_mask: Tensor | None = None
    ) -> Tensor:
        """Return how far each step's frames depend on each letter, shares (batch, steps, length): the length of the
        gradient of a random combination of the frames by what the encoder says of the letter. So any mixer has one."""
        context = self.encode(text, mask).detach().requires_grad_()
        predicted = self._decoded(spectra, context, mask).spectra.split(self.frames_per_step, 1)
        weights = [torch.randn_like(step) for step in predicted]
        rows = [
            torch.autograd.grad(step, context, weight, retain_graph=True)[0].norm(dim=-1)
            for step, weight in zip(predicted, weights, strict=True)
        ]
        lengths = torch.stack(rows, 1)
        return lengths / lengths.sum(-1, keepdim=True).clamp(min=1e-12)


class ParallelTTS(Pretrained):
    """Map a text to the spectrum of its recording, all frames at once, as FastSpeech 2 does (arXiv 2006.04558, without
    its pitch and energy): an encoder reads the letters, each is repeated for the frames of its duration, and a decoder
    reads these. No one tells it durations: of all divisions of a recording among its letters, in order, the search of
    Glow-TTS (arXiv 2005.11129) takes that whose frames are closest to a mean that the encoder predicts for each letter.

    Args:
        vocab_size: letters. bands: of a spectrum.
        embed_dim, depth, decoder_depth: width and numbers of blocks.
        mixer: of encoder and decoder, as in NDLightNet. decoder_mixer: of the decoder; default: as the encoder's.
        tpe, tpe_states, dropout, device, dtype: as in NDLightNet.
    """

    pipeline_tag = "text-to-speech"
    learns_alignment = False  # but searches it

    @recorded
    def __init__(
        self,
        vocab_size: int = 256,
        bands: int = 80,
        *,
        embed_dim: int = 256,
        depth: int = 4,
        decoder_depth: int = 4,
        mixer: Factories = LightNetAttention,
        decoder_mixer: Factories | None = None,
        tpe: TPE = True,
        tpe_states: int = 128,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integers(1, bands=bands, decoder_depth=decoder_depth)
        self.vocab_size, self.bands, self.embed_dim = vocab_size, bands, embed_dim
        shared: Any = dict(num_classes=0, embed_dim=embed_dim, tpe=tpe, tpe_states=tpe_states, dropout=dropout)
        self.encoder = NDLightNet(1, vocab_size=vocab_size, depth=depth, mixer=mixer, **shared)
        later = mixer_of_decoder(mixer, decoder_mixer)
        self.decoder = NDLightNet(1, embed_dim, patch_size=1, depth=decoder_depth, mixer=later, **shared)
        self.mean = nn.Linear(embed_dim, bands)
        self.duration = nn.Sequential(nn.Linear(embed_dim, embed_dim), nn.SiLU(), nn.Linear(embed_dim, 1))
        self.head = nn.Linear(embed_dim, bands)
        init_network(self.mean, self.duration, self.head)

    def forward(
        self, text: Tensor, spectra: Tensor, mask: Tensor | None = None, frame_mask: Tensor | None = None
    ) -> AlignedFrames:
        """Predict the frames of letters that last as long as the search says of the recorded ones.

        text: letters (batch, length), int64; mask: bool of its shape, False = padding at the end. spectra: (batch,
        frames, bands), at least as many as letters; frame_mask: bool (batch, frames), False = padding at the end.
        ValueError for other shapes and too few frames.
        """
        refuse_shards("ParallelTTS")
        _check_spectra(spectra, len(text), self.bands)
        features = self.encoder.forward_features(text, mask)
        means = self.mean(features)
        durations = search_durations(means.detach(), spectra, mask, frame_mask)
        log_durations = self.duration(features.detach())[..., 0]  # the encoder learns from spectra alone
        answer = self._decoded(features, durations, spectra.shape[1], frame_mask)
        return AlignedFrames(answer, means, log_durations, durations)

    def _decoded(self, features: Tensor, durations: Tensor, frames: int, frame_mask: Tensor | None) -> Tensor:
        x = features.take_along_dim(letters_of_frames(durations, frames)[..., None], 1)
        answer: Tensor = self.head(self.decoder.forward_features(x.mT, frame_mask))
        return answer

    def losses(self, predicted: AlignedFrames, spectra: Tensor, mask: Tensor, frame_mask: Tensor) -> dict[str, Tensor]:
        """Return the mean absolute error of the spectra, half the squared distance of frames from their letters' means,
        and the squared error of log(1 + frames), means over what the masks, of letters and of frames, let through."""
        letters = letters_of_frames(predicted.durations, spectra.shape[1])
        means = predicted.means.take_along_dim(letters[..., None], 1)
        target = predicted.durations.to(torch.float32).log1p()
        return {
            "spectrum_loss": masked_mean((predicted.spectra - spectra).abs().float(), frame_mask),
            "mean_loss": masked_mean((means - spectra).square().float() / 2, frame_mask),
            "duration_loss": masked_mean((predicted.log_durations - target).square().float(), mask),
        }

    @torch.no_grad()
    def synthesize(self, text: Tensor, most: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return spectra (batch, frames, bands) of texts (batch, length), and how many frames each has, (batch,), at
        most `most`: every letter has one or more, and what is beyond is left out."""
        check_integers(1, most=most)
        features = self.encoder.forward_features(text, mask)
        durations = self.duration(features)[..., 0].float().expm1().nan_to_num(1.0).clamp(1, most).round().long()
        durations = durations if mask is None else durations * mask
        ends = durations.cumsum(1).clamp(max=most)
        lengths, durations = ends[:, -1], ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
        frames = int(lengths.max())
        inside = torch.arange(frames, device=text.device) < lengths[:, None]
        return self._decoded(features, durations, frames, inside), lengths

    def alignment(
        self, text: Tensor, spectra: Tensor, mask: Tensor | None = None, frame_mask: Tensor | None = None
    ) -> Tensor:
        """Return which letter the search gives each frame to, (batch, frames, length), 1 for it and 0 for others."""
        durations = self(text, spectra, mask, frame_mask).durations
        letters = letters_of_frames(durations, spectra.shape[1])
        return nn.functional.one_hot(letters, text.shape[1]).to(spectra.dtype)


def letters_of_frames(durations: Tensor, frames: int) -> Tensor:
    """Return the letter of each frame, (batch, frames), of durations (batch, length) in frames; behind the end of a
    sample its last letter."""
    ends = durations.cumsum(1)
    places = torch.arange(frames, device=durations.device).expand(len(durations), -1).contiguous()
    return torch.searchsorted(ends, places, right=True).clamp(max=durations.shape[1] - 1)


@torch.no_grad()
def search_durations(means: Tensor, spectra: Tensor, mask: Tensor | None, frame_mask: Tensor | None) -> Tensor:
    """Return the durations (batch, length), 1 or more, int64, that divide the frames of a sample among its letters, in
    order, with the least sum of squared distances between frames (batch, frames, bands) and the means (batch, length,
    bands) of their letters (Algorithm 1 of arXiv 2005.11129). Padding, False in a mask, is at the end and has 0.
    ValueError for a sample with fewer frames than letters."""
    batch, length, frames = len(means), means.shape[1], spectra.shape[1]
    device = means.device
    letters = torch.full((batch,), length, device=device) if mask is None else mask.sum(1)
    sizes = torch.full((batch,), frames, device=device) if frame_mask is None else frame_mask.sum(1)
    if not means.is_meta and batch and bool((short := sizes < letters).any()):
        row = int(short.nonzero()[0, 0])
        raise ValueError(
            f"spectra: sample {row} has {int(sizes[row])} frames, expected one or more of each of its "
            f"{int(letters[row])} letters"
        )
    costs = torch.cdist(spectra.float(), means.float(), compute_mode="donot_use_mm_for_euclid_dist").square()
    best = torch.full((batch, length), torch.inf, device=device)
    best[:, :1] = costs[:, 0, :1]
    entered = torch.zeros(batch, frames, length, dtype=torch.bool, device=device)  # whether a letter begins here
    for frame in range(1, frames):
        before = pad(best[:, :-1], (1, 0), value=torch.inf)
        entered[:, frame] = before < best
        best = torch.minimum(before, best) + costs[:, frame]
    durations = torch.zeros(batch, length, dtype=torch.int64, device=device)
    letter = (letters - 1).clamp(min=0)[:, None]
    for frame in range(frames - 1, -1, -1):
        inside = (frame < sizes)[:, None]
        durations.scatter_add_(1, letter, inside.long())
        letter = letter - (entered[:, frame].gather(1, letter) & inside).long()
    return durations
