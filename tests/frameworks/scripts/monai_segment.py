"""MONAI: volumes as MetaTensors, SupervisedTrainer with DiceCELoss, and sliding windows over whole volumes."""

import numpy as np
import torch
from ignite.engine import Events
from monai.data import DataLoader, Dataset, decollate_batch
from monai.engines import SupervisedTrainer
from monai.inferers import SimpleInferer, sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import AsDiscrete, Compose, EnsureChannelFirstd, EnsureTyped, RandFlipd, ScaleIntensityd
from monai.utils import set_determinism

set_determinism(0)
numbers = np.random.RandomState(1)
items = []
for _ in range(4):
    image = numbers.rand(16, 16, 16).astype(np.float32)
    items.append({"image": image, "label": (image > 0.5).astype(np.float32)})
keys = ["image", "label"]
transform = Compose(
    [
        EnsureChannelFirstd(keys, channel_dim="no_channel"),
        ScaleIntensityd("image"),
        RandFlipd(keys, prob=0.5, spatial_axis=0),
        EnsureTyped(keys),
    ]
)
loader = DataLoader(Dataset(items, transform), batch_size=2, shuffle=True, num_workers=0)
batch = next(iter(loader))
print(
    f"kind {type(batch['image']).__name__} {batch['image'].affine.shape[-1]} {len(batch['image'].applied_operations)}"
)
model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), num_res_units=1)
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=2,
    train_data_loader=loader,
    network=model,
    optimizer=torch.optim.Adam(model.parameters(), 1e-2),
    loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
    inferer=SimpleInferer(),
)


@trainer.on(Events.ITERATION_COMPLETED)
def show(engine) -> None:
    print(f"loss {engine.state.output[0]['loss']:.8f}")


trainer.run()
model.eval()
dice = DiceMetric(include_background=False)
answer, truth = AsDiscrete(argmax=True, to_onehot=2), AsDiscrete(to_onehot=2)
with torch.no_grad():
    for batch in loader:
        outputs = sliding_window_inference(batch["image"], (12, 12, 12), 2, model, overlap=0.25)
        print(f"outputs {outputs.double().abs().sum().item():.6f}")
        dice([answer(o) for o in decollate_batch(outputs)], [truth(o) for o in decollate_batch(batch["label"])])
print(f"dice {dice.aggregate().item():.6f}")
torch.save(model.state_dict(), "model.pt")
