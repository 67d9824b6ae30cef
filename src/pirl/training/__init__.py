"""Infrastructure of training: sharding (more to come)."""
