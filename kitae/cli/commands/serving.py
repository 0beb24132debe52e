"""The command that serves a model to others."""

from typing import Annotated

import typer

from kitae.cli.commands.arguments import Overrides


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
