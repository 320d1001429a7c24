import torch

from lightning_memkit.optim.blocks import BLOCK_ELEMENTS, blocks


def written(*tensors: torch.Tensor) -> int:
    count = 0
    for source, target in blocks(*tensors):
        target.copy_(source)
        count += 1
    return count


def test_a_large_tensor_is_walked_in_pieces_and_written_whole():
    source = torch.randn(3 * BLOCK_ELEMENTS + 5)
    target = torch.zeros_like(source)
    assert written(source, target) == 4
    assert torch.equal(source, target)


def test_dense_strides_are_walked_in_storage_order():
    source = torch.randn(2, 64, 40, 50).to(memory_format=torch.channels_last)
    target = torch.zeros_like(source)
    assert written(source, target) > 1
    assert torch.equal(source, target)


def test_gaps_and_unlike_strides_are_taken_whole():
    source = torch.randn(500, 600)
    gaps = torch.zeros(500, 1200)[:, ::2]
    assert written(source, gaps) == 1
    assert torch.equal(source, gaps)
    turned = torch.zeros(600, 500).t()
    assert written(source, turned) == 1
    assert torch.equal(source, turned)
