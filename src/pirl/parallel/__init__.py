"""Meshes, shardings and hosts."""
