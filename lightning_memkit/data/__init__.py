"""Documents to batches: corpora, tokens, packing; plain torch and numpy."""
