"""Deal attention heads to more ranks than there are KV groups.

G groups of h query heads each; every rank holds heads of one group only and the KV head of that
group is replicated on the group's ranks. With N > G ranks a group gets N // G ranks, or one more::

    28 heads in 4 groups over 6 ranks:   group   0     1     2   3
                                         rank    0 1   2 3   4   5
                                         heads   4 3   4 3   7   7

Ranks stay in group order, so balance over the layers comes from choosing, in every layer, which
groups get the extra ranks and how each group's heads fall on its ranks.
"""

from collections.abc import Sequence

__all__ = ["deal_groups"]


def deal_groups(groups: int, heads_per_group: int, loads: Sequence[int]) -> list[int]:
    """Deal one layer so that the ranks' running totals stay level.

    Among all ways to give each group ``N // G`` or ``N // G + 1`` neighbouring ranks, take the one
    with the least sum of squared totals; ties go to extra ranks for the first groups.

    Args:
        groups: KV groups G, fewer than ranks.
        heads_per_group: query heads h of each group.
        loads: heads that each rank [N] holds in the layers dealt so far.

    Returns:
        Query heads of each rank [N], in head order; a group's heads never share a rank with
        another group's.
    """
    ranks = len(loads)
    assert 0 < groups < ranks
    fewest, extras = divmod(ranks, groups)
    cap = -(-heads_per_group // fewest)  # the layer's slowest rank; filling up to it costs no time
    # best[e]: (cost, heads by rank) of the groups so far, with e extra ranks used
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for group in range(groups):
        reached: dict[int, tuple[int, list[int]]] = {}
        for used, (cost, heads) in best.items():
            for more in (1, 0):
                now = used + more
                if now > extras or extras - now > groups - 1 - group:
                    continue
                share = loads[len(heads) : len(heads) + fewest + more]
                filled = _level(share, heads_per_group, cap)
                total = cost + sum((a + b) ** 2 for a, b in zip(share, filled, strict=True))
                if now not in reached or total < reached[now][0]:
                    reached[now] = (total, heads + filled)
        best = reached
    return best[extras][1]


def _level(loads: Sequence[int], heads: int, cap: int) -> list[int]:
    """Give ``heads`` one by one to the least loaded rank (the first of equals), ``cap`` at most."""
    given = [0] * len(loads)
    for _ in range(heads):
        open_ranks = [i for i in range(len(loads)) if given[i] < cap]
        given[min(open_ranks, key=lambda i: loads[i] + given[i])] += 1
    return given
