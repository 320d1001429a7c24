"""Whether a batch may be split: trial steps that leave no trace, compared."""
