"""Files of columns: Parquet, HDF5 and NumPy, read a slice of rows at a time and written a piece at a time.

    file = open_table(path)
    file.columns                      by name: dtype and shape of a row
    file.read("rewards", 10, 20)      these rows; Parquet reads the row groups that they lie in

A Parquet file with a column `steps` has an episode in each row, as RLDS has it (Ramos et al. 2021): a list of steps, or lists of
their fields. Its columns here are those fields, one step behind the other. The last step of an episode has an observation only.

Nothing stays open between two reads, so a file that is gone or cut short is noticed when it is read, with a sentence that names it.
A .npz is in memory as a whole.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.errors import ConfigError
from shoal.files import check_room

__all__ = ["SUFFIXES", "Column", "Columns", "TableFile", "open_table", "write_columns"]

SUFFIXES = (".parquet", ".hdf5", ".h5", ".npz")
STEPS, IS_FIRST, IS_LAST, IS_TERMINAL = "steps", "is_first", "is_last", "is_terminal"
TERMINALS, TIMEOUTS, REWARDS = "terminals", "timeouts", ("reward", "rewards")
HDF5_ROOM = 1 << 18  # bytes beside those of the columns
META = "shoal"  # under this name a file has JSON about itself
Columns = dict[str, np.ndarray]
Column = tuple[np.dtype[Any], tuple[int, ...]]


class TableFile(Protocol):
    """One file of columns with equally many rows."""

    columns: dict[str, Column]
    rows: dict[str, int]
    about: dict[str, Any] | None
    chunk: int
    """Rows that are read at once, however few are asked for."""

    def read(self, name: str, begin: int, end: int) -> np.ndarray: ...


def open_table(path: Path) -> TableFile:
    with _readable(path):
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            return _Nested(path) if STEPS in pq.read_schema(path).names else _Parquet(path)
        return _Npz(path) if path.suffix == ".npz" else _Hdf5(path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"reading {path} needs {error.name}: pip install 'shoal[{_extra(path)}]'") from None
    except ConfigError:
        raise
    except Exception as error:  # each library has its own for a file that is cut short or something else
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"cannot read {path}: {why}; copy the file again, or convert the recording again") from None


def _extra(path: Path) -> str:
    return "parquet" if path.suffix == ".parquet" else "minari"


# ---------------------------------------------------------------------------------------------- reading
class _Npz:
    chunk = 1

    def __init__(self, path: Path) -> None:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            self._arrays = {name: file[name] for name in file.files if name != META}
            self.about = json.loads(str(file[META])) if META in file.files else None
        self.columns = {name: (array.dtype, array.shape[1:]) for name, array in self._arrays.items()}
        self.rows = {name: len(array) for name, array in self._arrays.items()}

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        found: np.ndarray = self._arrays[name][begin:end]
        return found


class _Hdf5:
    chunk = 1

    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        self.columns: dict[str, Column] = {}
        self.rows: dict[str, int] = {}

        def note(name: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset) and node.ndim:
                self.columns[name], self.rows[name] = (node.dtype, node.shape[1:]), len(node)

        with h5py.File(path, "r") as file:
            file.visititems(note)
            about = file.attrs.get(META)
        self.about = json.loads(about) if about else None

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        import h5py

        with _readable(self._path), h5py.File(self._path, "r") as file:
            return np.asarray(file[name][begin:end])


class _Parquet:
    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._path = path
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            schema = file.schema_arrow
            first = file.read_row_group(0) if groups else schema.empty_table()
        self._ends = np.cumsum([0, *groups])
        self.chunk = max(groups, default=1)
        text = (schema.metadata or {}).get(META.encode())
        self.about = json.loads(text.decode()) if text else None
        self._shapes = {name: tuple(shape) for name, shape in (self.about or {}).get("shapes", {}).items()}
        arrays = {name: self._array(name, first.column(name)) for name in schema.names}
        self.columns = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
        self.rows = dict.fromkeys(schema.names, int(self._ends[-1]))

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        import pyarrow.parquet as pq

        first, last = (int(np.searchsorted(self._ends, row, side="right")) - 1 for row in (begin, max(begin, end - 1)))
        with _readable(self._path), pq.ParquetFile(self._path) as file:
            groups = [number for number in range(first, last + 1) if number < file.metadata.num_row_groups]
            column = file.read_row_groups(groups, columns=[name]).column(name)
            return self._array(name, column.slice(begin - int(self._ends[first]), end - begin))

    def _array(self, name: str, column: Any) -> np.ndarray:
        return _as_numpy(self._path, name, column, self._shapes.get(name, ()))


class _Nested:
    """Parquet with an episode in each row. Row groups are read as a whole, and only the fields that are asked for."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        self._path = path
        self.about: dict[str, Any] | None = None
        with pq.ParquetFile(path) as file:
            paths = (file.schema.column(number).path for number in range(len(file.schema)))
            names = [name for field in file.schema_arrow for name in _fields(field.type, field.name)]
            self._groups, episodes = file.metadata.num_row_groups, file.metadata.num_rows
        self._paths: dict[str, list[str]] = {}  # of a step's fields, their columns in the file
        for name, column in zip(names, paths, strict=True):
            self._paths.setdefault(name.removeprefix(f"{STEPS}/"), []).append(column)
        last = [self._field(number, number + 1, IS_LAST) for number in range(self._groups)]
        if (ends := sum(int(group.sum()) for group in last)) != episodes:
            raise ConfigError(f"{path} has {episodes:,} episodes, and is_last in {ends:,} of their steps; it must be true in the "
                              "last one of each")
        lengths = [len(group) for group in last]
        self._ends = np.cumsum([0, *lengths])
        self.chunk = max(lengths, default=1)
        steps = [name.removeprefix(f"{STEPS}/") for name in names if name.startswith(f"{STEPS}/")]
        first = {name: self._field(0, min(1, self._groups), name) for name in (*steps, TERMINALS, TIMEOUTS)
                 if name not in (IS_FIRST, IS_LAST, IS_TERMINAL)}
        self.columns = {name: (array.dtype, array.shape[1:]) for name, array in first.items()}
        self.rows = dict.fromkeys(self.columns, int(self._ends[-1]))

    def read(self, name: str, begin: int, end: int) -> np.ndarray:
        first, last = (int(np.searchsorted(self._ends, row, side="right")) - 1 for row in (begin, max(begin, end - 1)))
        skipped = int(self._ends[first])
        with _readable(self._path):
            return self._field(first, last + 1, name)[begin - skipped : end - skipped]

    def _field(self, first: int, stop: int, name: str) -> np.ndarray:
        """A field of all steps of some row groups."""
        if name == TERMINALS:  # of the step before the one that has the last observation
            over = np.append(self._field(first, stop, IS_TERMINAL)[1:], False)
            ended: np.ndarray = over.astype(bool) & ~self._field(first, stop, IS_LAST).astype(bool)
            return ended
        if name == TIMEOUTS:
            return self._field(first, stop, IS_LAST).astype(bool)
        import pyarrow.parquet as pq

        if name not in self._paths:
            raise ConfigError(f"{self._path}: its steps have no field {name}; an episode has is_last and is_terminal of each step")
        with pq.ParquetFile(self._path) as file:
            column = file.read_row_groups(range(first, min(stop, self._groups)), columns=self._paths[name]).column(STEPS)
        found = _as_numpy(self._path, f"{STEPS}/{name}", _of_steps(column, name.split("/")))
        if name in REWARDS:  # whatever stands beside the last observation is none
            found = np.where(self._field(first, stop, IS_LAST), np.zeros_like(found), found)
        return found


def _fields(kind: Any, name: str) -> Iterator[str]:
    """The paths of all fields within a type of Parquet, lists left out."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        for field in kind:
            yield from _fields(field.type, f"{name}/{field.name}")
    elif _is_list(kind):
        yield from _fields(kind.value_type, name)
    else:
        yield name


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _of_steps(column: Any, names: list[str]) -> Any:
    """The values of a field, one step behind the other: of a list of steps, or of lists of their fields."""
    import pyarrow as pa

    found, listed = column.combine_chunks(), True  # whether the list of an episode is still around it
    while listed or names:
        if pa.types.is_struct(found.type):
            found, names = found.field(names[0]), names[1:]
        elif listed and _is_list(found.type):
            found, listed = found.flatten(), False
        else:
            break
    return found


def _as_numpy(path: Path, name: str, column: Any, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Of lists of lists their numbers, in the shape of the lists or the one that is given."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # without rows there are no chunks to combine
        column = pa.concat_arrays(column.chunks) if column.chunks else pa.array([], column.type)
    rows, sizes = len(column), []
    while True:
        if column.null_count:
            raise ConfigError(f"{path}: column {name} has {column.null_count:,} missing values; fill them in or leave them out")
        if not _is_list(column.type):
            break
        lengths = pc.unique(pc.list_value_length(column)).to_pylist() or [0]
        if len(lengths) > 1:
            raise ConfigError(f"{path}: rows of column {name} have {min(lengths)} to {max(lengths)} numbers; each must have as "
                              "many")
        sizes.append(lengths[0])
        column = column.flatten()
    flat: np.ndarray = column.to_numpy(zero_copy_only=False)
    return flat.reshape(rows, *(shape or sizes))


# ---------------------------------------------------------------------------------------------- writing
def write_columns(path: Path, pieces: Iterable[Columns], about: dict[str, Any], rows: int) -> None:
    """Pieces with the same columns, one behind the other, `rows` in all, in the format of the suffix."""
    try:
        if path.name.endswith(".parquet.new"):
            _write_parquet(path, pieces, about)
        elif path.name.endswith(".npz.new"):
            _write_npz(path, pieces, about)
        else:
            _write_hdf5(path, pieces, about, rows)
    except ImportError as error:
        final = path.with_suffix("")
        raise ConfigError(f"writing {final.name[1:]} needs {error.name}: pip install 'shoal[{_extra(final)}]'") from None


def _write_npz(path: Path, pieces: Iterable[Columns], about: dict[str, Any]) -> None:
    parts = list(pieces)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with path.open("wb") as file:
        np.savez(file, **columns, **{META: np.array(json.dumps(about))})  # type: ignore[arg-type]  # numpy takes allow_pickle so


def _write_hdf5(path: Path, pieces: Iterable[Columns], about: dict[str, Any], rows: int) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for number, piece in enumerate(pieces):
            if not number:  # HDF5 ends the process where the disk is full
                check_room(path.parent, HDF5_ROOM + rows * sum(array[:1].nbytes for array in piece.values()))
            for name, array in piece.items():
                if name not in file:
                    file.create_dataset(name, data=array, maxshape=(None, *array.shape[1:]), chunks=True)
                    continue
                node = file[name]
                node.resize(len(node) + len(array), axis=0)
                node[len(node) - len(array) :] = array
        file.attrs[META] = json.dumps(about)


def _write_parquet(path: Path, pieces: Iterable[Columns], about: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(array: np.ndarray) -> Any:
        if array.ndim == 1:
            return pa.array(array)
        flat = np.ascontiguousarray(array).reshape(len(array), -1)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])

    writer = None
    try:
        for piece in pieces:
            table = pa.table({name: column(array) for name, array in piece.items()})
            if writer is None:
                shapes = {name: list(array.shape[1:]) for name, array in piece.items() if array.ndim > 2}
                writer = pq.ParquetWriter(path, table.schema.with_metadata({META: json.dumps({**about, "shapes": shapes})}))
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
