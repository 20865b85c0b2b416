"""Write what is generated of the documentation; `make docs` runs it.

docs/cli.md, docs/api.md, docs/llms.txt, the figures of the README, packages and modules in docs/contributing.md, the
families in docs/models.md, the rates of GPUs in docs/planning.md, the alerts in docs/runbook.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import typer
import yaml

import megarl
from bench.figures import readme_table
from megarl import errors
from megarl.cli.main import app, complete_app, run_app
from megarl.env import update_environment
from megarl.families import FAMILIES
from megarl.planner.hardware import GPUS
from megarl.run_result import Result
from scripts.dashboards.alerts import ALERTS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def cli_page() -> str:
    """Return the reference of all commands, from their own help."""
    complete_app()
    # The width of the help.
    update_environment({"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
    lines = ["# Commands", "", "Made from `--help`. Exit codes are at the [end](#exit-codes).", ""]
    lines += [line for command in _commands(app, ("megarl",)) for line in command]
    lines += ["## Exit codes", "", "| code | error | |", "|---|---|---|", "| 0 | | done |"]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MegarlError)]
    by_code = {kind.exit_code: kind.__name__ for kind in reversed(kinds) if kind is not errors.MegarlError}
    lines += [f"| {code} | `{name}` | {_meaning(name)} |" for code, name in sorted(by_code.items())]
    return "\n".join([*lines, ""])


def _meaning(name: str) -> str:
    lines = [line for line in (errors.__doc__ or "").splitlines() if f" {name} " in line]
    return lines[0].split(name)[1].strip().lstrip("0123456789").strip() if lines else ""


def _commands(parent: typer.Typer, path: tuple[str, ...]) -> Iterator[list[str]]:
    for command in parent.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        words = [*path[1:], name]
        out = StringIO()
        with redirect_stdout(out):
            run_app(app, [*words, "--help"], prog_name="megarl")
        usage, _, text = out.getvalue().partition("\n\n")
        yield [
            f"## {' '.join(('megarl', *words))}",
            "",
            "```text",
            usage.removeprefix("Usage: "),
            "",
            text.rstrip(),
            "```",
            "",
        ]
    for group in parent.registered_groups:
        assert isinstance(group.typer_instance, typer.Typer)
        yield from _commands(group.typer_instance, (*path, str(group.name)))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page() -> str:
    """Return the reference of `import megarl`, from signatures and docstrings."""
    lines = ["# Python", "", inspect.cleandoc(inspect.getmodule(megarl.train).__doc__ or ""), ""]
    lines += ["`examples/` has six scripts; a test runs them. Own parts of a step: [extending](extending.md).", ""]
    for name in ("train", "plan", "load", "load_run"):
        lines += [*_entry(f"megarl.{name}", getattr(megarl, name)), ""]
    lines += ["## megarl.Result", "", inspect.cleandoc(Result.__doc__ or ""), ""]
    lines += ["| | |", "|---|---|"]
    for name, member in vars(Result).items():
        if not name.startswith("_"):
            target = getattr(member, "func", None) or getattr(member, "fget", None) or member
            call = str(inspect.signature(target)).replace("self, ", "").replace("(self)", "()")
            shown = f"{name}{call}" if inspect.isfunction(member) else name
            lines.append(f"| `{_cell(shown)}` | {_cell(inspect.getdoc(target) or '')} |")
    lines += ["", "## Errors", "", "```text", inspect.cleandoc(errors.__doc__ or ""), "```", ""]
    return "\n".join(lines)


def _entry(name: str, function: Callable[..., object]) -> list[str]:
    signature = inspect.signature(function)
    arguments = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in arguments:
            arguments.append("*")
        default = "" if each.default is each.empty else f" = {each.default!r}"
        arguments.append(f"{each.name}: {each.annotation}{default}")
    call = f"{name}(\n    " + ",\n    ".join(arguments) + f",\n) -> {signature.return_annotation}"
    prose, _, example = (inspect.getdoc(function) or "").partition(">>>")
    lines = [f"## {name}", "", "```text", call, "```", "", prose.strip()]
    return [*lines, "", "```pycon", f">>>{example.rstrip()}", "```"] if example else lines


def llms_text() -> str:
    """Return the list of pages for language models, each with its first sentence."""
    lines = ["# megarl", "", f"> {(megarl.__doc__ or '').splitlines()[0]}", ""]
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for entry in site["nav"]:
        for title, pages in entry.items():
            lines += [_described(pages)] if isinstance(pages, str) else ["", f"## {title}", "", *map(_described, pages)]
    return "\n".join([*lines, ""])


def _described(entry: str | dict[str, str]) -> str:
    """Return a link with the title and the first sentence of a page, which the navigation may call by another name."""
    page = entry if isinstance(entry, str) else next(iter(entry.values()))
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    title = re.search(r"^# (.+)$", text, flags=re.MULTILINE)
    paragraphs = [part for part in text.split("\n\n") if part[:1].isalpha() or part[:1] == "`"]
    first = " ".join(paragraphs[0].split()) if paragraphs else ""
    sentence = re.split(r"(?<=[.]) ", re.sub(r"\]\([^)]*\)", "]", first).replace("[", "").replace("]", ""))[0]
    return f"- [{title.group(1) if title else page}]({page}): {sentence}"


def readme() -> str:
    """Return the README with its table of figures as they are recorded."""
    return _with_part((ROOT / "README.md").read_text(), "figures: bench/recorded.json", readme_table())


def contributing() -> str:
    """Return the page for contributors with the packages in the order of their layers, and all modules."""
    page = _with_part((DOCS / "contributing.md").read_text(), "packages: pyproject.toml", list(_packages()))
    return _with_part(page, "modules: their docstrings", list(_modules()))


def _packages() -> Iterator[str]:
    """Yield the packages and modules of each layer, with the first sentences of their docstrings."""
    yield from ("| layer | | |", "|---|---|---|")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [each for each in contracts[0]["layers"] if each.startswith("megarl.")]
    for number, layer in enumerate(layers):
        for name in layer.replace("megarl.", "").split(" | "):
            path = ROOT / "megarl" / name
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            text = ast.get_docstring(ast.parse(file.read_text())) or ""
            yield f"| {len(layers) - number} | `{name}` | {_cell(text.partition(chr(10) * 2)[0])} |"


def _modules() -> Iterator[str]:
    """Yield a table for each package: its modules, and the first sentence of each."""
    package = ""
    for path in sorted((ROOT / "megarl").rglob("*.py"), key=lambda path: (path.parent, path)):
        text = ast.get_docstring(ast.parse(path.read_text()))
        if text is None:
            continue
        if str(path.parent.relative_to(ROOT)) != package:
            package = str(path.parent.relative_to(ROOT))
            yield from ("", f"| {package}/ | |", "|---|---|")
        sentence = re.split(r"(?<=[.;]) (?=[A-Z])", _cell(text.partition("\n\n")[0]))[0]
        yield f"| `{path.name}` | {sentence.rstrip('.')} |"


def runbook() -> str:
    """Return the runbook with the table of alerts."""
    return _with_part((DOCS / "runbook.md").read_text(), "alerts: scripts/dashboards/alerts.py", list(_alerts()))


def _alerts() -> Iterator[str]:
    """Yield a row for each alert; an ellipsis stands for what Prometheus fills in."""
    yield from ("| alert | severity | after | |", "|---|---|---|---|")
    for alert in ALERTS:
        summary = re.sub(r"{{.*?}}", "…", alert.summary.removeprefix("run {{ $labels.run }}: "))
        name = f"[{alert.full_name}](#{alert.anchor})"
        yield f"| {name} | {alert.severity} | {alert.lasting if alert.lasting != '0s' else ''} | {_cell(summary)} |"


def models() -> str:
    """Return the page of models with the table of families."""
    return _with_part((DOCS / "models.md").read_text(), "families: megarl/families", list(_families()))


def _families() -> Iterator[str]:
    yield from ("| architecture | | adapters | FP8 rollouts | public models |", "|---|---|---|---|---|")
    for family in FAMILIES:
        shapes = family.models
        mixtures = [shape.experts for shape in shapes.values() if shape.experts is not None]
        block = "" if mixtures else ", feed-forward"
        if any(experts.is_alone for experts in mixtures):
            block = ", routed experts"
        adapted = f"attention{', shared expert' if family.engine.adapts_shared_expert else block}"
        cells = (
            f"`{family.architecture}`",
            _cell((sys.modules[type(family).__module__].__doc__ or "").partition("\n\n")[0]),
            "no" if "lora" in family.refuses else adapted,
            "no" if "fp8" in family.refuses else "yes",
            ", ".join(f"`{name}`" for name in shapes),
        )
        yield f"| {' | '.join(cells)} |"


def planning() -> str:
    """Return the page of plans with the rates of every GPU."""
    return _with_part((DOCS / "planning.md").read_text(), "gpus: megarl/planner/hardware.py", list(_gpus()))


def _gpus() -> Iterator[str]:
    rows = {
        "memory for programs, GiB": [gpu.memory_gib for gpu in GPUS.values()],
        "dense bfloat16, TFLOP/s": [gpu.tflops for gpu in GPUS.values()],
        "memory, GB/s": [gpu.memory_gb_per_s for gpu in GPUS.values()],
        "within a node, GB/s per direction": [gpu.node_gb_per_s for gpu in GPUS.values()],
        "network, GB/s per direction and GPU": [gpu.network_gb_per_s for gpu in GPUS.values()],
    }
    yield from (f"| | {' | '.join(GPUS)} |", "|---" * (len(GPUS) + 1) + "|")
    for name, rates in rows.items():
        yield f"| {name} | {' | '.join(f'{rate:g}' for rate in rates)} |"


def _with_part(page: str, source: str, lines: list[str]) -> str:
    """Return the page with these lines between two comments."""
    begin, end = f"<!-- {source}, written by make docs -->", f"<!-- end of {source.partition(':')[0]} -->"
    before, _, rest = page.partition(begin)
    return "\n".join([f"{before}{begin}", *lines, f"{end}{rest.partition(end)[2]}"])


def pages() -> dict[Path, str]:
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "api.md": api_page(),
        DOCS / "contributing.md": contributing(),
        DOCS / "models.md": models(),
        DOCS / "planning.md": planning(),
        DOCS / "runbook.md": runbook(),
        ROOT / "README.md": readme(),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
    (DOCS / "llms.txt").write_text(llms_text())


if __name__ == "__main__":
    main()
