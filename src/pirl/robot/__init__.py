"""On the robot's computer: OpenPI's wire format, clients and recorders. No jax."""
