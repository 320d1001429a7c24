"""Run on ranks by test_sharded_writing.py: threads write folders while two ranks train, and fail."""

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor

from lightning_memkit import FSDP2Strategy, StreamingCheckpointIO
from lightning_memkit.checkpoints import atomic, sharded
from lightning_memkit.distributed.collectives import collectives_issued
from lightning_memkit.distributed.own_group import own_group
from tests.plugins.ranks import leave
from tests.plugins.several_ranks import STEPS, trained

SAVED_AFTER, GO_ON = 2, (4, 6)  # steps; each rank's thread begins to write at another one


class SaveAndGoOn(Callback):
    """Saves, and lets this rank's thread write while the ranks gather and reduce."""

    def __init__(self, folder: Path, rank: int, held: threading.Event) -> None:
        self.folder, self.rank, self.held, self.found = folder, rank, held, {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_AFTER:
            self.found["weights"] = whole(pl_module)
            trainer.save_checkpoint(self.folder / "a.ckpt")
            trainer.strategy.remove_checkpoint(self.folder / "before.ckpt")
            self.found["before"] = self.names()
        if trainer.global_step == GO_ON[self.rank]:
            self.held.set()
        if trainer.global_step == STEPS - 1:
            trainer.strategy.checkpoint_io.wait()
            self.found["after"] = self.names()
            trainer.save_checkpoint(self.folder / "b.ckpt")
            trainer.strategy.checkpoint_io.wait()
            self.found["weights b"] = whole(pl_module)
            self.found["failures"] = [
                error_of(lambda: self.fail(trainer)),
                error_of(lambda: self.stuck(trainer)),
            ]
            self.found["end"] = self.names()

    def fail(self, trainer: Any) -> None:
        """Rank 0 can't write, which its thread finds out; all hear of it in the next save."""
        trainer.save_checkpoint(self.folder / "other")  # a folder of other things
        trainer.strategy.remove_checkpoint(self.folder / "b.ckpt")
        trainer.save_checkpoint(self.folder / "c.ckpt")

    def stuck(self, trainer: Any) -> None:
        """Only rank 0 removes; that it could not is heard by the other rank, too."""
        if self.rank == 0:
            trainer.strategy.checkpoint_io.write_later(refuse)
        trainer.save_checkpoint(self.folder / "c.ckpt")

    def names(self) -> list[str]:
        torch.distributed.barrier()
        names = sorted(path.name for path in self.folder.glob("*[tr]") if path.is_dir())
        torch.distributed.barrier()
        return names


def collectives_of(run: Callable[[], None]) -> int:
    before = collectives_issued() or 0
    run()
    return (collectives_issued() or 0) - before


def refuse() -> None:
    raise PermissionError("no")


def error_of(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict().items()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state
    }


def main(path: str) -> None:
    torch.distributed.init_process_group("gloo")
    rank, folder, held = torch.distributed.get_rank(), Path(path).parent / "kept", threading.Event()
    if rank == 0:
        (folder / "other").mkdir(parents=True)
        (folder / "other" / "thesis.txt").touch()
        with atomic.new_folder(folder / "before.ckpt") as before:
            (before / ".metadata").touch()
    torch.distributed.barrier()
    plain = sharded.save_sharded
    counted = [
        collectives_of(partial(plain, {}, {}, folder / "counted", group)) for group in (own_group(), None)
    ]

    def held_back(*arguments: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert held.wait(60)
        plain(*arguments)

    sharded.save_sharded = held_back
    watch = SaveAndGoOn(folder, rank, held)
    found = trained(
        FSDP2Strategy(),
        "32-true",
        2,
        rank,
        plugins=[StreamingCheckpointIO(asynchronous=True)],
        beside=[watch],
    )
    everywhere: list[Any] = [None, None]
    torch.distributed.all_gather_object(
        everywhere, {**watch.found, "losses": found["losses"], "counted": counted}
    )
    if rank == 0:
        torch.save(everywhere, path)
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
