"""From documents to batches, and loaders that tune their workers."""
