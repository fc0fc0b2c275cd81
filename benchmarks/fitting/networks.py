"""The networks whose calls are to fit a limit of memory: of several libraries, small enough for a processor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Network(NamedTuple):
    """A model with random weights, its inputs, and the classes of its blocks where it is trained; else none."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    blocks: tuple[type[nn.Module], ...] = ()


class Decoder(nn.Module):
    """The decoder of an autoencoder of diffusers."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, z: Tensor) -> Any:
        return self.autoencoder.decode(z).sample


def _unet() -> Network:
    from monai.networks.nets import BasicUNet
    from monai.networks.nets.basic_unet import TwoConv, UpCat

    model = BasicUNet(3, 1, 2, features=(16, 16, 32, 64, 128, 16))
    return Network(model, (torch.randn(1, 1, 64, 64, 64),), (TwoConv, UpCat))


def _nnunet() -> Network:
    from monai.networks.blocks.dynunet_block import UnetBasicBlock, UnetUpBlock
    from monai.networks.nets import DynUNet

    strides = [[1, 1, 1], *[[2, 2, 2]] * 3]
    model = DynUNet(3, 1, 3, [[3, 3, 3]] * 4, strides, strides[1:], filters=[16, 32, 64, 128])
    return Network(model, (torch.randn(1, 1, 64, 64, 64),), (UnetBasicBlock, UnetUpBlock))


def _resnet() -> Network:
    from torchvision.models import resnet50
    from torchvision.models.resnet import Bottleneck

    return Network(resnet50(), (torch.randn(1, 3, 1536, 1536),), (Bottleneck,))


def _swin() -> Network:
    from monai.networks.blocks import UnetrBasicBlock, UnetrUpBlock
    from monai.networks.nets import SwinUNETR
    from monai.networks.nets.swin_unetr import SwinTransformerBlock

    model = SwinUNETR(in_channels=1, out_channels=2, feature_size=24)
    return Network(model, (torch.randn(1, 1, 96, 96, 64),), (SwinTransformerBlock, UnetrBasicBlock, UnetrUpBlock))


def _deeplab() -> Network:
    from torchvision.models.resnet import Bottleneck
    from torchvision.models.segmentation import deeplabv3_resnet50
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead

    model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5)
    return Network(model, (torch.randn(2, 3, 640, 640),), (Bottleneck, DeepLabHead))


def _voxelmorph() -> Network:
    from monai.networks.nets import VoxelMorph

    pair = torch.randn(1, 1, 64, 64, 64), torch.randn(1, 1, 64, 64, 64)
    return Network(VoxelMorph(integration_steps=4), pair, (nn.Sequential,))


def _rrdb() -> Network:
    from spandrel.architectures.ESRGAN import ESRGAN

    return Network(ESRGAN(in_nc=3, out_nc=3, num_filters=32, num_blocks=4), (torch.randn(1, 3, 192, 192),))


def _nafnet() -> Network:
    from spandrel.architectures.NAFNet import NAFNet

    model = NAFNet(width=16, enc_blk_nums=[1, 1, 1, 8], middle_blk_num=1, dec_blk_nums=[1, 1, 1, 1])
    return Network(model, (torch.randn(1, 3, 256, 256),), (type(model.encoders[0][0]),))


def _dac() -> Network:
    from transformers import DacConfig
    from transformers.models.dac.modeling_dac import DacDecoder

    return Network(DacDecoder(DacConfig(decoder_hidden_size=384, hidden_size=256)), (torch.randn(1, 256, 1600),))


def _encodec() -> Network:
    from transformers import EncodecConfig
    from transformers.models.encodec.modeling_encodec import EncodecDecoder

    return Network(EncodecDecoder(EncodecConfig()), (torch.randn(1, 128, 3600),))


def _diffusion(trained: bool) -> Network:
    from diffusers import AutoencoderKL
    from diffusers.models.resnet import ResnetBlock2D

    levels = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    model = Decoder(AutoencoderKL(block_out_channels=(32, 64, 128, 128), layers_per_block=2, **levels))
    extent = 40 if trained else 96
    return Network(model, (torch.randn(1, 4, extent, extent),), (ResnetBlock2D,) if trained else ())


def _wan(trained: bool) -> Network:
    from diffusers import AutoencoderKLWan
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    model = Decoder(AutoencoderKLWan(base_dim=24, z_dim=8, latents_mean=[0.0] * 8, latents_std=[1.0] * 8))
    frames, extent = (3, 24) if trained else (5, 32)
    return Network(model, (torch.randn(1, 8, frames, extent, extent),), (WanResidualBlock,) if trained else ())


NETWORKS: dict[str, Callable[[], Network]] = {
    "3-D U-Net, step": _unet,
    "nnU-Net, step": _nnunet,
    "ResNet-50, step": _resnet,
    "SwinUNETR, step": _swin,
    "DeepLabV3, step": _deeplab,
    "VoxelMorph, step": _voxelmorph,
    "NAFNet, step": _nafnet,
    "SD decoder, step": functools.partial(_diffusion, True),
    "Wan decoder, step": functools.partial(_wan, True),
    "RRDBNet": _rrdb,
    "DAC decoder": _dac,
    "EnCodec decoder": _encodec,
    "SD decoder": functools.partial(_diffusion, False),
    "Wan decoder": functools.partial(_wan, False),
}
