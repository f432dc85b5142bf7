"""Solves as static graphs, and the ONNX files made of them: what :func:`equipoise.export` is built from."""
