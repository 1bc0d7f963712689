"""A Lightning module and a DataModule over torchvision's ImageFolder."""

import time

import lightning
import torch
from measuring import Measurement, arguments
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class Pictures(lightning.LightningDataModule):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def setup(self, stage):
        self.dataset = datasets.ImageFolder(f"{self.options.data}/train", transforms.PILToTensor())

    def train_dataloader(self):
        return DataLoader(self.dataset, self.options.batch_size, shuffle=True, num_workers=self.options.workers)


class Model(lightning.LightningModule):
    def __init__(self, measured):
        super().__init__()
        self.head = torch.nn.Linear(3, 20)
        self.measured = measured

    def training_step(self, batch, number):
        images, labels = batch
        self.measured.saw((images, labels))
        self.measured.compute(len(labels))
        return torch.nn.functional.cross_entropy(self.head(images.float().mean((2, 3)) / 255), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


class Waits(lightning.Callback):
    """From the end of a step to the begin of the next, the Trainer gets the next batch."""

    def __init__(self, measured):
        self.measured = measured

    def on_train_epoch_start(self, trainer, module):
        self.measured.begin()
        self.asked = time.perf_counter()

    def on_train_batch_start(self, trainer, module, batch, number):
        self.measured.add_wait(time.perf_counter() - self.asked)

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.asked = time.perf_counter()

    def on_train_epoch_end(self, trainer, module):
        self.measured.end()


def main():
    options = arguments()
    lightning.seed_everything(options.seed, workers=True, verbose=False)
    measured = Measurement(options)
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="cpu", callbacks=[Waits(measured)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Model(measured)
    trainer.fit(model, datamodule=Pictures(options))
    measured.saw((torch.rand(1), model.head.weight.detach()))
    measured.finish()


if __name__ == "__main__":
    main()
