"""From documents to rows: which chunks are in which row."""
