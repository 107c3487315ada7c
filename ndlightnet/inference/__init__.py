"""Prediction with trained networks: logits, labels that fit in memory, clips, ensembles, texts,
samples of a diffusion."""

from ndlightnet.inference.beam_search import beam_search
from ndlightnet.inference.generate import generate, generate_text
from ndlightnet.inference.labels import keep_largest, predict_labels
from ndlightnet.inference.logits import predict_clips, predict_clips_early, predict_volume
from ndlightnet.inference.networks import Ensemble, Mirrored, OutOfCore, mirrorings
from ndlightnet.inference.sample import sample

__all__ = [
    "Ensemble",
    "Mirrored",
    "OutOfCore",
    "beam_search",
    "generate",
    "generate_text",
    "keep_largest",
    "mirrorings",
    "predict_clips",
    "predict_clips_early",
    "predict_labels",
    "predict_volume",
    "sample",
]
