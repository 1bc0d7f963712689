"""transformers' Trainer over an imagefolder of datasets. --workers is its dataloader_num_workers, whose default is 0.

--own: a dataset of one's own instead, that opens a path of its list.
"""

import glob
import os
import tempfile
import time

import numpy
import torch
from datasets import load_dataset
from measuring import Measurement, arguments
from PIL import Image
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Model(torch.nn.Module):
    def __init__(self, measured):
        super().__init__()
        self.head = torch.nn.Linear(3, 20)
        self.measured = measured

    def forward(self, pixel_values, labels):
        self.measured.saw((pixel_values, labels))
        self.measured.compute(len(labels))
        logits = self.head(pixel_values.float().mean((2, 3)) / 255)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Waits(TrainerCallback):
    """From the end of a step to the begin of the next, Trainer gets the next batch."""

    def __init__(self, measured):
        self.measured = measured

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.measured.begin()
        self.asked = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.measured.add_wait(time.perf_counter() - self.asked)

    def on_step_end(self, args, state, control, **kwargs):
        self.asked = time.perf_counter()

    def on_epoch_end(self, args, state, control, **kwargs):
        self.measured.end()


class Pictures(torch.utils.data.Dataset):
    def __init__(self, root):
        self.files = sorted(glob.glob(os.path.join(root, "*", "*.jpg")))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image = Image.open(self.files[index]).convert("RGB")
        label = int(os.path.basename(os.path.dirname(self.files[index]))[1:])
        return {"pixel_values": torch.from_numpy(numpy.array(image)).permute(2, 0, 1), "labels": label}


def transform(examples):
    pictures = [torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1) for image in examples["image"]]
    return {"pixel_values": pictures, "labels": examples["label"]}


def main():
    options = arguments(own=False)
    set_seed(options.seed)
    if options.own:
        dataset = Pictures(os.path.join(options.data, "train"))
    else:
        dataset = load_dataset("imagefolder", data_dir=os.path.join(options.data, "train"), split="train")
        dataset = dataset.with_transform(transform)
    measured = Measurement(options)
    with tempfile.TemporaryDirectory() as output:
        settings = TrainingArguments(
            output, per_device_train_batch_size=options.batch_size, num_train_epochs=options.epochs,
            dataloader_num_workers=options.workers, seed=options.seed, remove_unused_columns=False, report_to="none",
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=Model(measured), args=settings, train_dataset=dataset, callbacks=[Waits(measured)])
        result = trainer.train()
    measured.saw((torch.rand(1), result.training_loss))
    measured.finish()


if __name__ == "__main__":
    main()
