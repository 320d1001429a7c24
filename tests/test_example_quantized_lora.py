"""LoRA over quantized weights: the frozen weights take a byte or half of one, tied ones stay tied, and it learns."""

import json
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from tests.examples import losses_in, train

NAME = "quantized_lora"
TINY = {
    "model_type": "llama", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip

# peft 0.21 asks transformers 5.23 by a name that the latter deprecates.
pytestmark = [
    pytest.mark.usefixtures("at_root"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class Kept(Callback):
    """Keeps the model that was trained."""

    modules: list = []

    def on_train_end(self, trainer, pl_module):
        self.modules.append(pl_module)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_frozen_weights_take_their_bits_and_the_rest_learns(bits: int, tmp_path: Path, capsys) -> None:
    options = [
        f"--model.config={json.dumps(TINY)}", f"--model.bits={bits}", f"--model.adapter={tmp_path / 'adapter'}",
        "--data.batch_size=4", "--data.documents.limit=16", "--data.documents.validation=0",
        "--trainer.limit_val_batches=0", "--trainer.max_steps=6",
        "--trainer.callbacks+=tests.test_example_quantized_lora.Kept",
    ]  # fmt: skip
    Kept.modules.clear()
    train(NAME, ["lora.yaml"], tmp_path, *options)
    losses = losses_in(capsys.readouterr().out)
    assert losses[-1] < losses[0] - 0.1, losses
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()

    (module,) = Kept.modules
    llama = module.model.base_model.model
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # queries, keys and values, outputs, MLP
    lora = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    kept_in_16 = 2 * (259 * 64 + 5 * 64)
    buffers = sum({b.data_ptr(): b.nbytes for b in module.buffers()}.values())
    report = json.loads((tmp_path / "memory_report.json").read_text())
    assert report["at_peak"]["weights"] == 2 * layer * bits // 8 + lora + kept_in_16 + buffers
