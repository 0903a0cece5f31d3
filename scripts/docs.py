"""Builds the API reference as HTML from the docstrings: `python scripts/docs.py --out site`."""

import importlib
import pkgutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import interruptible  # noqa: F401 (first)
from pdoc import doc, render

import ldm_jax
from ldm_jax.config.command_line import parse, run_script


@dataclass(frozen=True)
class Arguments:
    """Builds the API reference of every module. Any warning is an error."""

    out: Path = Path("site")
    """Directory for the pages; open its index.html."""


def main() -> None:
    """Parses the arguments and writes the pages."""
    arguments = parse(Arguments)
    names = ["ldm_jax", *(module.name for module in pkgutil.walk_packages(ldm_jax.__path__, "ldm_jax."))]
    modules = {name: doc.Module(importlib.import_module(name)) for name in names}
    render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Import of ArrayTree failed")  # a forward reference of optax.OptState
        for name, module in modules.items():
            # pdoc takes the submodules from __all__, which lists none here.
            module.submodules = [child for child in modules.values() if child.fullname.rpartition(".")[0] == name]
            page = arguments.out / (name.replace(".", "/") + ".html")
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(render.html_module(module, modules), encoding="utf-8")
        (arguments.out / "index.html").write_text(render.html_index(modules), encoding="utf-8")
        (arguments.out / "search.js").write_text(render.search_index(modules), encoding="utf-8")
    print(f"{len(modules)} modules: {arguments.out / 'index.html'}")


if __name__ == "__main__":
    run_script(main)
