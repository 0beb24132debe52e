"""Commands that measure: models on held-out prompts, schedules without a model, this machine."""

from pathlib import Path
from typing import Annotated

import typer

from kitae.cli.commands.arguments import Overrides, Recipe


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="Run folders (their trained models), recipes (their untrained models), or models: folders, hub ids, "
            "short names; and settings: eval.prompts=32 …",
            metavar="TARGET… [SECTION.KEY=VALUE]…",
        ),
    ],
    suites: Annotated[
        str | None,
        typer.Option(help="What to ask, separated by commas (kitae suites); default: the task of the run or recipe."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the data of suites, DIR/gsm8k/test.jsonl …; default: the hub.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Another model: a folder, a run, a hub id or a short name.")] = None,
    output: Annotated[Path, typer.Option(help="Folder that keeps the answers: what it has is not asked again.")] = Path(
        "evaluations"
    ),
    markdown: Annotated[Path | None, typer.Option(help="Write the table into this file, as Markdown.")] = None,
    answers: Annotated[Path | None, typer.Option(help="Write all answers with their verdicts, as JSONL.")] = None,
    json: Annotated[bool, typer.Option("--json", help="The numbers as one line of JSON, and nothing else.")] = False,
) -> None:
    """Measure models on held-out prompts and suites, and compare them.

    Prints avg@k, pass@k and maj@k with intervals; for k = 8: eval.samples=8 eval.temperature=1. Several models are
    asked the same problems, and compared with the first.
    """
    from kitae.cli import evaluation

    evaluation.evaluate(targets, model, suites, data, output, markdown, answers, json)


def suites() -> None:
    """List the suites that models can be evaluated on."""
    from kitae.cli import evaluation

    evaluation.suites()


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Annotated[str, typer.Option("--devices", "--engines", help="Numbers of devices: 8,16,32,64.")] = "8",
    staleness: Annotated[str, typer.Option(help="Values of pipeline.max_staleness: 0,1,2,4.")] = "0,1,2,4",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Of responses: lognormal:median=512,max=8x[,sigma=1] or constant:512; default: log-normal, median an "
            "eighth of sampling.max_tokens."
        ),
    ] = None,
    times: Annotated[
        str,
        typer.Option(help="What things take on a device: step=0.0016,sequence=6.4e-6,train=50000,… (docs/async.md)."),
    ] = "",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    signal: Annotated[float, typer.Option(min=0.01, max=1, help="Share of groups whose rewards differ.")] = 1.0,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Responses of a step for each device; default: the recipe's batch.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count; some before and after them do not.")] = 20,
    trainers: Annotated[
        float | None,
        typer.Option(help="Devices that train where staleness > 0: 4, or a share: 0.25; default: the best number."),
    ] = None,
    generation_share: Annotated[
        float | None,
        typer.Option(min=0.01, max=0.99, help="Set the rate of training so that a synchronous step generates so long."),
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(help="Of the model: 32e9; times that are not given follow from it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Draw who worked when in the last schedule, as a PNG.")] = None,
) -> None:
    """Predict speed and staleness of schedules.

    Throughput, idle time and staleness on many devices, in seconds and without a model.
    """
    from kitae.cli import simulation

    simulation.simulate(
        recipe,
        overrides or [],
        devices=devices,
        staleness=staleness,
        lengths=lengths,
        times=times,
        prompt=prompt,
        signal=signal,
        sequences=sequences,
        steps=steps,
        trainers=trainers,
        generation_share=generation_share,
        parameters=parameters,
        as_json=json,
        timeline=timeline,
    )


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A model: a folder, hub id, run or smollm2-135m.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings on the model as JSON.")] = False,
) -> None:
    """Say what this machine can do, or whether a model is fit to be trained.

    Of a model the chat template and the tokenizer are tried out; the exit status is 1 where something is wrong.
    """
    from kitae.cli import checkup
    from kitae.cli import doctor as machine

    if model is None:
        machine.report()
    elif not checkup.report(model, as_json):
        raise typer.Exit(1)
