"""Device meshes, shardings, and training with several processes."""
