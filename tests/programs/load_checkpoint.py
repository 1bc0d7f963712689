"""A checkpoint is loaded, and each of its layers is computed with.

--reader: `torch` is torch.load(mmap=True), `safetensors` is safetensors.safe_open.
"""

import torch
from measuring import Measurement, arguments


def layers_of_torch(data):
    return iter(torch.load(f"{data}/model.pt", mmap=True, weights_only=True).items())


def layers_of_safetensors(data):
    from safetensors import safe_open

    with safe_open(f"{data}/model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no mapping
            yield name, file.get_tensor(name)


def main():
    options = arguments(reader="torch")
    measured = Measurement(options)
    for _ in measured.epochs():
        with measured.waiting():
            layers = layers_of_torch(options.data) if options.reader == "torch" else layers_of_safetensors(options.data)
        for name, layer in measured.waited(layers):
            with measured.waiting():
                total = float(layer.double().sum())  # a mapped tensor is read when it is used
            measured.saw((name, total))
            measured.compute(25)
    measured.finish()


if __name__ == "__main__":
    main()
