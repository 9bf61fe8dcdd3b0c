"""Into how many groups the channels of a group norm may fall without losing the input."""

from __future__ import annotations

MOST_GROUPS = 32  # of group norm's paper, Wu & He (2018)
LEAST_VALUES = 3  # of a group: one value leaves nothing of the input, and two leave its sign


def safe_groups(channels: int, most: int | None = None, positions: int | None = None) -> int:
    """Return the largest divisor of the channels, up to 32, that leaves two channels or more to a group.

    >>> [safe_groups(c) for c in (64, 32, 24, 3, 1)]
    [32, 16, 12, 1, 1]
    >>> safe_groups(4, most=4), safe_groups(4, most=4, positions=64), safe_groups(4, most=4, positions=1)
    (2, 4, 1)

    A group of one channel has one value where there is one position, and its own mean taken away from it leaves
    nothing: the layer would give its bias whatever the input. With two channels there is something left, whatever the
    positions. ``most`` is another number than 32. If the ``positions`` of an input are known, groups have three values
    or more, for two are always -1 and 1; and with ``most`` they may be of one channel.
    """
    return max(
        (
            groups
            for groups in range(1, (most or MOST_GROUPS) + 1)
            if channels % groups == 0
            and (channels >= 2 * groups or (most is not None and positions is not None))
            and (positions is None or channels * positions >= LEAST_VALUES * groups)
        ),
        default=1,
    )
