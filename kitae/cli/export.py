"""`kitae export`: a trained model as other programs take it."""

import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kitae.config.locate import find_run
from kitae.errors import ModelError, StoreError
from kitae.models.adapter_folder import is_adapter
from kitae.models.config import ModelConfig
from kitae.models.gguf_file import QUANTS, write_gguf
from kitae.models.load import find_model
from kitae.models.merge_models import write_merged
from kitae.models.written_folder import written_whole
from kitae.run.model_card import merge_card, model_card
from kitae.store.run_folder import is_run, read_config
from kitae.store.run_summary import look

Form = Literal["folder", "adapter", "gguf"]
ADAPTER = "adapter"


def export(
    target: Annotated[
        str, typer.Argument(help="A run with a trained model, a model, or adapters.", metavar="RUN|MODEL")
    ],
    output: Annotated[Path, typer.Argument(help="A folder, or a file for gguf; it must not exist.", metavar="OUTPUT")],
    form: Annotated[
        Form,
        typer.Option(
            "--as",
            help="folder: of transformers, adapters merged; adapter: of peft, of a run with LoRA; gguf: for llama.cpp.",
        ),
    ] = "folder",
    quant: Annotated[str, typer.Option(help=f"Of matrices in a gguf file: {', '.join(QUANTS)}.")] = "f16",
    merge: Annotated[
        list[str] | None,
        typer.Option(help="Another run or model whose weights are merged in; may be given again.", metavar="RUN|MODEL"),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of the models in a merge: 0.5,0.3,0.2; default: the same for all.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Merge by TIES: the share of each tensor's largest changes that is kept.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="What models began with that TIES merges; runs know it.", metavar="MODEL")
    ] = None,
) -> None:
    """Write a trained model as other programs take it.

    With a card of how it was made and what it scored.
    """
    _check(output, form, merge or [], {"weights": weights, "density": density, "base": base})
    run = find_run(Path(target))
    with tempfile.TemporaryDirectory() as scratch_folder:
        if merge or is_adapter(target):
            sources = [target, *(merge or [])]
            begun = _base(sources, base) if density is not None else ""
            model = Path(scratch_folder) / "model"
            settings = [ModelConfig(path=_model(source)) for source in sources]
            write_merged(settings, model, _numbers(weights), begun, 1.0 if density is None else density)
            card: str | None = merge_card(output.name, sources, weights, begun, density)
        else:
            found = find_model(_model(target))
            assert found is not None
            model, card = found, None
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
                if card is None and is_run(run):
                    card = model_card(look(run), scratch)
                if card is not None:
                    (scratch / "README.md").write_text(card, encoding="utf-8")
    print(f"{output}: {', '.join([target, *(merge or [])])} as {f'gguf, {quant}' if form == 'gguf' else form}")


def _check(output: Path, form: Form, merge: list[str], of_merges: dict[str, Any]) -> None:
    if output.exists():
        raise StoreError(f"{output} exists already; remove it, or name another one")
    if output.suffix == ".gguf" and form != "gguf":
        raise StoreError(f"{output} is the name of a GGUF file, but would be a folder: add --as gguf")
    if not output.absolute().parent.is_dir():
        raise StoreError(f"cannot write {output}: there is no folder {output.absolute().parent}")
    if not merge and (given := [name for name, value in of_merges.items() if value is not None]):
        raise ModelError(f"--{given[0]} is about merges: name what is merged with --merge")
    if merge and form == "adapter":
        raise ModelError("a merge of models has no adapters: export it --as folder")
    if of_merges["base"] is not None and of_merges["density"] is None:
        raise ModelError("--base is for TIES: give the share of changes that it keeps with --density")


def _model(target: str) -> str:
    run = find_run(Path(target))
    return str(run) if is_run(run) else target


def _base(sources: list[str], given: str | None) -> str:
    """The model that all runs began with."""
    if given is not None:
        return _model(given)
    runs = [find_run(Path(source)) for source in sources]
    if other := [source for source, run in zip(sources, runs, strict=True) if not is_run(run)]:
        raise ModelError(f"TIES needs --base MODEL, which the models began with: {other[0]} is no run, and cannot say")
    begun = sorted({read_config(run).model.path for run in runs})
    if len(begun) > 1:
        raise ModelError(f"TIES needs runs that began with one model, got {', '.join(begun)}")
    return begun[0]


def _numbers(text: str | None) -> list[float]:
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ModelError(f"--weights must be numbers with commas between them, got {text!r}") from None
