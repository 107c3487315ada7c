"""MONAI transforms between `volumes.load_case` and a network: prepare, augment, and the way back.

A prepared volume lies along RAS axes (x to the right, y to the front, z to the head), whatever
index order its file has: left and right are not to be guessed. That is a flip and a permutation,
nothing is interpolated unless a spacing is asked for. `invert` undoes both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data.dataset import CacheDataset
from monai.data.meta_tensor import MetaTensor
from monai.transforms.compose import Compose
from monai.transforms.croppad.dictionary import RandCropByLabelClassesd, SpatialPadd
from monai.transforms.intensity.array import ClipIntensityPercentiles, NormalizeIntensity
from monai.transforms.intensity.dictionary import (
    RandAdjustContrastd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    RandScaleIntensityd,
    RandShiftIntensityd,
)
from monai.transforms.spatial.array import Orientation, ResampleToMatch
from monai.transforms.spatial.dictionary import (
    Orientationd,
    RandAffined,
    RandFlipd,
    RandSimulateLowResolutiond,
    Spacingd,
)
from monai.transforms.transform import MapTransform, Transform
from monai.transforms.utility.dictionary import (
    CastToTyped,
    ClassesToIndicesd,
    EnsureTyped,
    SelectItemsd,
)
from torch import Tensor

from ndlightnet.data.volumes import Case, load_case

KEPT_PER_CLASS = 20_000  # crop centres kept for every class of a volume; they are held in memory


def preprocess(modalities: Sequence[str], spacing: Sequence[float] | None = None) -> Compose:
    """What `load_case` returns -> the same along RAS axes, at `spacing` (mm along x, y, z; None:
    the file's own), and with every channel brought to values of order one by its modality (the
    decathlon's names):

    CT: asinh((HU - 40) / 100), HU clipped to -1000..2000. Steep where soft tissue lies (10 HU ->
    0.1), yet air (-3.0), lung and bone (2.3 at 500 HU) stay apart; a linear map has to give up one
    or the other. PET: asinh(SUV / 2). Linear below the liver's uptake (about 2), logarithmic above:
    20 SUV -> 3.0. Any other (MRI): clipped to the percentiles 0.5 and 99.5, then zero mean and unit
    deviation over the volume.
    """
    steps: list[Transform] = [
        Orientationd(("image", "label"), "RAS", labels=None, allow_missing_keys=True)
    ]
    if spacing is not None:
        mode = ("bilinear", "nearest")
        steps.append(
            Spacingd(("image", "label"), tuple(spacing), mode=mode, allow_missing_keys=True)
        )
        steps.append(
            CastToTyped("label", torch.int16, allow_missing_keys=True)
        )  # Spacing gives float
    return Compose([*steps, ScaleByModalityd("image", modalities)])


class ScaleByModalityd(MapTransform):
    """Scales channel c, in the way that `preprocess` says for modality c."""

    def __init__(self, keys: str, modalities: Sequence[str]) -> None:
        super().__init__(keys)
        self.scales = [scale_of(modality) for modality in modalities]

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        data = dict(data)
        for key in map(str, self.keys):
            image = data[key]
            if len(image) != len(self.scales):
                raise ValueError(f"{len(image)} channels for {len(self.scales)} modalities")
            scaled = [scale(image.as_tensor()[c : c + 1]) for c, scale in enumerate(self.scales)]
            data[key] = MetaTensor(
                torch.cat(scaled).float(),
                meta=image.meta,
                applied_operations=image.applied_operations,
            )
        return data


def scale_of(modality: str) -> Callable[[Tensor], Tensor]:
    """The intensity map of a modality; tensors (1, x, y, z)."""
    name = modality.upper()
    if name == "CT":
        return _scale_ct
    if name in ("PET", "PT"):
        return _scale_pet
    return Compose([ClipIntensityPercentiles(0.5, 99.5), NormalizeIntensity()])


# Functions of the module, not lambdas: a dataset has to travel to worker processes.
def _scale_ct(hu: Tensor) -> Tensor:
    return torch.asinh((hu.clamp(-1000, 2000) - 40) / 100)


def _scale_pet(suv: Tensor) -> Tensor:
    return torch.asinh(suv / 2)


def augment(
    patch: Sequence[int], num_samples: int, num_classes: int, flip_axes: Sequence[int] = ()
) -> Compose:
    """A prepared case with a label -> a list of `num_samples` dictionaries {"image": float32
    (channels, *patch), "label": int64 (1, *patch), "name"}, plain tensors.

    Crops are centred on a voxel of a class drawn evenly; a volume smaller than `patch` is padded
    with zeros first. Probabilities follow nnU-Net. `flip_axes`: axes of the patch (0, 1, 2) that
    are mirrored half of the time; none where left and right matter.
    """
    both, image = ("image", "label"), "image"
    rotate, zoom = np.deg2rad(20), (-0.2, 0.25)
    steps: list[Transform] = [
        SpatialPadd(both, patch),
        # Deterministic, so that the dataset caches it: finding a class's voxels costs more than all
        # the rest.
        ClassesToIndicesd("label", num_classes=num_classes, max_samples_per_class=KEPT_PER_CLASS),
        RandCropByLabelClassesd(
            both, "label", patch, num_classes=num_classes, num_samples=num_samples,
            indices_key="label_cls_indices", warn=False,
        ),
        SelectItemsd((*both, "name")),
        EnsureTyped(both, dtype=torch.float32, track_meta=False),
        RandAffined(
            both, prob=0.3, rotate_range=[rotate] * 3, scale_range=[zoom] * 3,
            mode=("bilinear", "nearest"), padding_mode="reflection",
        ),
        *[RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in flip_axes],
        RandGaussianNoised(image, prob=0.1, std=0.3),
        RandGaussianSmoothd(image, (0.5, 1.0), (0.5, 1.0), (0.5, 1.0), prob=0.15),
        RandScaleIntensityd(image, factors=0.25, prob=0.15),
        RandShiftIntensityd(image, offsets=0.2, prob=0.15),
        RandSimulateLowResolutiond(image, prob=0.15, zoom_range=(0.5, 1.0)),
        RandAdjustContrastd(image, prob=0.2, gamma=(0.7, 1.5), retain_stats=True),
        EnsureTyped(both, dtype=(torch.float32, torch.int64), track_meta=False),
    ]  # fmt: skip
    return Compose(steps)


def invert(prediction: Tensor, prepared: dict[str, Any]) -> Tensor:
    """The way back: a prediction (channels, *space) on the grid of `prepared["image"]` ->
    (channels, x, y, z) on the grid of the file, fit for `save_labels`. Floating point (logits,
    probabilities) is interpolated where the spacing was changed, integers (labels) take the nearest
    voxel; otherwise every value stays as it is, only reordered. The result is on the CPU and has no
    gradient.

    Raises ValueError when the prediction is not on that grid.
    """
    image = prepared["image"]
    if prediction.shape[1:] != image.shape[1:]:
        raise ValueError(
            f"prediction has shape {tuple(prediction.shape[1:])}, "
            f"the volume {tuple(image.shape[1:])}"
        )
    affine, shape = image.meta["original_affine"], tuple(image.meta["spatial_shape"])
    axes: Any = nibabel.aff2axcodes(np.asarray(affine))  # type: ignore[no-untyped-call]
    codes = "".join(axes)
    volume = MetaTensor(prediction.detach().cpu().as_subclass(Tensor), affine=image.affine)
    turned: Any = Orientation(codes, labels=None)(volume)
    if tuple(turned.shape[1:]) == shape and torch.allclose(turned.affine, affine, atol=1e-3):
        return torch.as_tensor(turned.as_tensor())
    mode = "bilinear" if prediction.is_floating_point() else "nearest"
    target = MetaTensor(torch.empty(1, *shape), affine=affine)
    resample: Any = ResampleToMatch(mode=mode, padding_mode="border")
    return torch.as_tensor(resample(turned, img_dst=target).as_tensor()).to(prediction.dtype)


class LoadCase(Transform):
    """`load_case` as a MONAI transform, so that the cache takes it for a deterministic one."""

    def __call__(self, data: Case) -> dict[str, Any]:
        return load_case(data)


def volume_dataset(
    cases: Sequence[Case],
    preprocess: Compose,
    augment: Compose | None = None,
    workers: int = 2,
    progress: bool = True,
) -> CacheDataset:
    """Cases as a dataset that holds them prepared in memory, read with `workers` threads, augmented
    at every access.

    An item is the list of `augment`, or without it the prepared dictionary ("label" is int16 then).
    Load it with `monai.data.DataLoader`, which seeds the random transforms of its workers and
    flattens the lists.
    """
    # One flat Compose: the cache ends at the first random transform, and a nested one counts as
    # random.
    later = augment.transforms if augment is not None else ()
    steps = Compose([LoadCase(), *preprocess.transforms, *later])
    return CacheDataset(list(cases), steps, num_workers=workers, progress=progress)
