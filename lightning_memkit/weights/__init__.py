"""Stream weights from files into a module: every tensor straight to its device, dtype and shard."""

from lightning_memkit.weights.loading import LoadedWeights as LoadedWeights
from lightning_memkit.weights.loading import load_weights as load_weights
