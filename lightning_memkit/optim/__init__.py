"""Optimizers whose low-precision weights lose no update; plain torch."""
