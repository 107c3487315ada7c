"""Between what a data module gives and what the network generates: pixels, or an autoencoder's latents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ndlightnet.data.errors import DataError, one_line


class Pixels:
    """The network generates the normalised samples of a data module themselves."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Map normalised samples (batch, channels, *space) to what the network generates, float32.
        generator: for draws that can be repeated, on x's device."""
        return x

    def decode(self, latents: Tensor) -> Tensor:
        """Map what the network has generated to pixels (batch, channels, *space) uint8."""
        pixels: Tensor = self.data.to_pixels(latents)
        return pixels

    def shape(self, space: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of what the network generates for samples of these sizes."""
        return tuple(space)

    def channels(self, pixels: int) -> int:
        """Return the network's channels for samples of so many channels."""
        return pixels


class Latents(Pixels):
    """The network generates the latents of images of an AutoencoderKL of diffusers.

    path: its folder, as `save_pretrained` writes it; nothing is downloaded. DataError for a folder
    that holds no such autoencoder.
    """

    def __init__(self, data: Any, path: str) -> None:
        from diffusers import AutoencoderKL

        super().__init__(data)
        if not (Path(path) / "config.json").is_file():
            raise DataError(f"model.autoencoder={path}: expected a folder of an AutoencoderKL")
        try:
            loaded = AutoencoderKL.from_pretrained(path, local_files_only=True, use_safetensors=True)
        except Exception as error:  # its class depends on what is in the folder
            raise DataError(f"model.autoencoder={path}: {one_line(error)}") from error
        self.net: Any = loaded.eval().requires_grad_(False)
        config = self.net.config
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        self.shift, self.scale = config.shift_factor or 0.0, config.scaling_factor

    @torch.no_grad()
    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        pixels = self.data.to_pixels(x).float() / 127.5 - 1
        latents: Tensor = self.net.to(x.device).encode(pixels).latent_dist.sample(generator)
        # under autocast in 16 bits, in which the noise and its velocity would be rounded
        return (latents.float() - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        # one at a time, as large images need much memory
        images = [self.net.to(one.device).decode(one / self.scale + self.shift).sample for one in latents.split(1)]
        pixels = (torch.cat(images).float() + 1) * 127.5
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def shape(self, space: Sequence[int]) -> tuple[int, ...]:
        if len(space) != 2 or any(side % self.factor for side in space):
            raise DataError(
                f"model.autoencoder: samples of {tuple(space)}, expected images whose sides are "
                f"multiples of {self.factor}"
            )
        return tuple(side // self.factor for side in space)

    def channels(self, pixels: int) -> int:
        if pixels != self.net.config.in_channels:
            raise DataError(f"model.autoencoder: takes {self.net.config.in_channels} channels, the data have {pixels}")
        return int(self.net.config.latent_channels)
