"""Models of torchvision, timm and segmentation-models-pytorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.models.entry import Entry, Lambda, make

TORCHVISION = """alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s mnasnet0_5 mnasnet1_0 mobilenet_v2
mobilenet_v3_large mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x0_5
squeezenet1_0 squeezenet1_1 swin_t swin_v2_t vgg11_bn"""

TIMM = """caformer_s18 convformer_s18 convmixer_768_32 convnext_atto cs3darknet_s cspdarknet53 cspresnet50
densenet121 dla34 dla60_res2net dpn68 eca_nfnet_l0 ecaresnet26t edgenext_xx_small efficientvit_b0 ese_vovnet19b_dw
fastvit_t8 fbnetc_100 focalnet_tiny_srf gcresnet33ts gernet_s ghostnet_050 ghostnetv3_050 hardcorenas_a
hgnetv2_b0 hrnet_w18_small inception_next_atto inception_resnet_v2 inception_v4 lcnet_050
legacy_xception mambaout_femto mixnet_s mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0
mobilevit_xxs mobilevitv2_050 nextvit_small nf_regnet_b0 nfnet_l0 poolformer_s12 poolformerv2_s12 pvt_v2_b0 rdnet_tiny
regnety_002 regnetz_005 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s resnest14d resnet26t resnetblur18
resnetrs50 resnetv2_18 resnetv2_50d_gn rexnet_100 selecsls42b semnasnet_075 seresnet18 seresnext26d_32x4d shvit_s1
skresnet18 starnet_s050 swiftformer_xs tf_efficientnet_b0 tinynet_e tresnet_m vovnet39a xception41
xcit_nano_12_p16_224 davit_tiny tiny_vit_5m_224"""
"""What takes inputs of any extent."""

TIMM_SIZED = """beit_base_patch16_224 cait_xxs24_224 coat_lite_tiny coatnet_nano_rw_224 convit_tiny crossvit_tiny_240
deit_tiny_patch16_224 efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224 gcvit_xxtiny gmlp_ti16_224
hiera_tiny_224 levit_128s maxvit_rmlp_pico_rw_256 mixer_s32_224 mvitv2_tiny pit_ti_224 resmlp_12_224
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 twins_svt_small visformer_tiny
vit_tiny_patch16_224"""
"""What is built for one extent of its inputs, 64 unless SIZES says otherwise."""

SIZES = {"cait_xxs24_224": 64, "crossvit_tiny_240": 240, "eva02_tiny_patch14_224": 56, "convit_tiny": 64}

TIMM_FIXED = {
    "botnet26t_256": 256,
    "halonet26t": 256,
    "haloregnetz_b": 224,
    "lambda_resnet26t": 256,
    "efficientformer_l1": 224,
}
"""What accepts one extent only."""

SMP = """DeepLabV3 DeepLabV3Plus FPN Linknet MAnet PAN PSPNet Segformer UPerNet Unet UnetPlusPlus"""
SMP_ENCODERS = ("densenet121", "efficientnet-b0", "timm-regnety_002", "mobilenet_v2")


def entries() -> dict[str, Entry]:
    return {name: entry for part in (_torchvision(), _torchvision_others(), _timm(), _smp()) for name, entry in part}


def _torchvision() -> Iterator[tuple[str, Entry]]:
    models = "torchvision.models"
    for name in TORCHVISION.split():
        yield f"tv.{name}", Entry(make(models, "get_model", name, weights=None, num_classes=10))
    alone = {"weights": None, "num_classes": 10, "aux_logits": False, "init_weights": True}
    for name in ("googlenet", "inception_v3"):
        yield f"tv.{name}", Entry(make(models, name, **alone), ((4, 3, 96, 96),))
    sizes = {"image_size": 64, "patch_size": 16, "num_classes": 10}
    vit = make(models, "VisionTransformer", num_layers=12, num_heads=4, hidden_dim=64, mlp_dim=256, **sizes)
    yield "tv.vit_b_16", Entry(vit)
    maxvit = make(models, "maxvit_t", weights=None, num_classes=10)
    yield "tv.maxvit_t", Entry(maxvit, ((2, 3, 224, 224),))


def _torchvision_others() -> Iterator[tuple[str, Entry]]:
    plain: dict[str, Any] = {"weights": None, "weights_backbone": None}
    for name in ("deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"):
        yield f"tvseg.{name}", Entry(make("torchvision.models.segmentation", name, num_classes=5, **plain))
    yield "tvdet.retinanet_dense", Entry(_retinanet, ((2, 3, 128, 128),))
    for name in ("mc3_18", "r2plus1d_18", "r3d_18"):
        video = make("torchvision.models.video", name, weights=None, num_classes=10)
        yield f"tvvideo.{name}", Entry(video, ((2, 3, 8, 32, 32),))
    s3d = make("torchvision.models.video", "s3d", weights=None, num_classes=10)
    yield "tvvideo.s3d", Entry(s3d, ((2, 3, 16, 224, 224),))
    swin: dict[str, Any] = {"embed_dim": 24, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8], "num_classes": 10}
    shape = {"patch_size": [2, 4, 4], "window_size": [4, 4, 4]}
    swin3d = make("torchvision.models.video.swin_transformer", "SwinTransformer3d", **swin, **shape)
    yield "tvvideo.swin3d", Entry(swin3d, ((2, 3, 8, 64, 64),))


def _retinanet() -> nn.Module:
    """What is dense in a detector: its backbone and its heads."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    detector = retinanet_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, trainable_backbone_layers=5)
    return Lambda(detector, lambda model, x: model.head(list(model.backbone(x).values())))


def _timm() -> Iterator[tuple[str, Entry]]:
    def timm(name: str, size: int, samples: int = 4, **more: Any) -> tuple[str, Entry]:
        build = make("timm", "create_model", name, pretrained=False, num_classes=10, **more)
        return f"timm.{name}", Entry(build, ((samples, 3, size, size),))

    for name in TIMM.split():
        yield timm(name, 96 if name.startswith("inception") else 64)
    for name in TIMM_SIZED.split():
        size = SIZES.get(name, 64)
        yield timm(name, size, img_size=size)
    for name, size in TIMM_FIXED.items():
        yield timm(name, size, 2)


def _smp() -> Iterator[tuple[str, Entry]]:
    def smp(name: str, encoder: str) -> tuple[str, Entry]:
        build = make("segmentation_models_pytorch", name, encoder_name=encoder, encoder_weights=None, classes=3)
        return f"smp.{name}_{encoder}", Entry(build, ((4, 3, 128, 128),) if name == "PAN" else ((4, 3, 64, 64),))

    for name in SMP.split():
        yield smp(name, "resnet18")
    for encoder in SMP_ENCODERS:
        yield smp("Unet", encoder)
