"""What a step changes besides gradients: kept, put back, and composed from what micro-batches leave."""
