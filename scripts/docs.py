"""Builds the API reference as HTML from the docstrings: `python scripts/docs.py --out site`."""

import ast
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdoc import doc, render

import ldm_jax
from ldm_jax.config.command_line import parse, run_script


@dataclass(frozen=True)
class Arguments:
    """Builds the API reference of every module. Any warning is an error."""

    out: Path = Path("site")
    """Directory for the pages; open its index.html."""


class _Source:
    """An annotation or default as in the source: `MemoryLike` instead of the union that the alias stands for."""

    def __init__(self, node: ast.expr):
        self._text = ast.unparse(node)

    def __repr__(self) -> str:
        return self._text


def main() -> None:
    """Parses the arguments and writes the pages."""
    arguments = parse(Arguments)
    names = ["ldm_jax", *(module.name for module in pkgutil.walk_packages(ldm_jax.__path__, "ldm_jax."))]
    modules = {name: doc.Module(importlib.import_module(name)) for name in names}
    definitions = dict(item for module in modules.values() for item in _definitions(module))
    render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Import of ArrayTree failed")  # a forward reference of optax.OptState
        for name, module in modules.items():
            # pdoc takes __all__, which lists no modules here, for the list of the submodules, too.
            module.submodules = [child for child in modules.values() if child.fullname.rpartition(".")[0] == name]
            _show_source(module.members.values(), definitions)
            page = arguments.out / (name.replace(".", "/") + ".html")
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(render.html_module(module, modules), encoding="utf-8")
        (arguments.out / "index.html").write_text(render.html_index(modules), encoding="utf-8")
        (arguments.out / "search.js").write_text(render.search_index(modules), encoding="utf-8")
    print(f"{len(modules)} modules: {arguments.out / 'index.html'}")


def _definitions(module: doc.Module) -> Iterator[tuple[tuple[str, str], ast.AST]]:
    """The functions and classes of a module's source, by module and qualified name."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[tuple[str, str], ast.AST]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield (module.modulename, prefix + node.name), node
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return walk(ast.parse(inspect.getsource(module.obj)).body, "")


def _show_source(members: Iterable[doc.Doc], definitions: Mapping[tuple[str, str], ast.AST]) -> None:
    """Shows annotations and defaults as in the source, and drops the docstrings that NamedTuple generates."""
    for member in members:
        module, name = member.taken_from
        if member.docstring.startswith(("Alias for field number", "Create new instance of")):
            member.docstring = ""
        node, owner = definitions.get((module, name)), definitions.get((module, name.rpartition(".")[0]))
        fields = _fields(owner)
        if isinstance(member, doc.Class):
            _show_source(member.members.values(), definitions)
        elif isinstance(member, doc.Variable) and member.name in fields:
            member.annotation_str = f": {ast.unparse(fields[member.name])}"
        elif isinstance(member, doc.Function) and isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            annotations = {argument.arg: argument.annotation for argument in arguments if argument.annotation}
            nodes = [*node.args.defaults, *node.args.kw_defaults]
            defaults = {a.arg: default for a, default in zip(arguments[::-1], nodes[::-1], strict=False) if default}
            _set_signature(member, annotations, defaults, node.returns)
        elif isinstance(member, doc.Function) and fields:  # the constructor of a dataclass or named tuple
            _set_signature(member, fields, {}, None)


def _fields(node: ast.AST | None) -> dict[str, ast.expr]:
    body = node.body if isinstance(node, ast.ClassDef) else []
    return {
        statement.target.id: statement.annotation
        for statement in body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _set_signature(
    function: doc.Function,
    annotations: Mapping[str, ast.expr],
    defaults: Mapping[str, ast.expr],
    returns: ast.expr | None,
) -> None:
    signature = function.signature
    parameters = [
        parameter.replace(
            annotation=_Source(annotations[name]) if name in annotations else parameter.annotation,
            default=_Source(defaults[name]) if name in defaults else parameter.default,
        )
        for name, parameter in signature.parameters.items()
    ]
    returned = signature.return_annotation if returns is None else _Source(returns)
    function.signature = signature.replace(parameters=parameters, return_annotation=returned)


if __name__ == "__main__":
    run_script(main)
