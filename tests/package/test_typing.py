"""Everything public is annotated, so that type checkers see it; tests/typed_uses.py is what mypy makes of it."""

import inspect
import re
from importlib import import_module, resources
from pathlib import Path

import pytest

from tests.public_names import PUBLIC

USES = Path(__file__).parents[1] / "typed_uses.py"
OWN = [module for module in PUBLIC if module != "deep_gemm"]  # that has DeepGEMM's signatures


def functions():
    """Public functions, constructors and methods, by name."""
    for module in OWN:
        for name in import_module(module).__all__:
            value = getattr(import_module(module), name)
            if inspect.isfunction(value):
                yield f"{module}.{name}", value
            elif inspect.isclass(value):
                own = [cls for cls in value.__mro__ if cls.__module__.startswith("fp8moe")]
                methods = {key: member for cls in reversed(own) for key, member in vars(cls).items()}
                for key, member in methods.items():
                    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    public = not key.startswith("_") or key in ("__init__", "__call__")
                    if public and inspect.isfunction(member) and member.__module__.startswith("fp8moe"):
                        yield f"{module}.{name}.{key}", member


FUNCTIONS = dict(functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_complete(name):
    function = inspect.unwrap(FUNCTIONS[name])
    signature = inspect.signature(function)
    missing = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
    ]
    if signature.return_annotation is signature.empty and not name.endswith(".__init__"):
        missing.append("return")
    assert missing == []


def test_the_package_says_that_it_is_typed():
    assert resources.files("fp8moe").joinpath("py.typed").is_file()


@pytest.mark.parametrize("module", OWN)
def test_every_public_name_is_used(module):
    text = USES.read_text(encoding="utf-8")
    names = [name for name in import_module(module).__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text.replace("\n", " "))] == []
