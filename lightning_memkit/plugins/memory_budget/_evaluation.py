"""Have an engine run the batches of Lightning's evaluation loops."""

from lightning.pytorch import Trainer

from lightning_memkit.micro_batching.evaluation.engine import EvaluationEngine, Observer
from lightning_memkit.micro_batching.options import BudgetOptions
from lightning_memkit.plugins.seams import evaluation_loop as seam
from lightning_memkit.plugins.seams.lightning_run import EvaluationRun
from lightning_memkit.utilities.patching import Undo


def keep_budget_in_evaluation(
    trainer: Trainer, options: BudgetOptions, observer: Observer | None = None
) -> Undo:
    """Keep validation (also within a fit), test and prediction within a budget; returns the undo.

    A batch that fits runs whole, as Lightning runs it. See `EvaluationEngine` for the others, and for the price.
    """
    engine = EvaluationEngine(EvaluationRun(trainer), options, observer or Observer())
    undo = seam.install(trainer, engine)

    def undo_all() -> None:
        undo()
        engine.close()

    return undo_all
