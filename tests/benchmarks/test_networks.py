from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.demo.unet3d import UNet3d
from benchmarks.layers.layer import Layer, convolutions
from benchmarks.networks import NETWORKS, Network
from examples.cosmoflow import CosmoFlow
from mucudnn.architectures.alexnet import AlexNet
from mucudnn.architectures.resnet import ResNet


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# name: parameters as published, convolutions, distinct ones, output of two samples
FULL = {
    "alexnet": (61_100_840, 5, 5, (2, 1000)),
    "vgg16": (138_357_544, 13, 9, (2, 1000)),
    "resnet18": (11_689_512, 20, 11, (2, 1000)),
    "resnet50": (25_557_032, 53, 23, (2, 1000)),
    "wide_resnet50": (68_883_240, 53, 24, (2, 1000)),
    "unet3d": (None, 18, 18, (2, 3, 64, 64, 64)),
    "cosmoflow": (None, 7, 6, (2, 4)),
    "meshtangling1k": (None, 19, 13, (2, 2, 16, 16)),
    "meshtangling2k": (None, 31, 13, (2, 2, 32, 32)),
}

SMALL_OUTPUTS = {
    "unet3d": (4, 3, 16, 16, 16),
    "cosmoflow": (4, 4),
    "meshtangling1k": (4, 2, 8, 8),
    "meshtangling2k": (4, 2, 8, 8),
}


def test_every_network_is_in_the_table() -> None:
    assert NETWORKS.keys() == FULL.keys()
    assert all(network.name == name for name, network in NETWORKS.items())


@pytest.mark.parametrize("name", FULL)
def test_full_network(name: str) -> None:
    network = NETWORKS[name]
    published, count, distinct, output = FULL[name]
    layers = convolutions(network, batch=2)
    assert network.output_shape(2) == output
    assert sum(layer.count for layer in layers) == count
    assert len(layers) == distinct
    assert all(layer.input[0] == 2 for layer in layers)
    if published is not None:
        with torch.device("meta"):
            assert parameters(network.build()) == published


@pytest.mark.parametrize("name", FULL)
def test_small_network_trains(name: str) -> None:
    network = NETWORKS[name].small()
    torch.manual_seed(0)
    model = network.build()
    inputs, targets = network.sample(network.batch, torch.Generator().manual_seed(0))
    outputs = model(inputs)
    assert outputs.dtype == torch.float64
    assert outputs.shape == SMALL_OUTPUTS.get(name, (4, 5)) == network.output_shape(network.batch)
    before = network.loss(outputs, targets)
    before.backward()
    length = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert length.isfinite() and length > 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-6 * parameter.grad / length
    after = network.loss(model(inputs), targets)
    assert (before - after).item() == pytest.approx(1e-6 * length.item(), rel=0.02)


@pytest.mark.parametrize("name", FULL)
def test_small_network_is_a_function_of_its_weights(name: str) -> None:
    network = NETWORKS[name].small()
    model = network.build()
    inputs, targets = network.sample(2, torch.Generator().manual_seed(0))
    assert torch.equal(network.loss(model(inputs), targets), network.loss(model(inputs), targets))


def test_small_of_small_is_refused() -> None:
    with pytest.raises(ValueError, match="alexnet-small"):
        NETWORKS["alexnet"].small().small()


def test_alexnet_second_convolution() -> None:
    assert convolutions(NETWORKS["alexnet"], 256)[1] == Layer(
        name="features.3",
        input=(256, 64, 27, 27),
        weight=(192, 64, 5, 5),
        stride=(1, 1),
        padding=(2, 2),
        dilation=(1, 1),
        groups=1,
        transposed=False,
        output_padding=(0, 0),
    )


def test_transposed_convolutions_of_the_unet() -> None:
    transposed = [layer for layer in convolutions(NETWORKS["unet3d"], 1) if layer.transposed]
    assert [(layer.input, layer.weight, layer.stride) for layer in transposed] == [
        ((1, 512, 8, 8, 8), (512, 512, 2, 2, 2), (2, 2, 2)),
        ((1, 256, 16, 16, 16), (256, 256, 2, 2, 2), (2, 2, 2)),
        ((1, 128, 32, 32, 32), (128, 128, 2, 2, 2), (2, 2, 2)),
    ]


def test_unet_has_the_parameters_of_its_paper() -> None:
    """19,069,955 with three channels and classes: without batch norm and the biases of the transposed ones."""
    with torch.device("meta"):
        model = UNet3d(channels=3, classes=3)
    left_out = sum(parameters(module) for module in model.modules() if isinstance(module, nn.BatchNorm3d))
    left_out += sum(module.bias.numel() for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    assert parameters(model) - left_out == 19_069_955


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256, 512])
def test_cosmoflow_has_as_many_parameters_at_every_size(size: int) -> None:
    """The paper says 9.44 million."""
    with torch.device("meta"):
        model = CosmoFlow(size)
        assert model(torch.empty(1, 4, size, size, size)).shape == (1, 4)
    assert parameters(model) == 9_438_644


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_unet_keeps_the_shape(norm: str, levels: int) -> None:
    with torch.device("meta"):
        model = UNet3d(width=4, levels=levels, norm=norm)
        assert model(torch.empty(1, 1, 8, 16, 24)).shape == (1, 3, 8, 16, 24)


def test_builders_take_arguments() -> None:
    with torch.device("meta"):
        assert NETWORKS["resnet18"].build(classes=7).classifier.out_features == 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ResNet(depth=101), "depth of a ResNet: 101"),
        (lambda: CosmoFlow(size=100), "size of a CosmoFlow cube: 100"),
        (lambda: UNet3d(levels=0), "levels of a U-Net: 0"),
        (lambda: UNet3d(norm="layer"), "norm of a U-Net: 'layer'"),
    ],
)
def test_wrong_arguments(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_shared_shapes_are_merged_in_the_order_of_first_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 3, padding=1)
            self.other = nn.Conv2d(3, 3, 1)
            self.last = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.other(self.first(self.first(x))))

    layers = convolutions(Network("twice", Twice, (3, 8, 8), 1, "segmentation"), 1)
    assert [(layer.name, layer.count) for layer in layers] == [("first", 3), ("other", 1)]


def test_padding_that_a_layer_cannot_say_is_refused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 3, 2, padding="same"))

    with pytest.raises(ValueError, match="convolution 0 of same: padding 'same'"):
        convolutions(Network("same", build, (3, 8, 8), 1, "segmentation"), 1)


def test_width_scales_alexnet() -> None:
    with torch.device("meta"):
        widths = [module.out_channels for module in AlexNet(width=8).modules() if isinstance(module, nn.Conv2d)]
    assert widths == [8, 24, 48, 32, 32]
