"""Define PyTorch operators ``fp8moe::name``: `operator` with two backends, `define` with one implementation."""

import typing
from collections.abc import Callable, Collection
from itertools import compress, takewhile
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fp8moe.runtime.backend import use_cuda

_library = torch.library.Library("fp8moe", "FRAGMENT")

_SCHEMA_TYPES = {Tensor: "Tensor", int: "SymInt", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}

_PLAIN = (Tensor, torch.nn.Parameter)

Written = Annotated[Tensor, "Tensor(a!)"]
"""A tensor that an operator writes to."""

Operands = TypeVar("Operands", bound=tuple)


class Signature(Generic[Operands]):
    """The arguments of an operator, derived from the types of a NamedTuple's fields or of a function's parameters.

        Tensor, int, float, bool, str, torch.dtype     an argument of this type
        tuple[int, ...]                         a list of integers
        a NamedTuple (data, scale)              two arguments, ``name`` and ``name_scale``
        another NamedTuple                      the arguments of its fields
        a class with `key` and `from_key`       its key, a str
        X | None                                an optional argument; for a NamedTuple, all its arguments are
                                                optional, and None if the NamedTuple is None
        Annotated[X, "Tensor(a!)"]              an argument of the type in quotes
        Annotated[a NamedTuple, (names)]        the arguments of the named fields

    fields: names of the fields that the operator takes, or None for all fields. Fields that it does not take keep their
    defaults.

    Trailing arguments have the defaults of their fields. Omitting them in a call saves time, since PyTorch then does
    not pass them to the implementation.

    schema, names: schema and names of the arguments. pack: turns the NamedTuple into a tuple of arguments. unpack:
    turns the arguments into the NamedTuple. Both are compiled once from Python expressions, so that calls need no loop.
    """

    pack: Callable[[Operands], tuple]
    unpack: Callable[..., Operands]

    def __init__(self, kind: type[Operands] | Callable[..., Any], fields: Collection[str] | None = None):
        self._named: dict[str, Any] = {"tuple": tuple}  # globals for evaluating the expressions
        arguments, self._given = _arguments(kind, self._named, fields)
        self.names = tuple(argument.name for argument in arguments)
        last = len(list(takewhile(lambda argument: argument.default, reversed(arguments))))
        self._parameters = [*self.names[: len(arguments) - last]]
        self._parameters += [f"{argument.name}={argument.default}" for argument in arguments[len(arguments) - last :]]
        types = (argument.type for argument in arguments)
        self.schema = ", ".join(map(" ".join, zip(types, self._parameters, strict=True)))
        if isinstance(kind, type):
            values = ", ".join(argument.expression for argument in arguments)
            self.pack = eval(f"lambda operands: ({values},)", {})
            self._given = f"{_name(kind, self._named)}({self._given})"
            self.unpack = self._function(self._given)

    def complete(self, schema: str) -> str:
        """Return the schema ``name -> ...`` with the arguments inserted."""
        name, _, results = schema.partition(" -> ")
        return f"{name}({self.schema}) -> {results}"

    def of_arguments(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that it takes the operator's arguments.

        function: takes the NamedTuple or, for a signature of a function, that function's parameters.
        """
        return self._function(f"function({self._given})", function=function)

    def _function(self, expression: str, **more: Any) -> Callable[..., Any]:
        return eval(f"lambda {', '.join(self._parameters)}: {expression}", self._named | more)


class _Argument(NamedTuple):
    """An argument: its type, name and default in the schema, and the path of its attribute in the NamedTuple.

    owner: the path of the inner NamedTuple that holds the attribute, if that NamedTuple may be None.
    """

    type: str
    name: str
    path: str
    default: str = ""
    owner: str = ""

    def inside(self, name: str, optional: str, given: bool) -> "_Argument":
        """Return this argument as part of an outer NamedTuple, in which this argument's NamedTuple is the field `name`.

        optional: "?" if the field `name` may be None. given: whether the field has no default.
        """
        owner = name if optional else self.owner and f"{name}.{self.owner}"
        default = "" if given else "None" if optional else self.default
        return _Argument(self.type.removesuffix(optional) + optional, self.name, f"{name}.{self.path}", default, owner)

    @property
    def expression(self) -> str:
        """A Python expression that reads the argument from the NamedTuple `operands`."""
        value = f"operands.{self.path}"
        return f"None if operands.{self.owner} is None else {value}" if self.owner else value


def _arguments(
    kind: type | Callable[..., Any], named: dict[str, Any], fields: Collection[str] | None = None, pair: str = ""
) -> tuple[list[_Argument], str]:
    """Return an operator's arguments, and an expression that rebuilds the values of `kind`'s fields from them.

    kind: a NamedTuple, or a function, whose parameters count as fields. named: collects the expression's globals.
    fields: names of the fields to take; the others have their defaults. pair: the field's name, if `kind` is the type
    of a pair (data, scale).
    """
    arguments, values = [], []
    defaults = getattr(kind, "_field_defaults", {})
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if name == "return":
            continue
        if fields is not None and name not in fields:
            values.append(_name(defaults[name], named))
            continue
        written = None
        if typing.get_origin(hint) is Annotated:
            hint, written = typing.get_args(hint)
        optional = "?" if NoneType in typing.get_args(hint) else ""
        if optional:
            (hint,) = set(typing.get_args(hint)) - {NoneType}
        own = f"{pair}_{name}".removesuffix("_data") if pair else name
        default = str(defaults[name]) if isinstance(defaults.get(name, ""), int | float | None) else ""
        if hasattr(hint, "_fields"):
            inner, value = _arguments(hint, named, written, pair=name if hint._fields == ("data", "scale") else "")
            value = f"{_name(hint, named)}({value})"
            if optional:
                value = f"None if {inner[0].name} is None else {value}"
            arguments += [argument.inside(name, optional, name not in defaults) for argument in inner]
        elif hasattr(hint, "from_key"):
            arguments.append(_Argument("str", own, f"{name}.key"))
            value = f"{_name(hint.from_key, named)}({own})"
        elif typing.get_origin(hint) is tuple:
            arguments.append(_Argument(f"SymInt[]{optional}", own, name, default))
            value = f"{own} and tuple({own})"
        else:
            arguments.append(_Argument(written or _SCHEMA_TYPES[hint] + optional, own, name, default))
            value = own
        values.append(value)
    return arguments, ", ".join(values)


def _name(value: Any, named: dict[str, Any]) -> str:
    """Add a value to the globals `named` under a new name, and return the name."""
    name = f"value_{len(named)}"
    named[name] = value
    return name


def operator(
    schema: str,
    *,
    check: Callable[..., object],
    cuda: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    quick: Callable[..., Callable[..., Any] | None] | None = None,
    forward_only: bool = False,
    signature: Signature | None = None,
) -> torch._ops.OpOverload:
    """Define ``fp8moe::name``, an operation with two backends, and return it.

    schema: ``name(...) -> ...``, or ``name -> ...`` to insert the arguments of the signature. The first argument is a
        tensor or a NamedTuple that begins with one; its device decides the backend.
    check: raises for wrong arguments. It does not read addresses, as fake tensors have none.
    cuda: launches the kernels. reference: computes the result in plain PyTorch. Both return the results of the schema.
    fake: returns uninitialized results, for fake tensors too.
    quick: called first, with the operands of the call. Returns a function to call in place of check, cuda and reference
        if an earlier call had operands of the same layout, otherwise None.
    forward_only: autograd skips the operator; only `runtime.autograd.run`, or an operator that has a backward, calls
        it.
    signature: the arguments, for a schema ``name -> ...``; None: the parameters of `check`.
    """

    def run(operand: Any, *others: Any) -> Any:
        ready = None if quick is None else quick(operand, *others)
        if ready is not None:
            return ready(operand, *others)
        check(operand, *others)
        return (cuda if use_cuda(_tensor(operand)) else reference)(operand, *others)

    def run_fake(operand: Any, *others: Any) -> Any:
        check(operand, *others)
        return fake(operand, *others)

    if "(" not in schema.partition(" -> ")[0]:
        signature = signature or Signature(check)
    return define(schema, run, run_fake, forward_only=forward_only, signature=signature)


def _tensor(operand: Any) -> Tensor:
    """Return the operand if it is a tensor, or the tensor that a NamedTuple begins with."""
    while not isinstance(operand, Tensor):
        operand, *_ = operand
    return operand


def _counted(implementation: Callable[..., Any], written: list[bool]) -> Callable[..., Any]:
    """Wrap an implementation to increment the version of each tensor that it writes, as PyTorch's operations do."""

    def run(*arguments: Any) -> Any:
        result = implementation(*arguments)
        for tensor in compress(arguments, written):
            if tensor is not None and not tensor.is_inference():
                increment_version(tensor)
        return result

    return run


def define(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    forward_only: bool = False,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    signature: Signature | None = None,
) -> Callable[..., Any]:
    """Define ``fp8moe::name`` from one implementation for every device, such as one that calls other operators.

    fake: the implementation for fake tensors. backward, setup_context: as for ``torch.library.register_autograd``.
    schema, forward_only: as for `operator`. signature: the arguments, for a schema ``name -> ...``; None: the
    parameters of `implementation`.
    """
    if "(" not in schema.partition(" -> ")[0]:
        signature = signature or Signature(implementation)
        schema = signature.complete(schema)
        implementation, fake = signature.of_arguments(implementation), signature.of_arguments(fake)
    name, _, rest = schema.partition("(")
    written = ["!)" in argument for argument in rest.split(" -> ")[0].split(", ")]
    if any(written):
        implementation = _counted(implementation, written)
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if forward_only:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"fp8moe::{name}", fake, lib=_library)
    overload = getattr(torch.ops.fp8moe, name).default
    if backward is None:
        return overload
    torch.library.register_autograd(f"fp8moe::{name}", backward, setup_context=setup_context, lib=_library)
    return _Differentiable(overload, implementation, backward, setup_context)


class _Differentiable:
    """An operator with a backward. A call that autograd alone records is an `autograd.Function` of the same name.

    The Function takes 7 us of CPU time; what `torch.library` registers takes 22 us for 4 arguments and 150 us for 30.
    Under torch.compile, a tracer, a mode, a transform or a subclass of Tensor, the operator itself is called.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        implementation: Callable[..., Any],
        backward: Callable[..., Any],
        setup_context: Callable[..., Any] | None,
    ):
        self.overload = overload

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = implementation(*arguments)
            if setup_context is not None:
                setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(overload.name(), (torch.autograd.Function,), methods)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator with all of its arguments, by position."""
        records = torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in arguments)
        alone = records and not torch.compiler.is_compiling() and not _watched(arguments)
        return (self._function.apply if alone else self.overload)(*arguments)


def _watched(arguments: tuple) -> bool:
    """Return whether the dispatcher has more to do with these arguments than autograd."""
    if torch._C._are_functorch_transforms_active() or _get_current_dispatch_mode() is not None:
        return True
    if torch._C._len_torch_function_stack() or torch._C._get_tracing_state() is not None:
        return True
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return True
    return any(isinstance(value, Tensor) and type(value) not in _PLAIN for value in arguments)
