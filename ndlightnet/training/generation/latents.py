"""Between what a data module gives and what the network generates: pixels, or an autoencoder's latents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ndlightnet.data.errors import DataError, atomic_write, one_line, readable
from ndlightnet.data.image.image_folder import FolderImages, ImageFiles, Sample

CHUNK = 256  # images of a file of latents


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
        self.path = Path(path)
        self.net: Any = loaded.eval().requires_grad_(False)
        config = self.net.config
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        self.shift, self.scale = config.shift_factor or 0.0, config.scaling_factor

    @torch.no_grad()
    def moments(self, x: Tensor) -> Tensor:
        """Return means and standard deviations of latents of samples, (batch, 2 channels, *space) float32."""
        pixels = self.data.to_pixels(x).float() / 127.5 - 1
        latents = self.net.to(x.device).encode(pixels).latent_dist
        # under autocast in 16 bits, in which the noise and its velocity would be rounded
        return torch.cat([latents.mean, latents.std], 1).float()

    def encode(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Map normalised samples, or the float16 moments of CachedLatents, to latents that are drawn."""
        mean, std = (x.float() if x.dtype == torch.float16 else self.moments(x)).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=generator, device=x.device)
        return (mean + std * noise - self.shift) * self.scale

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


class CachedLatents(Dataset[Sample]):
    """Dataset of moments (2 channels, *space) float16, see `Latents.moments`, in place of training images.

    chunks: files, of CHUNK images each: "moments" (images, 2, 2 channels, *space) of each image and of its mirror
    image, "labels" (images,) int64. hflip: probability of the mirror image, drawn as torchvision does.
    """

    def __init__(self, chunks: Sequence[Path], files: ImageFiles, hflip: float) -> None:
        self.chunks, self.files, self.hflip = chunks, files, hflip

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> Sample:
        with readable(self.chunks[number // CHUNK]):  # mapped: an image reads its part of the file
            chunk = torch.load(self.chunks[number // CHUNK], mmap=True, weights_only=True)
        row, mirrored = number % CHUNK % len(chunk["labels"]), int(torch.rand(1) < self.hflip)
        return Sample(chunk["moments"][row, mirrored], int(chunk["labels"][row]), number, None, [])


def cached_latents(folder: Path, codec: Any, trainer: Any) -> CachedLatents:
    """Return the latents, by `codec`, of the training images of its ImageFolders; all processes encode those that
    `folder` lacks. DataError if it has those of images of other names or labels, of another size or of another
    autoencoder; what is in the images is not compared."""
    data = codec.data
    files = data.train_set.files
    weights = [codec.path / "config.json", *sorted(codec.path.glob("*.safetensors"))]
    record = {
        "images": sha256(files.names.tobytes() + files.labels.tobytes()).hexdigest(),
        "size": [data.channels, *data.space, data.interpolation],
        "autoencoder": sha256(b"".join(path.read_bytes() for path in weights)).hexdigest(),
    }
    if not (file := folder / "latents.json").exists():
        with atomic_write(file) as draft:  # all processes write the same
            draft.write_text(json.dumps(record))
    with readable(file):
        existing = dict(json.loads(file.read_text()))
    if changed := {key: existing.get(key) for key in record if existing.get(key) != record[key]}:
        expected = {key: record[key] for key in changed}
        raise DataError(f"model.latents={folder}: has latents of {changed}, expected {expected}; remove the folder")
    # a file that cannot be read is replaced by the next good one, as without a cache
    images, count = FolderImages(files, data.channels, data.evaluate, train=True), len(files)
    chunks = [folder / f"{n:06d}.pt" for n in range(-(-count // CHUNK))]
    missing = [n for n in range(trainer.global_rank, len(chunks), trainer.world_size) if not chunks[n].exists()]
    sampler = [[*range(n * CHUNK, min(count, (n + 1) * CHUNK))] for n in missing]
    loader = DataLoader(images, batch_sampler=sampler, num_workers=data.workers, collate_fn=data.collate)
    quiet = trainer.progress_bar_callback is None or not trainer.is_global_zero
    for n, batch in zip(missing, track(loader, f"encoding {count} images", len(missing), disable=quiet), strict=True):
        batch = data.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        x, labels, _ = data.on_after_batch_transfer(batch, 0)
        with trainer.precision_plugin.forward_context():
            pairs = [torch.stack([codec.moments(y), codec.moments(y.flip(-1))], 1) for y in x.split(data.batch_size)]
        with atomic_write(chunks[n]) as draft, draft.open("wb") as file_object:
            torch.save({"moments": torch.cat(pairs).half().cpu(), "labels": labels.cpu()}, file_object)
    trainer.strategy.barrier()
    return CachedLatents(chunks, files, data.hflip)
