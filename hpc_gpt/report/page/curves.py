"""A curve of any length as a few hundred points that look the same: spikes stay, gaps stay."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

BUCKETS = 300


def thinned(x: Points, y: Points, buckets: int = BUCKETS) -> tuple[Points, Points]:
    """At most two points for each of the `buckets` that part the span of x: the least and the greatest y, in order.

    A bucket with no finite y gives one NaN, so that a gap stays a gap. x, y: (n,), x finite and in order of training;
    where it goes back and forth, so that buckets do not do, places in that order are parted instead. Short curves come
    back as they are.
    """
    if len(x) <= 2 * buckets:
        return x, y
    places = _extremes(x, y, buckets)
    if len(places) > 4 * buckets:
        places = _extremes(np.arange(len(x), dtype=np.float64), y, buckets)
    return x[places], np.where(np.isfinite(y[places]), y[places], np.nan)


def _extremes(x: Points, y: Points, buckets: int) -> NDArray[np.int64]:
    """The places of what `thinned` keeps."""
    low, high = float(x.min()), float(x.max())
    # Halved before they are taken apart, so that the span of absurd figures is finite.
    span = high / 2 - low / 2 or 1.0
    bucket = np.clip((x / 2 - low / 2) / span * buckets, 0, buckets - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    known = np.where(np.isfinite(y), y, np.nan)
    kept = [starts[np.isnan(np.fmin.reduceat(known, starts))]]
    lengths = np.diff(starts, append=len(y))
    for extreme in (np.fmin, np.fmax):
        found = np.flatnonzero(known == np.repeat(extreme.reduceat(known, starts), lengths))
        stretch = np.searchsorted(starts, found, side="right")
        kept.append(found[np.diff(stretch, prepend=0) > 0])
    return np.unique(np.concatenate(kept))


def pieces(*changes: NDArray[np.generic]) -> list[slice]:
    """The stretches over which none of the arrays, all of one length, changes."""
    length = len(changes[0])
    if not length:
        return []
    turned = np.zeros(length, np.bool_)
    for values in changes:
        turned[1:] |= values[1:] != values[:-1]
    edges = [0, *np.flatnonzero(turned).tolist(), length]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def unbroken(y: Points) -> list[slice]:
    """The stretches of finite values."""
    finite = np.isfinite(y)
    return [piece for piece in pieces(finite) if finite[piece.start]]
