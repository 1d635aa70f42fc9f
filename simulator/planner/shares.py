"""Shares of the training state: as even as the ranks' memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def fill_shares(caps: Sequence[float], counts: Sequence[int]) -> npt.NDArray[np.float64] | None:
    """Share of one rank of each class: min(cap, level) with one level that makes the sum 1.

    The largest share, and with it what uneven collectives cost, is as small as it can be.
    None where the caps can't hold the whole state.
    """
    cap = np.clip(np.asarray(caps, float), 0.0, 1.0)
    n = np.asarray(counts, float)
    if float(cap @ n) < 1.0 - 1e-9:
        return None
    full = np.zeros(len(cap), bool)
    shares = cap.copy()
    for _ in range(len(cap)):
        open_ranks = float(n[~full].sum())
        if open_ranks == 0.0:
            break
        level = (1.0 - float(cap[full] @ n[full])) / open_ranks
        shares = np.where(full, cap, level)
        over = ~full & (cap < level)
        if not over.any():
            break
        full |= over
    return np.asarray(shares / float(shares @ n))
