"""Files of columns: Parquet, HDF5 and NumPy, read a slice of rows at a time and written a piece at a time.

    file = open_table(path)
    file.columns                      by name: dtype and shape of a row
    file.read("rewards", 10, 20)      these rows; Parquet reads the row groups that they lie in

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

__all__ = ["SUFFIXES", "Column", "Columns", "TableFile", "open_table", "write_columns"]

SUFFIXES = (".parquet", ".hdf5", ".h5", ".npz")
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
            return _Parquet(path)
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
        import pyarrow as pa

        column = column.combine_chunks()
        if column.null_count:
            raise ConfigError(f"{self._path}: column {name} has {column.null_count:,} missing values; fill them in or leave them "
                              "out")
        if isinstance(column, pa.ChunkedArray):  # without rows there are no chunks to combine
            column = pa.concat_arrays(column.chunks) if column.chunks else pa.array([], column.type)
        if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
            flat: np.ndarray = column.flatten().to_numpy(zero_copy_only=False)
            return flat.reshape(len(column), *self._shapes.get(name, (-1,)))
        plain: np.ndarray = column.to_numpy(zero_copy_only=False)
        return plain


# ---------------------------------------------------------------------------------------------- writing
def write_columns(path: Path, pieces: Iterable[Columns], about: dict[str, Any]) -> None:
    """Pieces with the same columns, one behind the other, in the format of the suffix."""
    try:
        if path.name.endswith(".parquet.new"):
            _write_parquet(path, pieces, about)
        elif path.name.endswith(".npz.new"):
            _write_npz(path, pieces, about)
        else:
            _write_hdf5(path, pieces, about)
    except ImportError as error:
        final = path.with_suffix("")
        raise ConfigError(f"writing {final.name[1:]} needs {error.name}: pip install 'shoal[{_extra(final)}]'") from None


def _write_npz(path: Path, pieces: Iterable[Columns], about: dict[str, Any]) -> None:
    parts = list(pieces)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    with path.open("wb") as file:
        np.savez(file, **columns, **{META: np.array(json.dumps(about))})  # type: ignore[arg-type]  # numpy takes allow_pickle so


def _write_hdf5(path: Path, pieces: Iterable[Columns], about: dict[str, Any]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for piece in pieces:
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
