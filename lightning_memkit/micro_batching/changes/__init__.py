"""State that a step changes besides gradients: recorded, restored, and composed from micro-batches."""
