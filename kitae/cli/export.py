"""`kitae export`: a trained model as other programs take it."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from kitae.config.locate import find_run
from kitae.errors import ModelError, StoreError
from kitae.models.gguf_file import QUANTS, write_gguf
from kitae.models.load import find_model, written_whole
from kitae.run.model_card import model_card
from kitae.store.run_folder import is_run
from kitae.store.run_summary import look

Form = Literal["folder", "adapter", "gguf"]
ADAPTER = "adapter"


def export(
    target: Annotated[str, typer.Argument(help="A run with a trained model, or a model.", metavar="RUN|MODEL")],
    output: Annotated[Path, typer.Argument(help="A folder, or a file for gguf; it must not exist.", metavar="OUTPUT")],
    form: Annotated[
        Form,
        typer.Option(
            "--as",
            help="folder: of transformers, adapters merged; adapter: of peft, of a run with LoRA; gguf: for llama.cpp.",
        ),
    ] = "folder",
    quant: Annotated[str, typer.Option(help=f"Of matrices in a gguf file: {', '.join(QUANTS)}.")] = "f16",
) -> None:
    """Write a trained model as other programs take it.

    With a card of how it was made and what it scored.
    """
    if output.exists():
        raise StoreError(f"{output} exists already; remove it, or name another one")
    if output.suffix == ".gguf" and form != "gguf":
        raise StoreError(f"{output} is the name of a GGUF file, but would be a folder: add --as gguf")
    if not output.absolute().parent.is_dir():
        raise StoreError(f"cannot write {output}: there is no folder {output.absolute().parent}")
    run = find_run(Path(target))
    model = find_model(str(run) if is_run(run) else target)
    assert model is not None
    if form == "gguf":
        write_gguf(model, output, quant)
    else:
        source = model if form == "folder" else model / ADAPTER
        if not source.is_dir():
            raise ModelError(
                f"{target} has no adapters: it was not trained with model.lora_rank; export it --as folder"
            )
        left_out = shutil.ignore_patterns(ADAPTER) if form == "folder" else None
        with written_whole(output) as scratch:
            shutil.copytree(source, scratch, ignore=left_out)
            if is_run(run):
                (scratch / "README.md").write_text(model_card(look(run), scratch), encoding="utf-8")
    print(f"{output}: {target} as {f'gguf, {quant}' if form == 'gguf' else form}")
