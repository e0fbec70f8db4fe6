"""Where each value lies in the arrays of a table (`arrays.TableArrays`), and what may become of an item of a request."""

from __future__ import annotations

# columns of items
KEY, TIMES, SHAPE, REC, _, _, BORN, PRIORITY = range(8)
RECORD = 8  # of words: where an item with one record keeps it
# columns of links
PREV, NEXT, DENSE = range(3)
# entries of meta
SIZE, HEAD, TAIL, FREE, USED, NEXT_KEY, STAMP, BYTES, REC_TOP, DIRTY = range(10)
SELECT, REMOVE, STAMPED = 10, 11, 12
REC_FREE = 16
# what became of an item of a request
INSERTED, UPDATED, BAD_PRIORITY, WAITING = 0, 1, 2, 3
