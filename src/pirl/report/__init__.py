"""One page about one or several runs, made from the files they left: no jax, no GPU, nothing from elsewhere."""
