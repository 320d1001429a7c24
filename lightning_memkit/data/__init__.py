"""From documents to batches: corpora, tokens, packing; plain torch and numpy."""
