"""The joint rule for one head in plain integers, by its definition: every pair is counted."""

from math import ceil

import numpy as np


def on_blocks(masses, size):
    """Sums masses at token distances to block diagonals."""
    result = [0] * (len(masses) // size + 1)
    for s, mass in enumerate(map(int, masses)):
        d, place = divmod(s, size)
        far = mass // size * place + mass % size * place // size
        result[d] += mass - far
        result[d + 1] += far
    return result[:-1]


def mean_over_queries(masses, tokens, num_probe_queries):
    """Entry i: the mean over the last queries, at p, of the masses at p - i, rounded down."""
    masses = list(map(int, masses))
    queries = [p for p in range(tokens - num_probe_queries, tokens) if p >= 0]
    return [
        sum(masses[p - i] for p in queries if p >= i) // num_probe_queries
        for i in range(len(masses))
    ]


def mask(kept, tokens, size):
    """Rows of blocks x tokens: computed pairs, by whole blocks and by columns."""
    columns, diagonals = kept
    used = -(-tokens // size)
    rows, keys = np.arange(used)[:, None], np.arange(used * size) // size
    by_block = np.isin(rows - keys, list(diagonals))
    by_column = np.isin(np.arange(used * size), list(columns)) & (keys <= rows)
    return by_block, by_column & ~by_block


def cost(kept, tokens, size):
    """Half blocks, rounded up; a row's own block is one."""
    by_block, by_column = mask(kept, tokens, size)
    own = -(-tokens // size)
    return 2 * int(by_block.sum()) // size - own + ceil(2 * int(by_column.sum()) / size)


def held(kept, scores, tokens, size):
    """Mass of the probe queries, as seen by the last row of blocks."""
    last = np.logical_or(*mask(kept, tokens, size))[-1]
    return sum(int(x) for x in scores[: last.size][last])


def keep(columns, diagonals, tokens, size, rule):
    """Returns (columns, block diagonals) as sets, from int masses [S] each with valid `tokens`."""
    shadow = mean_over_queries(diagonals, tokens, rule.num_probe_queries)
    excess = [max(int(x) - y, 0) for x, y in zip(columns, shadow, strict=True)]
    excess = [x if j < tokens else 0 for j, x in enumerate(excess)]
    sinks = set(range(min(rule.sink_tokens, tokens)))
    ranked = sorted(range(len(excess)), key=lambda j: (j not in sinks, -excess[j], j))
    candidates = ranked[: rule.max_verticals]
    used = -(-tokens // size)
    block_mass = on_blocks(diagonals, size)
    most = floor_share(used**2, rule.max_density)
    local = widest_window(floor_share(most, rule.local_fraction), tokens, size, sinks)
    width = max(rule.local_blocks, 0 if local is None else len(local[1]))
    nearest = set(range(min(width, used)))
    enough = floor_share(sum(map(int, columns)), rule.top_p)

    def at(price):
        chosen = sinks | {j for j in candidates if excess[j] * size >= price}
        explained = [x if j in chosen else 0 for j, x in enumerate(excess)]
        explained = on_blocks(mean_over_queries(explained, tokens, rule.num_probe_queries), size)
        far = {d for d in range(used) if block_mass[d] - explained[d] >= price}
        return chosen, nearest | far

    def ends(kept):
        too_much = cost(kept, tokens, size) > most
        return held(kept, columns, tokens, size) >= enough or too_much

    prices = rule.prices().tolist()
    low, high = 0, len(prices) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if ends(at(prices[middle])) else (middle + 1, high)
    kept = at(prices[high])
    if cost(kept, tokens, size) > most:
        kept = at(prices[max(high - 1, 0)])
    window = widest_window(cost(kept, tokens, size), tokens, size, sinks)
    if window is None or len(window[1]) < rule.local_blocks:
        return kept
    better = held(window, columns, tokens, size) > held(kept, columns, tokens, size)
    return window if better else kept


def widest_window(most, tokens, size, sinks):
    """Returns the widest window with the sinks within the cost, or None."""
    fitting = None
    for width in range(1, -(-tokens // size) + 1):
        window = sinks, set(range(width))
        fitting = window if cost(window, tokens, size) <= most else fitting
    return fitting


def floor_share(total, share):
    """Returns floor(share * total) for shares that are multiples of 2^-15."""
    return total * round(share * 2**15) // 2**15
