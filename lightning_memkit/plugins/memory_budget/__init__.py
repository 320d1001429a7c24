"""MemoryBudget: micro-batches within a budget in training and evaluation, and predictions beforehand."""
