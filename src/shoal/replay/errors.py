"""What the replay service raises, all under shoal's exception tree.

    ShoalError
    └── ReplayError
        ├── Timeout             a deadline passed; nothing was changed (also a shoal.errors.Timeout)
        ├── SignatureMismatch   a value's path, dtype or shape is not the one the table or writer was promised
        ├── NotFound            a table, checkpoint or column that does not exist
        ├── Closed              the server, client or writer was closed
        ├── InvalidItem         an item is refused: bad priority, cell out of history, bad slice
        └── Refused             the server refused a message: malformed, too large, not allowed
"""

from __future__ import annotations

from shoal.errors import CheckpointError, ConfigError, ReplayError, ShoalError
from shoal.errors import Timeout as _WireTimeout

__all__ = ["Closed", "InvalidItem", "NotFound", "Refused", "ReplayError", "SignatureMismatch", "Timeout"]


class Timeout(ReplayError, _WireTimeout):
    """A deadline passed. The operation was not applied and will not be applied later."""


class Unanswered(Timeout):
    """The server itself did not answer in time. It drops a request that it reads after the deadline; only one that it was just
    answering may have been applied."""


class SignatureMismatch(ReplayError):
    """A value does not have the promised path, dtype or shape. Names the path."""


class NotFound(ReplayError):
    """There is no such table, column or checkpoint."""


class Closed(ReplayError):
    """The server, client or writer was closed."""


class InvalidItem(ReplayError):
    """An item cannot be accepted; says which value is wrong."""


class Refused(ReplayError):
    """The server refused a message. It changed nothing."""


BY_NAME: dict[str, type[ShoalError]] = {
    kind.__name__: kind
    for kind in (Timeout, SignatureMismatch, NotFound, Closed, InvalidItem, Refused, ReplayError, CheckpointError, ConfigError)
}
"""The errors that travel from a server to its clients as what they are."""
