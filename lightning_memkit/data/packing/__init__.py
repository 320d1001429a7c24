"""Documents to rows: which pieces stand in which row."""
