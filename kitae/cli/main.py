"""The command line. Only typer is imported here; each command imports what it needs, so --help answers at once."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kitae.config.locate import find_run

app = typer.Typer(
    name="kitae",
    help="Train language models by reinforcement learning with verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_RECIPE = typer.Argument(
    help="A recipe file, or the name of one that comes with Kitae (kitae recipes).", metavar="RECIPE"
)
Recipe = Annotated[str, _RECIPE]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings: section.key=value …", metavar="[SECTION.KEY=VALUE]…")
]
Run = Annotated[
    Path,
    typer.Argument(
        help="A run folder, e.g. runs/quickstart-001, or its name (kitae runs lists them).",
        metavar="RUN",
        callback=find_run,
    ),
]
Runs = Annotated[
    list[Path],
    typer.Argument(help="Run folders or names.", metavar="RUN", callback=lambda runs: [find_run(run) for run in runs]),
]


def _version(wanted: bool) -> None:
    if wanted:
        from kitae import __version__

        print(f"kitae {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[str | None, _RECIPE] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would happen, in what time and memory; load nothing.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --dry-run: all settings.")] = False,
) -> None:
    """Train a model by a recipe.

    For a first try: kitae train quickstart
    """
    if recipe is None:
        from kitae.config.locate import shipped_recipes

        known = ", ".join(path.stem for path in shipped_recipes())
        raise typer.BadParameter(f"it must be a file, or one of {known}, got none", param_hint="RECIPE")
    from kitae.cli import training

    training.train(recipe, overrides or [], dry_run, full)


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--from", help="A checkpoint, e.g. step-000010, or start; default: the last checkpoint."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Give up the steps after that checkpoint, instead of training them again.")
    ] = False,
) -> None:
    """Go on with a run that was stopped or killed, or beyond its end with training.steps=N."""
    from kitae.cli import training

    training.resume(run, overrides or [], checkpoint, forget)


@app.command()
def scale(run: Run, engines: Annotated[int, typer.Argument(help="How many it shall have.")]) -> None:
    """Change the number of engines of a run on a cluster, while it goes on."""
    from kitae.cli import runs as listing

    listing.scale(run, engines)


@app.command()
def sample(
    target: Annotated[
        str, typer.Argument(help="A recipe (its untrained model), or a run (its trained one).", metavar="RECIPE-OR-RUN")
    ],
    overrides: Overrides = None,
    keep: Annotated[
        str, typer.Option(help="Of each prompt: its best answer, all correct ones, all, or pairs of best and worst.")
    ] = "correct",
    output: Annotated[Path, typer.Option("--output", "-o", help="The JSONL file to write.")] = Path("samples.jsonl"),
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Answers to each prompt; default: training.group_size.")
    ] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Prompts to ask; default: all of a file.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Prompts of the data to pass over.")] = 0,
    model: Annotated[str | None, typer.Option(help="Another model: a folder, a run, a hub id or a short name.")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Least score of an example; default: 1 for correct, else any.")
    ] = None,
    min_margin: Annotated[float, typer.Option(min=0, help="Least difference of scores in a pair.")] = 0.0,
    match_lengths: Annotated[
        bool, typer.Option("--match-lengths", help="Of equally good answers, pair those of similar length.")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", help="Keep answers that were cut off at sampling.max_tokens too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The counts as one line of JSON, and nothing else.")] = False,
) -> None:
    """Sample and verify answers, as data to train on.

    If it is killed, the same command goes on from there.
    """
    from kitae.cli import sampling

    chosen = sampling.Chosen(keep, min_score, min_margin, match_lengths, truncated)
    sampling.sample(target, overrides or [], chosen, output, n, prompts, first, model, json)


@app.command()
def chain(
    file: Annotated[
        str, typer.Argument(help="A chain file, or the name of one that comes with Kitae (kitae recipes).")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder of the chain; default: runs/NAME.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="How often its stages are gone through; default: as it says.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Check all stages, say where it stands, and stop.")] = False,
) -> None:
    """Run stages after each other, each from the last one's model.

    If it is stopped or killed, the same command goes on: finished stages are not run again.
    """
    from kitae.cli import chains

    chains.chain(file, output, rounds, status)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="The folder that holds them.", metavar="[DIR]")] = Path("runs"),
) -> None:
    """List runs with their status, results and size."""
    from kitae.cli import runs as listing

    listing.runs(folder)


@app.command()
def compare(folders: Runs) -> None:
    """Compare settings and results of runs."""
    from kitae.cli import runs as listing

    listing.compare(folders)


@app.command()
def clean(
    folders: Runs,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only", help="Remove all checkpoints: the trained model stays, but the run cannot be resumed."
        ),
    ] = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also remove the records of single tokens.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what would go.")] = False,
) -> None:
    """Free disk that runs take.

    Removes all checkpoints but the last, and what writes that were cut off have left behind.
    """
    from kitae.cli import runs as listing

    listing.clean(folders, weights_only, yes, tokens)


@app.command(name="eval")
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


@app.command()
def suites() -> None:
    """List the suites that models can be evaluated on."""
    from kitae.cli import evaluation

    evaluation.suites()


@app.command()
def show(
    run: Run,
    step: Annotated[
        int | None, typer.Option(help="Only this step; default: the last, unless another option chooses.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first, over all steps.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first, over all steps.")] = False,
    order: Annotated[str | None, typer.Option(help="newest, oldest, best, worst, longest or shortest first.")] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Answers that could not be judged.")] = False,
    min_reward: Annotated[float | None, typer.Option(help="Least reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Highest reward.")] = None,
    min_tokens: Annotated[int | None, typer.Option(min=0, help="Least length, in tokens after the prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="Greatest length.")] = None,
    finish: Annotated[str, typer.Option(help="How the answer ended: stop, length (cut off) or abort.")] = "",
    text: Annotated[str, typer.Option(help="Words in prompt, answer or verdict; capitals do not matter.")] = "",
    prompt: Annotated[str, typer.Option(help="The id of a prompt: all its samples, of all steps.")] = "",
    one_per_prompt: Annotated[
        bool, typer.Option("--one-per-prompt", help="Only the first of each prompt's samples in this order.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="How many samples; default: all in a pager or as JSON, else 8.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Who worked when, as a PNG, and for how long.")] = False,
) -> None:
    """Show sampled answers with their rewards.

    Of the last step, unless an option says otherwise; or the timeline of the run. On a terminal they go through $PAGER,
    or less.
    """
    if timeline:
        from kitae.cli import inspection

        inspection.timeline(run)
        return
    from kitae.cli import show as showing
    from kitae.ui.queries import RolloutFilter

    wanted = RolloutFilter(
        step=step,
        reward_min=min_reward,
        reward_max=max_reward,
        length_min=min_tokens,
        length_max=max_tokens,
        finish=finish,
        verdict="error" if errors else "",
        prompt=prompt,
        text=text,
        order=order or ("best" if best else "worst" if worst else "newest"),
    )
    showing.show(run, showing.Asked(wanted, one_per_prompt, limit), json)


@app.command()
def diagnose(
    run: Run,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON, and nothing else.")] = False,
) -> None:
    """Say what is wrong with a run, and what to change.

    Of a run that is going on, finished, stopped or crashed; docs/diagnosis.md has the rules.
    """
    from kitae.cli import diagnosis

    diagnosis.diagnose(run, json)


@app.command()
def replay(
    run: Run,
    step: Annotated[int | None, typer.Option(min=1, help="The step to compute again; default: the last.")] = None,
) -> None:
    """Compute a past step again and compare.

    From the journal and the checkpoint before it; the exit status is 0 if all numbers are the same, else 1.
    """
    from kitae.cli import inspection

    inspection.replay(run, step)


@app.command()
def plot(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The PNG to write; default: RUN/plot.png.")
    ] = None,
) -> None:
    """Draw the curves of a run as a PNG."""
    from kitae.cli import inspection

    inspection.plot(run, output)


@app.command()
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
    scale: Annotated[
        bool, typer.Option("--scale", help="Also bytes and seconds of weights, shards and controller (docs/scale.md).")
    ] = False,
    links: Annotated[
        str, typer.Option(help="Rates for --scale: nic=50e9,gpus=8,storage=20e9,… in bytes a second (docs/scale.md).")
    ] = "",
    parameters: Annotated[
        float | None,
        typer.Option(help="Of the model: 32e9; times that are not given follow. Default for --scale: the recipe's."),
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
        scale=scale,
        links=links,
        parameters=parameters,
        as_json=json,
        timeline=timeline,
    )


@app.command()
def recipes() -> None:
    """List the recipes that come with Kitae."""
    from kitae.cli import inspection

    inspection.recipes()


@app.command()
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="A method (its formula, source, trap and settings) or a stage (its choices).")
    ] = None,
) -> None:
    """List the algorithms, or explain one.

    Each is a choice for each of eight stages.
    """
    from kitae.cli import algorithms as listing

    listing.algorithms(name)


@app.command()
def validate(
    recipe: Recipe,
    overrides: Overrides = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Check only so many prompts; default: all of a file.")
    ] = None,
) -> None:
    """Check that gold answers score 1.

    Scores the references of a recipe's data with its verifier, and lists those that do not score 1.
    """
    from kitae.cli import verification

    verification.validate(recipe, overrides or [], limit)


@app.command()
def data(
    recipe: Recipe,
    overrides: Overrides = None,
    against: Annotated[
        list[Path] | None, typer.Option(help="An evaluation's file to look for in the data; may be repeated.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="How many to show as the model sees them.")] = 3,
) -> None:
    """Say what a recipe's data are.

    Rows, tokens, duplicates, overlap with evaluations, and examples with the trained tokens in ⟦brackets⟧.
    """
    from kitae.cli import data as report

    report.data(recipe, overrides or [], against or [], examples)


@app.command()
def verifiers() -> None:
    """List the verifiers, each with an example."""
    from kitae.cli import verification

    verification.verifiers()


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="A verifier (kitae verifiers), or file.py:function.")],
    source: Annotated[Path, typer.Option("--input", help="JSONL: id, response, reference, context.")],
    target: Annotated[Path, typer.Option("--output", help="JSONL: id, score, outcome, components, detail.")],
    option: Annotated[
        list[str] | None, typer.Option(help="A param of the verifier: key=value; may be repeated.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes; default: one for each core.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one check.")] = 10.0,
) -> None:
    """Score a file of responses."""
    from kitae.cli import verification

    verification.verify(name, source, target, option or [], workers, timeout)


@app.command()
def environments() -> None:
    """List the environments, each with its params."""
    from kitae.cli import environments as listing

    listing.environments()


@app.command()
def ui(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, names of runs, or folders that hold runs; default: runs.", metavar="[RUN]…"),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a token, which is printed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7007,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
) -> None:
    """Look at runs in a browser.

    Curves, rollouts token by token, timelines, comparisons; of running runs too. Reads and changes nothing.
    """
    from kitae.cli import window

    window.show(places or [], host, port, open_browser)


@app.command()
def serve(
    target: Annotated[
        str,
        typer.Argument(
            help="A model: a run, a folder, a hub id or a short name; or a reward model.", metavar="MODEL-OR-RUN"
        ),
    ],
    overrides: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; an address that others can reach needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key_env: Annotated[
        str | None, typer.Option(help="The environment variable with the key that clients must send.", metavar="NAME")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="How clients call the model; default: the name of its run or folder.")
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Answers under way, waiting ones included; who comes then is told to try again.")
    ] = 512,
    tries: Annotated[
        int,
        typer.Option(min=1, help="How often an answer is sampled until it calls the tool that tool_choice asks for."),
    ] = 3,
    answer_anyway: Annotated[
        bool, typer.Option("--answer-anyway", help="If no try calls it, tell the last answer; default: refuse.")
    ] = False,
) -> None:
    """Serve a model to OpenAI's clients.

    Chats and completions, streamed or whole, with tools and log-probs; or the scores of a reward model.
    """
    from kitae.cli import serving

    serving.serve(
        target,
        overrides or [],
        host=host,
        port=port,
        key_env=api_key_env,
        name=name,
        queue=queue,
        tries=tries,
        answer_anyway=answer_anyway,
    )


@app.command()
def report(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file to write; default: RUN/report.html.")
    ] = None,
) -> None:
    """Write a run into one HTML file, to send to somebody.

    Results, curves, answers, settings, diagnosis; of running and crashed runs too. It needs no network and no scripts.
    """
    from kitae.cli import report as writing

    writing.report(run, output)


@app.command()
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


_INTERRUPTED = 130  # the exit status that typer turns Ctrl-C into


def run() -> None:
    """Entry point: errors that Kitae raises on purpose are printed without a traceback, and exit with 1."""
    from kitae.errors import Interrupted, KitaeError, StalledError

    try:
        app()
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        sys.exit(128 + stop.signal)
    except StalledError as error:  # a thread that is stuck would keep the interpreter from ending
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except KitaeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise
