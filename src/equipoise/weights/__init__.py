"""Small trained models as package data: each has its weights (.safetensors) and its card (.toml)."""
