"""Models of MONAI and of nnU-Net's dynamic_network_architectures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.models.entry import Entry, Lambda, make

NETS = "monai.networks.nets"
VOLUME = ((2, 1, 32, 32, 32),)
LARGER = ((2, 1, 64, 64, 64),)


def entries() -> dict[str, Entry]:
    return {**dict(_monai()), **dict(_monai_planes()), **dict(_nnunet())}


def _monai() -> Iterator[tuple[str, Entry]]:
    def monai(name: str, shapes: Any = VOLUME, label: str = "", **options: Any) -> tuple[str, Entry]:
        return f"monai.{label or name}", Entry(make(NETS, name, **options), shapes)

    three = {"spatial_dims": 3}
    ends = {"in_channels": 1, "out_channels": 2}
    levels: dict[str, Any] = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2)}
    yield monai("AHNet", LARGER, **three, **ends, layers=(1, 1, 1, 1), psp_block_num=0, upsample_mode="trilinear")
    yield monai("AttentionUnet", **three, **ends, **levels)
    diffusion: dict[str, Any] = {"num_res_blocks": (1, 1), "channels": (8, 16), "norm_num_groups": 4}
    no_attention = {"attention_levels": (False, False), "with_encoder_nonlocal_attn": False}
    yield monai(
        "AutoencoderKL", **three, in_channels=1, out_channels=1, **diffusion, **no_attention,
        with_decoder_nonlocal_attn=False, latent_channels=3,
    )  # fmt: skip
    yield monai("BasicUNet", **three, **ends, features=(8, 8, 16, 32, 64, 8))
    yield monai("BasicUNetPlusPlus", **three, **ends, features=(8, 8, 16, 32, 64, 8))
    yield monai("DenseNet121", label="DenseNet121_3d", **three, **ends)
    yield "monai.DiffusionModelUNet", Entry(_diffusion_unet, VOLUME)
    kernels: dict[str, Any] = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
    yield monai("DynUNet", **three, **ends, **kernels, filters=[8, 16, 32])
    efficient = {"model_name": "efficientnet-b0", "pretrained": False, "in_channels": 1, "num_classes": 2}
    yield monai("EfficientNetBN", label="EfficientNetBN_3d", **three, **efficient)
    yield monai("HighResNet", **three, **ends)
    yield monai("MedNeXt", **three, **ends, init_filters=8)
    yield monai("PatchDiscriminator", **three, in_channels=1, channels=8, num_layers_d=2)
    yield monai("RegUNet", **three, in_channels=1, num_channel_initial=8, depth=2, out_channels=3)
    corner: dict[str, Any] = {"in_shape": (1, 32, 32, 32), "channels": (4, 8, 8), "strides": (2, 2, 2)}
    yield monai("Regressor", **corner, out_shape=(1,))
    yield monai("ResNet", label="ResNet_3d", block="basic", layers=[1, 1, 1, 1], block_inplanes=[8, 16, 32, 64],
                spatial_dims=3, n_input_channels=1, num_classes=2)  # fmt: skip
    yield monai("SegResNet", **three, **ends, init_filters=8)
    yield monai("SegResNetDS", **three, **ends, init_filters=8, blocks_down=(1, 2, 2), dsdepth=2)
    vae: dict[str, Any] = {"input_image_size": (32, 32, 32), "init_filters": 8, "vae_estimate_std": True}
    yield monai("SegResNetVAE", in_channels=1, out_channels=2, **vae)
    yield monai("SwinUNETR", LARGER, in_channels=1, out_channels=2, feature_size=12)
    yield monai("UNETR", img_size=(32, 32, 32), **ends, feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4)
    yield monai("UNet", **three, **ends, **levels, num_res_units=2)
    yield monai("VNet", **three, in_channels=1, out_channels=2)
    sizes: dict[str, Any] = {"img_size": (32, 32, 32), "patch_size": (8, 8, 8), "hidden_size": 48, "mlp_dim": 96}
    yield monai("ViT", label="ViT_3d", in_channels=1, **sizes, num_layers=4, num_heads=4, classification=True)
    yield "monai.VoxelMorph", Entry(_voxelmorph, (*VOLUME, *VOLUME))


def _monai_planes() -> Iterator[tuple[str, Entry]]:
    plane = ((4, 1, 64, 64),)
    levels: dict[str, Any] = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "norm": "batch"}
    unet = make(NETS, "UNet", spatial_dims=2, in_channels=1, out_channels=2, **levels)
    yield "monai.UNet_batchnorm_2d", Entry(unet, plane)
    resnet = make(NETS, "SEResNet50", spatial_dims=2, in_channels=1, num_classes=2)
    yield "monai.SEResNet50_2d", Entry(resnet, plane)
    yield "monai.HoVerNet_2d", Entry(make(NETS, "HoVerNet", out_classes=3), ((1, 3, 256, 256),))
    flexible = make(NETS, "FlexibleUNet", in_channels=3, out_channels=2, backbone="resnet18", pretrained=False)
    yield "monai.FlexibleUNet_2d", Entry(flexible)


def _diffusion_unet() -> nn.Module:
    import torch
    from monai.networks.nets import DiffusionModelUNet

    widths: dict[str, Any] = {"num_res_blocks": 1, "channels": (8, 16), "num_head_channels": 8, "norm_num_groups": 4}
    model = DiffusionModelUNet(3, in_channels=1, out_channels=1, attention_levels=(False, True), **widths)
    return Lambda(model, lambda unet, x: unet(x, timesteps=torch.arange(len(x))))


def _voxelmorph() -> nn.Module:
    from monai.networks.nets import VoxelMorph, VoxelMorphUNet

    backbone = VoxelMorphUNet(3, 2, 8, (8, 16), (16, 8, 8), kernel_size=3)
    return VoxelMorph(backbone=backbone, integration_steps=2)


def _nnunet() -> Iterator[tuple[str, Entry]]:
    unets = "dynamic_network_architectures.architectures.unet"
    for name, blocks in (("PlainConvUNet", "n_conv_per_stage"), ("ResidualEncoderUNet", "n_blocks_per_stage")):
        for dims in (2, 3):
            yield (
                f"nnunet.{name}_{dims}d",
                Entry(_nnunet_of(unets, name, blocks, dims), ((4, 1, 64, 64) if dims == 2 else (2, 1, 32, 32, 32),)),
            )


def _nnunet_of(unets: str, name: str, blocks: str, dims: int) -> Any:
    conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
    norm = (nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 2]
    stages: dict[str, Any] = {"n_stages": 4, "features_per_stage": (8, 16, 32, 64), "kernel_sizes": 3}
    stages |= {"strides": (1, 2, 2, 2), blocks: 2, "n_conv_per_stage_decoder": 2, "deep_supervision": True}
    layers: dict[str, Any] = {"conv_bias": True, "norm_op": norm, "norm_op_kwargs": {"affine": True}}
    layers |= {"nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True}}
    return make(unets, name, 1, conv_op=conv, num_classes=3, **stages, **layers)
