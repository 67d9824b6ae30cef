"""Checkpoints for others: OpenPI directories and PyTorch safetensors."""
