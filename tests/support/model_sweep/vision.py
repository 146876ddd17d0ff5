"""Rows of the sweep: models of images, whose height and width vary both."""

from __future__ import annotations

from typing import Any

import torch

import subtensors as st
from model_sweep.case import ModelCase, tiny

HEIGHT = st.Dim("height", max=96, buckets=[32, 64, 96])
WIDTH = st.Dim("width", max=96, buckets=[32, 64, 96])

_SIDES = ((24, 32), (32, 16), (32, 32), (64, 40), (24, 48), (16, 16), (32, 24))


def images(
    model: str,
    name: str | None = None,
    sides: tuple[tuple[int, int], ...] = _SIDES,
    called: dict[str, object] | None = None,
    **options: object,
) -> ModelCase:
    """A model of images.

    Args:
        model: its class in transformers.
        name: of the row, where it isn't that.
        sides: height and width of the images of each call.
        called: further arguments of a call.
        options: of the config.
    """

    def inputs(height: int, width: int, rows: int) -> dict[str, Any]:
        return {"pixel_values": torch.randn(rows, 3, height, width), **(called or {})}

    dims = {"pixel_values": {2: HEIGHT, 3: WIDTH}}
    return ModelCase(name or model, "vision", tiny(model, **options), inputs, dims, sides, ragged=())


_PATCHES: dict[str, object] = {"image_size": 40, "patch_size": 8}
_ANY_SIZE: dict[str, object] = {"interpolate_pos_encoding": True}
_FOUR: dict[str, object] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_LARGER = ((40, 64), (64, 32), (48, 48), (64, 64), (72, 40), (32, 90), (56, 64))
_WINDOWS: dict[str, object] = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "hidden_size": None,
    "num_attention_heads": None,
    "num_hidden_layers": None,
}

CASES = [
    images("ViTModel", called=_ANY_SIZE, **_PATCHES),
    images("ViTForImageClassification", called=_ANY_SIZE, **_PATCHES),
    images("DeiTModel", called=_ANY_SIZE, **_PATCHES),
    images("Dinov2Model", **_PATCHES),
    images("DINOv3ViTModel", **_PATCHES),
    images("IJepaModel", called=_ANY_SIZE, **_PATCHES),
    images("BeitModel", called=_ANY_SIZE, use_relative_position_bias=False, **_PATCHES),
    images("CLIPVisionModel", called=_ANY_SIZE, **_PATCHES),
    images("SiglipVisionModel", called=_ANY_SIZE, **_PATCHES),
    images("ConvNextModel", sides=_LARGER, **{**_FOUR, "hidden_sizes": [8, 8, 8, 8]}),
    images("ConvNextV2Model", sides=_LARGER, **{**_FOUR, "hidden_sizes": [8, 8, 8, 8]}),
    images("DINOv3ConvNextModel", sides=_LARGER, **_FOUR),
    images("ResNetModel", "ResNetModel of bottlenecks", embedding_size=8, **_FOUR),
    images("ResNetForImageClassification", layer_type="basic", embedding_size=8, **_FOUR),
    images("RegNetModel", embedding_size=8, groups_width=4, **_FOUR),
    images("BitModel", embedding_size=32, num_groups=4, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    images("PoolFormerModel", **_FOUR),
    images("MobileNetV1Model", depth_multiplier=0.25, tf_padding=False),
    images("MobileNetV2Model", depth_multiplier=0.25, tf_padding=False),
    images("MobileViTModel", hidden_sizes=[8, 12, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], num_attention_heads=2),
    images("EfficientNetModel", width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320, sides=_LARGER),
    images(
        "SegformerModel",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        hidden_size=None,
        drop_path_rate=0.0,
        sides=_LARGER,
    ),
    images(
        "PvtV2Model", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2], sides=_LARGER
    ),
    images("SwinModel", sides=_LARGER, **_WINDOWS),
    images("Swinv2Model", sides=_LARGER, **_WINDOWS),
    images("SwiftFormerModel", embed_dims=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    images("VitDetModel", **_PATCHES),
    images("DPTModel", **_PATCHES),
]
