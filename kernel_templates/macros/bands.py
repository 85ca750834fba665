"""Which chunks of an item the backward goes through at a time, and where what it keeps of them lies.

The gradients of a chunk need its V_new, the state in front of it and the gradient of the one behind it: kept for all chunks, that
is five times V in memory where K = V. So chunks go in bands, the last ones first, as gradients do. Of an item's n chunks, band b
of `bands` has those from

    low(b) = n (bands - 1 - b) // bands    up to    high(b) = low(b - 1), or n for the first band

and chunk j has the row slot // bands + place + j - low in the workspaces, where slot is that of the item's first chunk: as with
slots and places (sequences.py, segments.py), two items never share a row and slots // bands + places + 1 rows are enough for
any lengths. A single band has slots as its rows.
"""

from dataclasses import dataclass

from ..language import T, macro
from .register_roles import Item, Walk, item_of


def row_count(slots: int, places: int, bands: int) -> int:
    """Rows of the workspaces of a band."""
    return slots if bands == 1 else slots // bands + places + 1


@dataclass(frozen=True)
class BandWalk(Walk):
    """The items of a block, of which a band goes through some chunks."""

    bands: object
    band: object

    def low(self, item):
        return super().chunks(item) * (self.bands - 1 - self.band) // self.bands

    def high(self, item):
        return super().chunks(item) * (self.bands - self.band) // self.bands

    def row(self, item):
        """Of chunk low(item)."""
        return T.if_then_else(self.bands == 1, item.slot, item.slot // self.bands + item.place)


@dataclass(frozen=True)
class BandItem(Item):
    """An item as if it had no chunks but those of the band."""

    kept_at: object                      # row of the first of them


def without_others(item, **changed):
    return BandItem(**vars(item) | changed)


@macro
def band_item(walk, step):
    C = walk.problem.C
    item = item_of(walk, step)
    low = T.alloc_var("int32")
    length = T.alloc_var("int32")
    row = T.alloc_var("int32")
    low = walk.low(item)
    length = T.min(item.length, walk.high(item) * C) - low * C
    row = walk.row(item)
    return without_others(item, first=item.first + low * C, length=length, slot=item.slot + low, kept_at=row)
