"""Expressions over columns: the same result at the writer, in the service and at the reader.

    from shoal.replay import column, n_step
    ret, discount, mask = n_step(column("reward"), column("discount"), gamma=0.99, n=3)
    priority = 0.9 * abs(column("td")).max() + 0.1 * abs(column("td")).mean()

An expression is a small tree of named operations (`expression_operations`), so it travels as data and is checked before it runs. It
is written for one item, [T, ...], and evaluated for a batch, [B, T, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shoal.replay.client.expression_operations import DYNAMIC, OPERANDS, OPERATIONS, PARAMETERS, result_bytes
from shoal.replay.errors import InvalidItem, NotFound, Refused
from shoal.replay.table.columns import Tree, flatten, unflatten

__all__ = ["ByteBudget", "Expression", "apply", "check", "column", "concat", "n_step", "transform_from", "transform_to"]

MOST_NODES = 1000


class ByteBudget:
    """What a transform may cost: the bytes of all its results together, each as often as there are items."""

    def __init__(self, most_bytes: int, items: int = 1) -> None:
        self._most, self._left, self._items = most_bytes, most_bytes, items

    def spend(self, nbytes: int) -> None:
        self._left -= nbytes * self._items
        if self._left < 0:
            raise Refused(f"the transform makes more than {self._most} bytes: ask for fewer items, or apply it at the reader")


def _alone(operation: str) -> Callable[[Expression], Expression]:
    """A method that applies an operation to its expression."""

    def made(self: Expression) -> Expression:
        return Expression(operation, [self])

    return made


def _with(operation: str, turned: bool = False) -> Callable[[Expression, Any], Expression]:
    """A method that combines its expression with another one, or with a number; `turned`: that one comes first."""

    def made(self: Expression, other: Any) -> Expression:
        both = [self, lift(other)]
        return Expression(operation, both[::-1] if turned else both)

    return made


def _reduction(operation: str) -> Callable[..., Expression]:
    """A method that reduces its expression over some axes of an item, or over all."""

    def made(self: Expression, axes: Any = None) -> Expression:
        return Expression(operation, [self], axes=axes)

    return made


class Expression:
    """A column, a constant, or an operation on expressions."""

    __slots__ = ("arguments", "name", "parameters")
    __hash__ = object.__hash__

    def __init__(self, name: str, arguments: Sequence[Expression] = (), **parameters: Any) -> None:
        if name not in OPERATIONS and name not in ("column", "constant"):
            raise InvalidItem(f"unknown operation {name!r}")
        self.name, self.arguments, self.parameters = name, tuple(arguments), parameters

    # -- evaluation

    def batch(self, columns: Mapping[str, npt.NDArray[Any]], budget: ByteBudget | None = None) -> npt.NDArray[Any]:
        """The value for every item of a batch: [B, T, ...] columns give [B, ...]."""
        if self.name == "column":
            path: str = self.parameters["path"]
            if path not in columns:
                raise NotFound(f"no column {path!r}; there are {sorted(columns)}")
            found: npt.NDArray[Any] = columns[path]
            return found
        if self.name == "constant":
            return cast(npt.NDArray[Any], self.parameters["value"])  # a bare number keeps the other side's dtype
        values = [argument.batch(columns, budget) for argument in self.arguments]
        try:
            if budget is not None:
                budget.spend(result_bytes(self.name, values, self.parameters))
            return np.asarray(OPERATIONS[self.name](*values, **self.parameters))
        except (ValueError, TypeError, IndexError, ArithmeticError, MemoryError) as error:
            shapes = [list(np.shape(value))[1:] for value in values]
            raise InvalidItem(f"{self.name} of {shapes} with {str(self.parameters)[:200]}: {error}") from error

    def item(self, columns: Mapping[str, Any]) -> npt.NDArray[Any]:
        """The value for one item: [T, ...] columns."""
        value: npt.NDArray[Any] = self.batch({path: np.asarray(leaf)[None] for path, leaf in columns.items()})[0]
        return value

    def shape(self, columns: Mapping[str, tuple[tuple[int, ...], Any]]) -> tuple[int | None, ...]:
        """The shape for one item, from the columns' (shape, dtype); None where it depends on the data."""
        zeros = {path: np.zeros((1, *shape), dtype) for path, (shape, dtype) in columns.items()}
        result = self.batch(zeros).shape[1:]
        return (None, *result[1:]) if self.name in DYNAMIC else result

    def columns(self) -> set[str]:
        """The paths that the expression reads."""
        if self.name == "column":
            return {self.parameters["path"]}
        return set().union(*(argument.columns() for argument in self.arguments))

    @property
    def dynamic(self) -> bool:
        """Whether its length depends on the data."""
        return self.name in DYNAMIC or any(argument.dynamic for argument in self.arguments)

    # -- select, join, reorder

    def __getitem__(self, index: Any) -> Expression:
        if isinstance(index, slice):
            return Expression("slice", [self], start=index.start, stop=index.stop, step=index.step)
        if isinstance(index, (list, tuple, np.ndarray)):
            return Expression("gather", [self], indices=[int(i) for i in index])
        return Expression("index", [self], at=int(index))

    def window(self, n: int, stride: int = 1) -> Expression:
        return Expression("window", [self], n=n, stride=stride)

    def before(self, condition: Expression) -> Expression:
        return Expression("before", [self, condition])

    def after(self, condition: Expression) -> Expression:
        return Expression("after", [self, condition])

    def truncate(self, condition: Expression) -> Expression:
        return Expression("truncate", [self, condition])

    def stack(self, n: int) -> Expression:
        return Expression("stack", [self], n=n)

    def pad(self, length: int, mode: str = "end") -> Expression:
        return Expression("pad", [self], length=length, mode=mode)

    def transpose(self, *axes: int) -> Expression:
        return Expression("transpose", [self], axes=list(axes))

    def reshape(self, *shape: int) -> Expression:
        return Expression("reshape", [self], shape=list(shape))

    def shift(self, k: int, fill: float = 0) -> Expression:
        return Expression("shift", [self], k=k, fill=fill)

    swap_time_batch = _alone("swap")

    # -- reduce, scan

    sum, prod, mean = _reduction("sum"), _reduction("prod"), _reduction("mean")
    min, max = _reduction("min"), _reduction("max")
    any, all = _reduction("any"), _reduction("all")
    cumsum, cumprod, running_max = _alone("cumsum"), _alone("cumprod"), _alone("running_max")

    def discounted_sum(self, discount: Expression) -> Expression:
        return Expression("discounted_sum", [self, discount])

    # -- arithmetic

    __add__, __radd__ = _with("add"), _with("add", turned=True)
    __sub__, __rsub__ = _with("subtract"), _with("subtract", turned=True)
    __mul__, __rmul__ = _with("multiply"), _with("multiply", turned=True)
    __truediv__, __pow__ = _with("divide"), _with("power")
    __neg__, __abs__, __invert__ = _alone("negative"), _alone("abs"), _alone("logical_not")
    __lt__, __le__, __gt__, __ge__ = _with("less"), _with("less_equal"), _with("greater"), _with("greater_equal")
    __eq__ = _with("equal")  # type: ignore[assignment]  # an expression, not a bool
    __ne__ = _with("not_equal")  # type: ignore[assignment]  # an expression, not a bool

    def __repr__(self) -> str:
        inside = [repr(argument) for argument in self.arguments]
        inside += [f"{name}={value!r}" for name, value in self.parameters.items()]
        return f"{self.name}({', '.join(inside)})"

    # -- travel

    def to_data(self) -> list[Any]:
        return [self.name, [argument.to_data() for argument in self.arguments], self.parameters]

    @classmethod
    def from_data(cls, data: Any) -> Expression:
        """The expression that to_data described; refuses anything else."""
        expression, _ = cls._read(data, MOST_NODES)
        return expression

    @classmethod
    def _read(cls, data: Any, budget: int) -> tuple[Expression, int]:
        if budget <= 0 or not (isinstance(data, (list, tuple)) and len(data) == 3):
            raise InvalidItem("an expression is [name, arguments, parameters] of bounded size")
        name, arguments, parameters = data
        if not (isinstance(name, str) and isinstance(arguments, (list, tuple)) and isinstance(parameters, dict)):
            raise InvalidItem("an expression is [name, arguments, parameters]")
        known: list[Expression] = []
        budget -= 1
        for argument in arguments:
            inner, budget = cls._read(argument, budget)
            known.append(inner)
        if name == "column" and not isinstance(parameters.get("path"), str):
            raise InvalidItem("a column expression needs a path")
        if name == "constant" and not isinstance(parameters.get("value"), (bool, int, float)):
            raise InvalidItem("a constant must be a number")
        if not all(isinstance(key, str) for key in parameters):
            raise InvalidItem("parameters are named")
        wanted = max(1, len(known)) if name == "concat" else OPERANDS.get(name, 0)
        if len(known) != wanted or (name in OPERATIONS and parameters.keys() != PARAMETERS[name]):
            raise InvalidItem(f"{name} does not take {len(known)} expressions and the parameters {sorted(parameters)}")
        return cls(name, known, **parameters), budget


def lift(value: Any) -> Expression:
    """A number as an expression."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, (bool, int, float, np.number)):
        return Expression("constant", value=value.item() if isinstance(value, np.number) else value)
    raise InvalidItem(f"expressions combine with numbers and expressions, not {type(value).__name__}")


def column(path: str) -> Expression:
    """A column by its path."""
    return Expression("column", path=path)


def concat(expressions: Sequence[Expression], axis: int = 0) -> Expression:
    return Expression("concat", list(expressions), axis=axis)


def n_step(
    reward: Expression, discount: Expression, gamma: float, n: int, edge: str = "shorten"
) -> tuple[Expression, Expression, Expression]:
    """The n-step return, the product of discounts, and the mask of positions that count.

    At the end of the steps: 'shorten' takes what is left, 'mask' marks it as not counting, 'drop' leaves it out.
    """
    parts = (Expression("n_step", [reward, discount], gamma=gamma, n=n, edge=edge, part=part) for part in range(3))
    ret, product, mask = parts
    return ret, product, mask


def apply(transform: Tree, data: Tree, budget: ByteBudget | None = None) -> Tree:
    """A tree of expressions (or paths of columns to keep) on the data of a batch."""
    columns = flatten(data)
    return unflatten({path: np.ascontiguousarray(leaf.batch(columns, budget)) for path, leaf in _leaves(transform).items()})


def _leaves(transform: Tree) -> dict[str, Expression]:
    """The expressions of a transform by their paths."""
    leaves = {path: column(leaf) if isinstance(leaf, str) else leaf for path, leaf in flatten(transform).items()}
    for path, leaf in leaves.items():
        if not isinstance(leaf, Expression):
            raise InvalidItem(f"a transform is made of expressions and names of columns, got {type(leaf).__name__} for {path!r}")
    return leaves


def check(transform: Tree, columns: Mapping[str, tuple[tuple[int, ...], Any]], budget: ByteBudget | None = None) -> None:
    """Refuse expressions that columns of these (shape, dtype) cannot feed, before anything is drawn for them.

    Lengths that depend on the data are known only with the data.
    """
    batch = {path: np.zeros((1, *shape), dtype) for path, (shape, dtype) in columns.items()}
    for expression in _leaves(transform).values():
        if missing := expression.columns() - columns.keys():
            raise NotFound(f"no column {min(missing)!r}; there are {sorted(columns)}")
        if not expression.dynamic:
            with np.errstate(all="ignore"):
                expression.batch(batch, budget)


def transform_to(transform: Tree | None) -> dict[str, Any] | None:
    if transform is None:
        return None
    return {path: leaf.to_data() for path, leaf in _leaves(transform).items()}


def transform_from(data: Any) -> Tree | None:
    if data is None:
        return None
    if not isinstance(data, dict) or not data:
        raise InvalidItem("a transform is a dictionary of expressions")
    return unflatten({path: Expression.from_data(leaf) for path, leaf in data.items()})
