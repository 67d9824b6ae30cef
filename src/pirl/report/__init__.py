"""One page about one or several runs, from their files alone: no jax, no GPU, no external resources."""
