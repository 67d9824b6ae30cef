"""`pirl serve`: a checkpoint behind OpenPI's websocket protocol."""
