"""Models of transformers and diffusers, in small widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.models.entry import Entry, Lambda, make


def entries() -> dict[str, Entry]:
    return {**dict(_transformers()), **dict(_diffusers())}


def _hf(name: str, config: str, shape: tuple[int, ...] = (4, 3, 64, 64), **options: Any) -> tuple[str, Entry]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return f"hf.{name}", Entry(build, (shape,))


def _transformers() -> Iterator[tuple[str, Entry]]:
    small: dict[str, Any] = {"num_labels": 10}
    vit: dict[str, Any] = {**small, "image_size": 64, "patch_size": 16, "hidden_size": 48, "num_hidden_layers": 4}
    vit |= {"num_attention_heads": 4, "intermediate_size": 96}
    stages: dict[str, Any] = {**small, "hidden_sizes": [16, 32, 64, 128], "depths": [2, 2, 2, 2]}
    yield _hf("BeitForImageClassification", "BeitConfig", **vit, use_relative_position_bias=True)
    yield _hf("BitForImageClassification", "BitConfig", **stages, embedding_size=16, num_groups=8)
    yield _hf("ConvNextForImageClassification", "ConvNextConfig", **stages)
    yield _hf("ConvNextV2ForImageClassification", "ConvNextV2Config", **stages)
    yield _hf("CvtForImageClassification", "CvtConfig", num_labels=10)
    yield _hf("DeiTForImageClassification", "DeiTConfig", **vit)
    yield _hf("Dinov2ForImageClassification", "Dinov2Config", **vit)
    yield _hf("DPTForDepthEstimation", "DPTConfig", **vit, backbone_out_indices=[0, 1, 2, 3],
              neck_hidden_sizes=[8, 16, 32, 64], fusion_hidden_size=16)  # fmt: skip
    yield _hf("EfficientNetForImageClassification", "EfficientNetConfig", **small, width_coefficient=0.5,
              depth_coefficient=0.5, hidden_dim=640)  # fmt: skip
    yield _hf("FocalNetForImageClassification", "FocalNetConfig", **small, image_size=64, embed_dim=16)
    yield _hf("LevitForImageClassification", "LevitConfig", **small, image_size=64)
    yield _hf("MobileNetV1ForImageClassification", "MobileNetV1Config", **small, depth_multiplier=0.5)
    yield _hf("MobileNetV2ForImageClassification", "MobileNetV2Config", **small, depth_multiplier=0.5)
    yield _hf("MobileViTForImageClassification", "MobileViTConfig", **small, image_size=64, hidden_sizes=[24, 32, 40],
              neck_hidden_sizes=[8, 16, 16, 24, 32, 40, 160])  # fmt: skip
    yield _hf("MobileViTV2ForImageClassification", "MobileViTV2Config", **small, width_multiplier=0.5)
    yield _hf("PoolFormerForImageClassification", "PoolFormerConfig", **small, hidden_sizes=[16, 32, 64, 128])
    yield _hf("PvtForImageClassification", "PvtConfig", **small, image_size=64, hidden_sizes=[16, 32, 80, 128])
    yield _hf("PvtV2ForImageClassification", "PvtV2Config", **small, image_size=64, hidden_sizes=[16, 32, 80, 128])
    yield _hf("RegNetForImageClassification", "RegNetConfig", **stages, embedding_size=16, groups_width=8)
    yield _hf("ResNetForImageClassification", "ResNetConfig", **stages, embedding_size=16)
    yield _hf("SegformerForSemanticSegmentation", "SegformerConfig", **small, hidden_sizes=[16, 32, 64, 128],
              decoder_hidden_size=32)  # fmt: skip
    yield _hf("SwiftFormerForImageClassification", "SwiftFormerConfig", **small, embed_dims=[16, 32, 64, 128],
              depths=[2, 2, 2, 2])  # fmt: skip
    yield _hf("SwinForImageClassification", "SwinConfig", **small, image_size=64, embed_dim=24, window_size=4,
              depths=[2, 2, 2], num_heads=[1, 2, 4])  # fmt: skip
    yield _hf("Swinv2ForImageClassification", "Swinv2Config", **small, image_size=64, embed_dim=24, window_size=4,
              depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8])  # fmt: skip
    yield _hf("Swin2SRForImageSuperResolution", "Swin2SRConfig", (2, 3, 32, 32), image_size=32, embed_dim=24,
              window_size=4, depths=[2, 2], num_heads=[2, 2])  # fmt: skip
    yield "hf.UperNetForSemanticSegmentation", Entry(_upernet)
    yield _hf("ViTForImageClassification", "ViTConfig", **vit)


def _upernet() -> nn.Module:
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    backbone = ConvNextConfig(
        hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], out_features=[f"stage{n}" for n in range(1, 5)]
    )
    config = UperNetConfig(
        backbone_config=backbone, hidden_size=32, num_labels=5, auxiliary_in_channels=64, auxiliary_channels=16
    )
    return UperNetForSemanticSegmentation(config)


def _diffusers() -> Iterator[tuple[str, Entry]]:
    def diffusers(name: str, way: Callable[..., Any], shape: Any, label: str = "", **options: Any) -> tuple[str, Entry]:
        build = make("diffusers", name, **options)
        return f"diffusers.{label or name}", Entry(lambda: Lambda(build(), way), (shape,))

    image = (4, 3, 64, 64)
    down, up = ["DownEncoderBlock2D"] * 2, ["UpDecoderBlock2D"] * 2
    vae: dict[str, Any] = {"block_out_channels": [16, 32], "down_block_types": down, "up_block_types": up}
    vae |= {"norm_num_groups": 4, "latent_channels": 4}
    yield diffusers("AutoencoderKL", _decoded, image, **vae)
    yield diffusers("AutoencoderKL", _decoded, image, "AutoencoderKL_noattention", **vae, mid_block_add_attention=False)
    yield diffusers("AutoencoderTiny", _sample, image, encoder_block_out_channels=(16,) * 4,
                    decoder_block_out_channels=(16,) * 4)  # fmt: skip
    yield diffusers("VQModel", _sample, image, **vae)
    widths: dict[str, Any] = {"block_out_channels": [16, 32], "norm_num_groups": 4, "attention_head_dim": 4}
    unet: dict[str, Any] = {**widths, "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1}
    plain = {"down_block_types": ["DownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "UpBlock2D"]}
    attending = {
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }
    yield diffusers("UNet2DModel", _at_times, (4, 4, 16, 16), **unet, **plain, add_attention=False)
    yield diffusers("UNet2DModel", _at_times, (4, 4, 16, 16), "UNet2DModel_attention", **unet, **attending)
    crossing = {
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    }
    yield diffusers("UNet2DConditionModel", _given_text, (4, 4, 16, 16), **unet, **crossing, cross_attention_dim=8)


def _decoded(model: Any, x: torch.Tensor) -> Any:
    return model(x, return_dict=False)[0]


def _sample(model: Any, x: torch.Tensor) -> Any:
    return model(x).sample


def _at_times(model: Any, x: torch.Tensor) -> Any:
    return model(x, torch.arange(len(x))).sample


def _given_text(model: Any, x: torch.Tensor) -> Any:
    text = torch.linspace(-1, 1, len(x) * 5 * 8).view(len(x), 5, 8)
    return model(x, torch.arange(len(x)), text).sample
