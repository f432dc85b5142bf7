"""
Export to ONNX
==============

``eq.export`` writes a whole model as an ONNX file. A solve becomes a loop with early stop, so the file needs neither
torch nor equipoise, and each sample still stops by its own residual. This script trains a classifier of 8x8 digits,
exports it, and runs the file with onnxruntime.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import equipoise as eq

EPOCHS = 6
torch.manual_seed(0)

images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float().view(-1, 1, 8, 8) / 16
train, test = torch.randperm(len(images)).split([1400, 397])

model = eq.create_model("conv-equilibrium", shape=(1, 8, 8), classes=10, channels=12)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(EPOCHS):
    for batch in train[torch.randperm(len(train))].split(100):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %%
# The example fixes the shape of one sample; the batch size stays free.

path = Path(tempfile.mkdtemp()) / "digits.onnx"
exported = eq.export(model, path, images[:2])
print(exported)

# %%
# onnxruntime returns the logits, and the number of steps, the residual and the outcome of every sample.

session = onnxruntime.InferenceSession(path)
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(None, {session.get_inputs()[0].name: images[test].numpy()}), strict=True))
logits = torch.from_numpy(outputs[names[0]])
print({name: value.shape for name, value in outputs.items()})
print(f"accuracy of the file {(logits.argmax(dim=1) == labels[test]).float().mean():.1%}")

# %%
# The same images in torch: the same steps, and the same logits up to rounding.

model.eval().requires_grad_(False)
with eq.watch_solves() as solves:
    expected = model(images[test])
steps = torch.from_numpy(outputs["steps"]).flatten()
largest = (logits - expected).abs().max().item()
print(f"largest difference {largest:.0e}; equal steps for {(steps == solves[0].stats.steps).float().mean():.1%}")

figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
bins = torch.arange(int(steps.min()), int(steps.max()) + 2).numpy() - 0.5
axis.hist([solves[0].stats.steps.numpy(), steps.numpy()], bins=bins, label=["torch", "onnxruntime"])
axis.set(xlabel="solver steps", ylabel="images", title=f"Steps until each of {len(test)} images stops")
axis.set_xticks(bins[:-1] + 0.5)
axis.legend()
plt.show()
