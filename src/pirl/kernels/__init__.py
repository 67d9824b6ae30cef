"""Optimised kernels; each equals a plain path in `models/`."""
