"""At the robot: OpenPI's wire format, what speaks it, and what records. No jax, so it runs on a robot's computer."""
