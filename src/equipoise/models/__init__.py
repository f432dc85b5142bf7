"""Equilibrium models and the models they are compared with, by name."""

from typing import Any

from torch import nn

from equipoise.registry import Registry, call

MODELS = Registry(
    "model",
    {
        "conv-equilibrium": "equipoise.models.conv_equilibrium:ConvEquilibrium",
        "mondeq": "equipoise.models.mondeq.model:MonDEQ",
        "mdeq": "equipoise.models.mdeq.model:MDEQ",
        "opteq": "equipoise.models.opteq.model:OptEq",
        "popteq": "equipoise.models.opteq.model:POptEq",
        "mopteq": "equipoise.models.opteq.model:MOptEq",
        "conv-ae": "equipoise.models.generator.convolutional:ConvAE",
        "conv-rae": "equipoise.models.generator.convolutional:ConvRAE",
        "conv-vae": "equipoise.models.generator.convolutional:ConvVAE",
        "conv4": "equipoise.models.few_shot.conv4:Conv4",
        "mdeq-ae": "equipoise.models.generator.mdeq_ae:MDEQAE",
        "generator": "equipoise.models.generator.model:Generator",
        "mdeq-vae": "equipoise.models.generator.vae:MDEQVAE",
        "small-classifier": "equipoise.models.features.classifier:SmallClassifier",
        "few-shot-mdeq": "equipoise.models.few_shot.model:FewShotMDEQ",
        "neural-ode": "equipoise.models.baselines.neural_ode:NeuralODE",
        "plain-deq": "equipoise.models.baselines.weight_tied:PlainDEQ",
        "unrolled": "equipoise.models.baselines.weight_tied:Unrolled",
        "resnet": "equipoise.models.baselines.resnet:ResNet",
        "hrnet": "equipoise.models.baselines.hrnet:HRNet",
    },
    nn.Module,
)


def list_models() -> list[str]:
    """Return the names that :func:`create_model` knows."""
    return list(MODELS)


def create_model(name: str, **options: Any) -> nn.Module:
    """Build a model by name, or your own as ``"my_module:MyNet"``.

    Args:
        name: one of :func:`list_models`, or ``"module:Name"``.
        options: arguments of the model's constructor; unknown ones are rejected.

    Example:
        >>> model = eq.create_model("conv-equilibrium", shape=(1, 28, 28), classes=10, channels=32)
    """
    return call(MODELS[name], options, {}, f"model {name!r}")


def __getattr__(name: str) -> Any:
    """Import a model class on first use of its name."""
    for key, path in MODELS.entries.items():
        if path.endswith(f":{name}"):
            return MODELS[key]
    raise AttributeError(f"module 'equipoise.models' has no attribute {name!r}")
