"""What exists for speed alone; each equals a plain path in `models/`."""
