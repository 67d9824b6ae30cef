"""At the robot: OpenPI's wire format, and what speaks it. NumPy and msgpack only, so it runs on a robot's computer."""
