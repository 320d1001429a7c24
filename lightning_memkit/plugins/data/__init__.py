"""Documents to batches, and loaders that tune themselves."""
