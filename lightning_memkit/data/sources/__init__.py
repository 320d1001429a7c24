"""Where documents come from; their tokens are made once and kept on disk."""
