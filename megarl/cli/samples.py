"""`megarl samples`: what the policy wrote in an evaluation, to be read. Loads no torch."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from megarl.cli.display import make_console
from megarl.data.generations import Generation, list_generations, read_generations
from megarl.errors import DataError

_MAX_WIDTH = 100


def samples(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(min=0, help="The step after which it was evaluated; without it, the last one.")
    ] = None,
    is_wrong: Annotated[bool, typer.Option("--wrong", help="Only answers that are not right.")] = False,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="Only prompts of this data source.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to show.")] = 10,
    max_chars: Annotated[
        int, typer.Option(min=1, help="Of each text; a longer prompt loses its start, an answer its middle.")
    ] = 2000,
) -> None:
    """Show prompts and answers of an evaluation, with what the scorer made of them."""
    path = _file(run, step)
    chosen = (
        generation
        for generation in read_generations(path)
        if not (is_wrong and generation.is_right) and source in (None, generation.data_source)
    )
    num_shown = show(islice(chosen, limit), make_console(), max_chars=max_chars)
    if not num_shown:
        raise DataError(f"{path}: no answer is as asked for; leave out --wrong or --source")
    print(f"{num_shown} shown of {path}")


def _file(run: Path, step: int | None) -> Path:
    files = list_generations(run)
    if not files:
        raise DataError(f"{run}: no evaluation is kept here; name the folder of a run with one, as in runs/quickstart")
    if step is None:
        return files[max(files)]
    if step not in files:
        raise DataError(f"{run}: no evaluation after step {step}; there are {', '.join(map(str, files))}")
    return files[step]


def show(generations: Iterable[Generation], console: Console, *, max_chars: int) -> int:
    """One panel each; returns how many."""
    width = min(console.width, _MAX_WIDTH)
    count = 0
    for count, generation in enumerate(generations, start=1):  # noqa: B007 - the count is the answer
        title = Text(_printable(f" {generation.prompt_uid}  {generation.data_source} "))
        panel = Panel(
            Group(*_lines(generation, max_chars)),
            title=title,
            title_align="left",
            border_style="green" if generation.is_right else "red",
            width=width,
        )
        console.print(panel, soft_wrap=False)
    return count


def _lines(generation: Generation, max_chars: int) -> Iterator[Text]:
    yield Text(_printable(_end(generation.prompt, max_chars)), style="dim")
    yield Text(_printable(_ends(generation.response, max_chars)), style="bold")
    way = "greedy" if generation.is_greedy else f"sampled {generation.index}"
    verdict = "right" if generation.is_right else "wrong"
    length = f"{generation.num_tokens} tokens, {generation.finish_reason}"
    facts = [f"{verdict}: score {generation.score:g}", way, length]
    facts += [f"{name} {value:g}" for name, value in generation.components.items()]
    facts += [f"truth {_end(generation.ground_truth, max_chars)}"]
    if generation.prediction is not None:
        facts.append(f"prediction {_end(generation.prediction, max_chars)}")
    yield Text(_printable("  ".join(facts)), style="green" if generation.is_right else "red")


def _end(text: str, max_chars: int) -> str:
    """The question is at the end of a prompt."""
    cut = len(text) - max_chars
    return text if cut <= 0 else f"[{cut} characters] ... {text[-max_chars:]}"


def _ends(text: str, max_chars: int) -> str:
    """An answer begins with its plan and ends with its result."""
    cut, half = len(text) - max_chars, max_chars // 2
    return text if cut <= 0 else f"{text[: max_chars - half]} ... [{cut} characters] ... {text[len(text) - half :]}"


def _printable(text: str) -> str:
    """A model may write escape codes; a terminal must not obey them."""
    return "".join(
        f"\\x{ord(char):02x}" if unicodedata.category(char) == "Cc" and char not in "\n\t" else char for char in text
    )
