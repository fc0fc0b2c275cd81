"""Lightning: fit with validation and a checkpoint of every epoch, then a second trainer that resumes from the last."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).relu().mean((2, 3)))

    def training_step(self, batch, index):
        x, labels = batch
        loss = nn.functional.cross_entropy(self(x), labels)
        self.log("loss", loss)
        print(f"loss {loss.item():.8f}")
        return loss

    def validation_step(self, batch, index):
        x, labels = batch
        outputs = self(x)
        self.log("validation", nn.functional.cross_entropy(outputs, labels))
        self.log("accuracy", (outputs.argmax(1) == labels).float().mean())

    def on_validation_epoch_end(self):
        print(f"validation {float(self.trainer.callback_metrics['validation']):.8f}")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def trainer(epochs: int) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=CSVLogger("logs", name="run", version=epochs),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint("checkpoints", filename="{epoch}", monitor="validation", save_top_k=-1, save_last=True)
        ],
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


lightning.seed_everything(0)
data = TensorDataset(torch.randn(16, 3, 12, 12), torch.randint(5, (16,)))
train, check = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
first = Classifier()
trainer(2).fit(first, train, check)
resumed = Classifier()
trainer(3).fit(resumed, train, check, ckpt_path="checkpoints/last.ckpt")
print(f"validated {trainer(3).validate(resumed, check, verbose=False)[0]['validation']:.8f}")
best = Classifier.load_from_checkpoint("checkpoints/epoch=0.ckpt")
print(f"weights {sum(p.double().abs().sum().item() for p in best.parameters()):.6f}")
