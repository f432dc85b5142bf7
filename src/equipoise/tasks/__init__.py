"""Kinds of problems by name: each brings its loss, metrics, augmentation and pictures."""

from equipoise.registry import Registry
from equipoise.tasks.base import Batch, Sums, Task

TASKS = Registry(
    "task",
    {
        "classification": "equipoise.tasks.classification:Classification",
        "augmented-classification": "equipoise.tasks.augmented:AugmentedClassification",
        "robustness": "equipoise.tasks.robustness:Robustness",
        "segmentation": "equipoise.tasks.segmentation:Segmentation",
        "generation": "equipoise.tasks.generation:Generation",
        "restoration": "equipoise.tasks.restoration:Restoration",
        "vae": "equipoise.tasks.vae:VAE",
        "autoencoding": "equipoise.tasks.autoencoding:Autoencoding",
        "few-shot": "equipoise.tasks.few_shot:FewShot",
        "maml": "equipoise.tasks.maml:MAML",
        "reptile": "equipoise.tasks.reptile:Reptile",
        "imaml": "equipoise.tasks.imaml:IMAML",
    },
    Task,
)

__all__ = ["TASKS", "Batch", "Sums", "Task"]
