"""Small trained models as package data: each has its weights (.safetensors), its card (.toml) and a training script."""
