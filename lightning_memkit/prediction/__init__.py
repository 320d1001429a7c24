"""What a training step will cost, before anything is allocated: steps on tensors that have shapes and no values."""
