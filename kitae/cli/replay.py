"""`kitae replay`: a past step, computed again."""

from typing import Annotated

import typer

from kitae.cli.arguments import Run
from kitae.cli.text import table
from kitae.errors import StoreError


def replay(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="The step to compute again; default: the last.")] = None,
) -> None:
    """Compute a past step again and compare.

    From the journal and the checkpoint before it; the exit status is 0 if all numbers are the same, else 1.
    """
    from kitae.store.run_summary import look

    wanted = look(run).step if step is None else step
    if wanted == 0:
        raise StoreError(f"{run} has no finished step to replay")
    from kitae.run.recompute_step import replay as compute

    found = compute(run, wanted, print)
    rows = [["", "logged", "again", "difference"]]
    rows += [[n, f"{then:.8g}", f"{now:.8g}", f"{abs(then - now):.3g}"] for n, (then, now) in found.numbers.items()]
    print(table(rows))
    same = found.difference == 0
    print(f"{'same' if same else 'differs'}: step {wanted}, from the checkpoint of step {found.checkpoint}, "
          f"largest difference {found.difference:.3g}")  # fmt: skip
    if not same:
        raise SystemExit(1)
