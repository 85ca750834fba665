"""Which chunks of an item the backward goes through at a time, and where what it keeps of them lies.

The gradients of a chunk need its V_new, the state in front of it and the gradient of the one behind it: kept for all chunks, that
is five times V in memory where K = V. So chunks go in bands, the last ones first, as gradients do. Of an item's n chunks, band b
of `bands` has those from

    low(b) = n (bands - 1 - b) // bands    up to    high(b) = low(b - 1), or n for the first band

and chunk j has the row slot // bands + place + j - low in the workspaces, where slot is that of the item's first chunk: as with
slots and places (sequences.py, segments.py), two items never share a row and slots // bands + places + 1 rows are enough for
any lengths. A single band has slots as its rows.

Gradients come to a band from the one before. States have to go through all chunks in front of a band once more, unless the state
there is known: of two bands the first begins `midway`, in front of chunk n // 2 of each item, where a forward may have kept it.
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

    def begin(self, item):
        """The first chunk that is gone through for those of the band."""
        return self.low(item)


@dataclass(frozen=True)
class BandItem(Item):
    """An item as if it had no chunks but those of the band, and those in front of them that are gone through first."""

    begin: object                        # the first of these in the whole item
    kept_from: object                    # the first of the band, counted from there
    kept_at: object                      # row of chunk `begin`, if it is of the band: the others follow


def without_others(item, **changed):
    return BandItem(**vars(item) | changed)


@macro
def band_item(walk, step):
    C = walk.problem.C
    item = item_of(walk, step)
    begin = T.alloc_var("int32")
    length = T.alloc_var("int32")
    kept_from = T.alloc_var("int32")
    kept_at = T.alloc_var("int32")
    begin = walk.begin(item)
    length = T.min(item.length, walk.high(item) * C) - begin * C
    kept_from = walk.low(item) - begin
    kept_at = walk.row(item) - kept_from
    return without_others(
        item, first=item.first + begin * C, length=length, slot=item.slot + begin, begin=begin, kept_from=kept_from,
        kept_at=kept_at,
    )
