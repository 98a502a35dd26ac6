"""Sparse attention for Hugging Face transformers, as trained by mtraining-jax.

This file needs only PyTorch (2.9 or later) and transformers (5.0 or later). Importing it registers
the attention implementation "mtraining_sparse":

    import sys; sys.path.append("FOLDER"); import sparse_attention
    model = AutoModelForCausalLM.from_pretrained("FOLDER", attn_implementation="mtraining_sparse")

A forward pass over a whole prompt attends to the pairs selected by the pattern in
`config.sparse_attention` (the entry of config.json). With the pattern sampled_rows, every later
token attends to the blocks that hold much of its own attention, or to all earlier tokens while
these are fewer than `min_sparse_tokens`, or after
`model.config.sparse_attention["dense_new_tokens"] = True`; with other patterns always to all.
Selected blocks are those of mtraining-jax with exact scores, but for differences by rounding. On a
GPU, FlexAttention and Triton kernels compute prompts; new tokens, and prompts on a CPU, are
computed by PyTorch operations.

Letters in shapes: B batch, S tokens, Hq and Hk query and key/value heads, D head width, NB blocks.
"""
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

try:
    import triton
    import triton.language as tl
except ImportError:  # installed with PyTorch for GPUs
    triton = None

NAME = "mtraining_sparse"

_COMMON = "kind block_size min_sparse_tokens local_blocks "
_ROWS = _COMMON + "tau min_block_mass sink_blocks dense_prefix_tokens dense_suffix_tokens "
_OPTIONS = {
    "sampled_rows": _ROWS + "random_block_prob probe_queries_per_block columns",
    "xattention": _ROWS + "random_block_prob stride",
    "vertical_slash": _COMMON + "top_p preset max_verticals max_slashes min_verticals min_slashes "
    "num_probe_queries sink_tokens",
}
_Options = SimpleNamespace
_Selected = tuple[Tensor, Tensor | None]  # blocks and columns
_Scored = tuple[Tensor, Tensor, Tensor, float]  # rows, keys, positions, scale
_MASS_ONE = 1 << 30
_TAU_ONE = 1 << 15
_NEW_TOKEN_SHARE = 5.0  # times 1 - tau: least mass of selected blocks, in units of the mean
_STEP_SIZE = 1 << 28  # fp32 logits, or bytes of masks, in memory at a time
_TILE = 128  # tokens per block of the GPU kernels
_CHUNK = 64  # key blocks per program of a GPU kernel


def sparse_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attends with the pattern of the model's config: an attention function of transformers.

    Args:
        module: attention layer; its `config.sparse_attention` has the pattern.
        query: [B, Hq, n, D], rotated; n is 1 for a new token.
        key, value: [B, Hk, S, D]; S is n for a prompt.
        attention_mask: mask of SDPA; None for a prompt without padding, and for a new token that
            sees all keys.
        scaling: scale of the logits; 1/sqrt(D) by default.
        dropout: must be 0.

    Returns:
        [B, n, Hq, D], and None for the weights.

    Raises:
        ValueError: the pattern or the case is not supported.
    """
    length, options = query.shape[2], None
    # Layers with a sliding window have no pattern.
    if not _has_window(module.config, others.get("sliding_window")):
        options = _options(getattr(module.config, "sparse_attention", None))
    if options is None or (length == 1 and options.dense_new_tokens):
        how = {"scaling": scaling, "dropout": dropout, **others}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    _check(query, key, attention_mask, dropout, others, options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if length == 1:
        with torch.no_grad():
            out = _attend_new_token(query, key, value, attention_mask, scale, options)
        return out, None
    key, value = (x[:, :, :length] for x in (key, value))  # a static cache has room after it
    with torch.no_grad():
        blocks, columns = _select(query, key, scale, options)
        attend = _attend_on_gpu if query.is_cuda else _attend
        out = attend(query, key, value, blocks, columns, scale, options.block_size)
    return out.transpose(1, 2).contiguous(), None


def _has_window(config: Any, window: int | None) -> bool:
    """Whether a layer has a window: of equal layers, one as long as the context is none."""
    if window is None or len(set(getattr(config, "layer_types", None) or ())) > 1:
        return window is not None
    return window < config.max_position_embeddings


def _options(entry: Any) -> _Options:
    """Checks the entry of config.json."""
    where = f'{NAME}: the entry "sparse_attention" of config.json'
    if not isinstance(entry, dict) or entry.get("kind") not in _OPTIONS:
        found = "is missing" if entry is None else f"is {entry!r}"
        raise ValueError(f"{where} {found}; kind must be one of {', '.join(_OPTIONS)}")
    rows = entry["kind"] == "sampled_rows"
    entry = {"dense_new_tokens": not rows, **entry}
    known = {*_OPTIONS[entry["kind"]].split(), "dense_new_tokens"}
    if wrong := sorted(known ^ entry.keys()):
        raise ValueError(
            f"{where} has options of another version, such as {wrong[0]}; use the "
            "sparse_attention.py that was exported with the model"
        )
    supported = {"columns": (0,), "preset": ("safe", "paper")}
    supported["dense_new_tokens"] = (False, True) if rows else (True,)
    for name, values in supported.items():
        if entry.get(name, values[0]) not in values:
            raise ValueError(f"{where} has {name} = {entry[name]!r}, which is not supported")
    return SimpleNamespace(**entry)


def _check(
    query: Tensor, key: Tensor, mask: Any, dropout: float, others: dict, options: _Options
) -> None:
    problem, positions, length = "", others.get("position_ids"), key.shape[2]
    if torch.is_grad_enabled() and query.requires_grad:
        problem = "gradients are not computed; use torch.no_grad() or model.generate"
    elif dropout:
        problem = f"dropout = {dropout} is not supported; call model.eval()"
    elif query.is_cuda and options.block_size != _TILE:
        problem = f"block_size = {options.block_size} is not supported on a GPU, only {_TILE}"
    if query.shape[2] == 1 and mask is not None:
        if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, length):
            problem = (
                f"the mask of a new token is {mask.dtype} {list(mask.shape)} and must be bool "
                f"[B, 1, 1, {length}]; pass an attention_mask [B, {length}] or none"
            )
    elif query.shape[2] == 1:
        # Without a mask all keys are visible. Reading a position would end a compiled program.
        unread = positions is None or torch.compiler.is_compiling()
        if not unread and bool((positions != length - 1).any()):
            problem = (
                f"a new token has {length - 1} cached keys and another position; use a cache that "
                "keeps the keys of all tokens, such as DynamicCache, or set "
                'model.config.sparse_attention["dense_new_tokens"] = True'
            )
    # With a cache, transformers makes no mask for packed documents.
    elif mask is not None or (positions is not None and bool((positions.diff() != 1).any())):
        problem = (
            "a forward pass of several tokens must be a whole prompt without padding, packed "
            "documents or cached tokens; pass prompts of one length, each in a single pass"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            problem = f"the model's {name} is not supported"
    if problem:
        raise ValueError(f"{NAME}: {problem}")


# Selection


def _select(q: Tensor, k: Tensor, scale: float, options: _Options) -> _Selected:
    """Selects key blocks, bool [B, Hq, NB, NB], and key columns, bool [B, Hq, S] or None."""
    if options.kind == "vertical_slash":
        return _verticals_and_slashes(q, k, scale, options)
    score = _probe_rows if options.kind == "sampled_rows" else _strides
    rows, keys, positions, scale = score(q, k, scale, options)
    (batch, heads, num_blocks, per_row, _), length = rows.shape, q.shape[2]
    per_block = keys.shape[2] // num_blocks
    kernel = rows.is_cuda and per_block == _TILE
    block_masses = _block_masses_on_gpu if kernel else _block_masses
    # The kernels store a number per row and key block, PyTorch about four per row and key.
    size_per_block = batch * heads * per_row * (num_blocks if kernel else 4 * keys.shape[2])
    step = max(_STEP_SIZE // size_per_block, 1)
    blocks = torch.zeros(batch, heads, num_blocks, num_blocks, dtype=torch.bool, device=q.device)
    for first in range(0, num_blocks, step):
        end = min(first + step, num_blocks)
        part = rows[:, :, first:end], keys[:, :, : end * per_block], positions[first:end]
        mass = block_masses(*part, per_block, scale)
        numbers = torch.arange(first, end, device=q.device)
        blocks[:, :, first:end, :end] = _heaviest(mass, numbers, length, options)
    return blocks, None


def _probe_rows(q: Tensor, k: Tensor, scale: float, options: _Options) -> _Scored:
    """Evenly spaced queries of each block: [B, Hq, NB, r, D], padded keys, positions [NB, r]."""
    size, count, length = options.block_size, options.probe_queries_per_block, q.shape[2]
    k = _padded(k, size)
    first = torch.arange(0, k.shape[2], size, device=q.device)[:, None]
    real = (length - first).clamp(max=size)
    within = torch.arange(1, count + 1, device=q.device) * real // count - 1
    positions = torch.where(within < 0, -1, first + within)
    rows = q[:, :, positions.clamp(min=0).flatten()].unflatten(2, positions.shape)
    return rows, k, positions, scale


def _strides(q: Tensor, k: Tensor, scale: float, options: _Options) -> _Scored:
    """Strides of queries, reversed, and of keys: [B, H, NB, g / s, s D] and [B, H, S / s, s D]."""
    size, stride, length = options.block_size, options.stride, q.shape[2]
    q, k = (_padded(x, size).unflatten(2, (-1, stride)) for x in (q, k))
    rows = q.flip(3).flatten(3).unflatten(2, (-1, size // stride))
    positions = torch.arange(k.shape[2], device=q.device)
    positions = torch.where(positions * stride < length, positions, -1)
    return rows, k.flatten(3), positions.unflatten(0, (-1, size // stride)), scale / stride


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[2] % size))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiplies [..., n, D] and [..., m, D] to fp32 [..., n, m], without rounding products."""
    if x.is_cuda and x.itemsize == 2:
        lead, flat = x.shape[:-2], (x.flatten(0, -3), y.flatten(0, -3).transpose(1, 2))
        return torch.bmm(*flat, out_dtype=torch.float32).unflatten(0, lead)
    return x.float() @ y.float().transpose(-1, -2)


def _block_masses(
    rows: Tensor, keys: Tensor, positions: Tensor, per_block: int, scale: float
) -> Tensor:
    """Mean mass of rows [B, Hq, n, r, E] in each block of keys [B, Hk, T, E]: fp32 [B, Hq, n, NB].

    A row sees keys up to its entry of `positions` [n, r].
    """
    logits = _product(rows.reshape(len(rows), keys.shape[1], -1, rows.shape[4]), keys)
    logits = logits.reshape(*rows.shape[:4], -1)
    seen = positions[..., None] >= torch.arange(keys.shape[2], device=keys.device)
    logits = (logits * scale).masked_fill_(~seen, -torch.inf)
    lse = torch.logsumexp(logits.unflatten(4, (-1, per_block)), -1)
    return torch.exp(lse - torch.logsumexp(lse, -1, keepdim=True)).nan_to_num(0).mean(3)


if triton is not None:

    @triton.jit
    def _block_lse_kernel(
        rows, keys, positions, lse, scale, num_rows, num_blocks, group, width,
        WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    ):  # fmt: skip
        """Stores binary log-sum-exp of TILE rows in each of at most CHUNK key blocks."""
        tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # head of all sequences
        first = tl.program_id(2) * CHUNK
        row, column = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
        seen = tl.load(positions + row, row < num_rows, -1)
        end = tl.minimum(first + CHUNK, tl.max(seen) // TILE + 1)
        if first >= end:
            return
        mask = (row < num_rows)[:, None] & (column < width)
        q = tl.load(rows + (head * num_rows + row[:, None]) * width + column, mask, 0.0)
        keys += head // group * num_blocks * TILE * width
        lse += (head * tl.num_programs(0) + tile) * num_blocks * TILE + tl.arange(0, TILE)
        scale *= 1.4426950408889634
        # All rows see all keys of the blocks before this one.
        middle = tl.minimum(tl.maximum((tl.min(seen) + 1) // TILE, first), end)
        for masked in tl.static_range(2):
            for block in range(middle if masked else first, end if masked else middle):
                token = block * TILE + tl.arange(0, TILE)
                at = token[None] * width + column[:, None]
                k = tl.load(keys + at, column[:, None] < width, 0.0)
                logits = tl.dot(q, k, input_precision="ieee")
                if masked:
                    logits = tl.where(seen[:, None] >= token, logits, float("-inf"))
                peak = tl.maximum(tl.max(logits, 1) * scale, -1e30)  # never -inf
                total = tl.sum(tl.exp2(logits * scale - peak[:, None]), 1)
                tl.store(lse + block * TILE, tl.log2(total) + peak)

    @triton.jit
    def _block_mass_kernel(
        lse, positions, mass, num_tiles, num_blocks, count, COUNT: tl.constexpr, TILE: tl.constexpr
    ):
        """Stores the mean mass of `count` rows in each key block, from `_block_lse_kernel`."""
        query_block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        row = query_block * count + tl.arange(0, COUNT)
        seen = tl.load(positions + row, tl.arange(0, COUNT) < count, -1)
        end = tl.max(seen) // TILE + 1
        lse += (head * num_tiles + row // TILE) * num_blocks * TILE + row % TILE
        mass += (head * tl.num_programs(0) + query_block) * num_blocks
        peak, total = tl.full([COUNT], -1e30, tl.float32), tl.zeros([COUNT], tl.float32)
        for first in range(0, end, TILE):
            token = (first + tl.arange(0, TILE))[:, None] * TILE  # the first of each block
            x = tl.load(lse + token, token <= seen, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(x, 0))
            total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(x - new_peak), 0)
            peak = new_peak
        total = tl.maximum(total, 1.0) * count  # less than 1 only if a row sees nothing
        for first in range(0, end, TILE):
            block = first + tl.arange(0, TILE)
            token = block[:, None] * TILE
            x = tl.load(lse + token, token <= seen, float("-inf"))
            tl.store(mass + block, tl.sum(tl.exp2(x - peak) / total, 1), block < end)


def _block_masses_on_gpu(
    rows: Tensor, keys: Tensor, positions: Tensor, per_block: int, scale: float
) -> Tensor:
    """Computes `_block_masses` without storing logits."""
    (batch, heads, count, per_row, width), num_blocks = rows.shape, keys.shape[2] // per_block
    num_tiles, all_heads = triton.cdiv(count * per_row, per_block), batch * heads
    lse = rows.new_empty(all_heads, num_tiles, num_blocks, per_block, dtype=torch.float32)
    mass = rows.new_zeros(batch, heads, count, num_blocks, dtype=torch.float32)
    rows, keys, positions = rows.contiguous(), keys.contiguous(), positions.int()
    grid = num_tiles, all_heads, triton.cdiv(num_blocks, _CHUNK)
    sizes = count * per_row, num_blocks, heads // keys.shape[1], width
    shape = triton.next_power_of_2(width), per_block, _CHUNK
    _block_lse_kernel[grid](
        rows, keys, positions, lse, scale, *sizes, *shape, num_warps=8, num_stages=2
    )
    sizes = num_tiles, num_blocks, per_row, triton.next_power_of_2(per_row), per_block
    _block_mass_kernel[count, all_heads](lse, positions, mass, *sizes)
    return mass


def _heaviest(mass: Tensor, rows: Tensor, length: int, options: _Options) -> Tensor:
    """Keeps blocks by mass [B, H, n, m] of the first m, in rows of numbers [n]."""
    size, numbers = options.block_size, torch.arange(mass.shape[3], device=mass.device)
    distance = rows[:, None] - numbers
    dense = rows < -(-options.dense_prefix_tokens // size)
    if options.dense_suffix_tokens:
        dense |= (rows + 1) * size > length - options.dense_suffix_tokens
    causal, sinks = distance >= 0, numbers < options.sink_blocks
    forced = causal & (dense[:, None] | sinks | (distance < options.local_blocks))
    mass = mass.double() / mass.sum(-1, keepdim=True, dtype=torch.float64).clamp(min=1e-30)
    mass = (mass * _MASS_ONE).round().int().masked_fill_(~causal, 0)
    tau, least = round(options.tau * _TAU_ONE), max(round(options.min_block_mass * _MASS_ONE), 1)
    missing = -(-mass.sum(-1, keepdim=True) * tau // _TAU_ONE)
    missing -= mass.masked_fill(~forced, 0).sum(-1, keepdim=True)
    free, order = mass.masked_fill_(forced, 0).sort(dim=-1, descending=True, stable=True)
    chosen = (free.cumsum(-1) - free < missing) & (free >= least)
    kept = torch.zeros_like(chosen).scatter_(3, order, chosen) | forced
    if options.random_block_prob:
        kept |= causal & _drawn(rows, numbers, mass.shape[1], options.random_block_prob)
    return kept


def _drawn(rows: Tensor, numbers: Tensor, heads: int, probability: float) -> Tensor:
    """Whether the hash of its position draws each block: bool [Hq, n, m]."""

    def hashed(x: Tensor) -> Tensor:  # of uint32
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return x ^ (x >> 16)

    salts = hashed(torch.arange(1, heads + 1, device=rows.device))[:, None, None]
    threshold = min(round(probability * 2**32), 2**32 - 1)
    return hashed(hashed((rows[:, None] << 16) ^ numbers) ^ salts) < threshold


def _verticals_and_slashes(q: Tensor, k: Tensor, scale: float, options: _Options) -> _Selected:
    """Selects columns and block diagonals by the last queries; results as in `_select`."""
    size, length, count = options.block_size, q.shape[2], options.num_probe_queries
    last = q[:, :, -count:].unflatten(1, (k.shape[1], -1))  # [B, Hk, G, u, D]
    masses = [_last_masses(last[:, h], k[:, h], scale, count) for h in range(k.shape[1])]
    columns, slashes = (torch.cat(x, 1) for x in zip(*masses, strict=True))  # [B, Hq, S]
    safe, minima = options.preset == "safe", (min(1, options.max_verticals), 0)
    if safe:
        minima = max(options.min_verticals, options.sink_tokens), options.min_slashes
        columns[..., : options.sink_tokens] += _MASS_ONE
    rule = {"target": round(options.top_p * _MASS_ONE), "keep_crossing": safe}
    columns = _largest(columns, minima[0], options.max_verticals, **rule)
    slashes = _largest(slashes, minima[1], options.max_slashes, **rule)
    # Distance d g + offset is on block diagonal d, and on the next one unless the offset is 0.
    nearest = options.local_blocks
    if not safe:
        nearest = (slashes.sum(-1, keepdim=True) < min(options.max_slashes, length)).int()
    slashes = F.pad(slashes, (0, -length % size)).unflatten(2, (-1, size))
    diagonals = slashes.any(-1)
    diagonals[..., 1:] |= slashes[..., :-1, 1:].any(-1)
    numbers = torch.arange(diagonals.shape[2], device=q.device)
    diagonals |= numbers < nearest
    distance = numbers[:, None] - numbers
    return diagonals[:, :, distance.clamp(min=0)] & (distance >= 0), columns


def _last_masses(q: Tensor, k: Tensor, scale: float, count: int) -> tuple[Tensor, ...]:
    """Mean masses of columns, and of diagonals by distance, int64 [B, G, S], for a key head.

    Queries are the last ones [B, G, u, D], keys [B, S, D].
    """
    (_, _, present, _), length = q.shape, k.shape[1]
    logits = _product(q.flatten(1, 2), k).unflatten(1, q.shape[1:3]) * scale
    tokens = torch.arange(length, device=k.device)
    seen = tokens[-present:, None] >= tokens
    mass = torch.softmax(logits.masked_fill_(~seen, -torch.inf), -1)
    mass = (mass * _MASS_ONE).round().clamp(max=_MASS_ONE).long()
    slashes = torch.zeros_like(mass[:, :, 0])
    for i in range(present):  # query i is present - 1 - i tokens before the last one
        visible = length - present + i + 1
        slashes[..., :visible] += mass[:, :, i, :visible].flip(-1)
    return tuple((x // count).clamp_(max=_MASS_ONE - 1) for x in (mass.sum(2), slashes))


def _largest(keys: Tensor, minimum: int, maximum: int, target: int, keep_crossing: bool) -> Tensor:
    """Keeps the largest keys [..., S], masses plus `_MASS_ONE` if forced, until a target mass."""
    keys, order = keys.sort(dim=-1, descending=True, stable=True)
    mass = keys % _MASS_ONE
    total, number = mass.cumsum(-1), torch.arange(keys.shape[-1], device=keys.device)
    chosen = (total - mass if keep_crossing else total) < target
    chosen = (chosen | (number < minimum)) & (number < maximum)
    return torch.zeros_like(chosen).scatter_(-1, order, chosen)


# Attention


def _attend(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, columns: Tensor | None, scale: float, size: int
) -> Tensor:
    """Attends to the selected blocks and columns, some rows of blocks at a time."""
    batch, heads, length, _ = q.shape
    step = max(_STEP_SIZE // (batch * heads * length * size * 8), 1)
    tokens, out = torch.arange(length, device=q.device), []
    for first in range(0, blocks.shape[2], step):
        rows = tokens[first * size : (first + step) * size]
        seen = blocks[:, :, rows // size].repeat_interleave(size, -1)[..., :length]
        if columns is not None:
            seen |= columns[:, :, None]
        seen &= rows[:, None] >= tokens
        how = {"attn_mask": seen, "scale": scale, "enable_gqa": True}
        out.append(F.scaled_dot_product_attention(q[:, :, rows], k, v, **how))
    return torch.cat(out, 2)


def _attend_new_token(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, options: _Options
) -> Tensor:
    """Attends to the blocks that hold much of a group's mean mass: [B, 1, Hq, D]."""
    (batch, heads, room, _), size = k.shape, options.block_size
    rows = q.reshape(batch, heads, -1, q.shape[3])
    seen = k.new_ones(batch, room, dtype=torch.bool) if mask is None else mask[:, 0, 0]
    logits = (_product(rows, k) * scale).masked_fill_(~seen[:, None, None], -torch.inf)
    # Blocks and length of the sequence, which begins after padding on the left.
    number = ((seen.cumsum(-1) - 1).clamp_(min=0) // size)[:, None].expand(batch, heads, room)
    first, length = torch.arange(0, room, size, device=q.device), seen.sum(-1, keepdim=True)
    mass = logits.new_zeros(batch, heads, len(first), dtype=torch.float64)
    mass.scatter_add_(2, number, torch.softmax(logits, -1).mean(2, dtype=torch.float64))
    forced = (first < options.sink_blocks * size) | (length < options.min_sparse_tokens)
    forced |= first + size > length - options.local_blocks * size
    least = _NEW_TOKEN_SHARE * (1 - options.tau) / (length.double() / size).ceil()  # [B, 1]
    kept = forced[:, None] | (mass >= least.clamp_(min=options.min_block_mass)[..., None])
    seen = kept.gather(2, number) & seen[:, None]
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen[:, :, None], scale=scale)
    return out.flatten(1, 2)[:, None]


@torch._dynamo.config.patch(recompile_limit=64)
def _attend_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, columns: Tensor | None, scale: float, size: int
) -> Tensor:
    """Computes `_attend` with FlexAttention: blocks, gathered columns, and their sum."""
    (num_blocks, length), below = (blocks.shape[2], q.shape[2]), blocks.tril(-1)
    numbers = torch.arange(num_blocks, dtype=torch.int32, device=q.device)
    count = below.sum(-1, dtype=torch.int32)
    place = torch.where(below, below.cumsum(-1) - 1, num_blocks)
    listed = numbers.new_zeros(*blocks.shape[:3], num_blocks + 1)
    listed.scatter_(3, place, numbers.expand_as(place))
    own = torch.zeros_like(listed[..., :-1])
    own[..., 0] = numbers
    mask = BlockMask.from_kv_blocks(
        blocks.diagonal(dim1=2, dim2=3).int(), own, count, listed[..., :-1].contiguous(),
        BLOCK_SIZE=size, mask_mod=_causal, seq_lengths=(length, length), compute_q_blocks=False,
    )  # fmt: skip
    if columns is None:
        return _flex(q, k, v, mask, scale)
    # Ascending columns, padded with S; those in a selected block are counted there.
    room = max(-(-int(columns.sum(-1).max()) // size), 1) * size
    tokens = torch.where(columns, torch.arange(length, device=q.device), length)
    tokens = F.pad(tokens, (0, -length % size), value=length).sort(-1)[0][..., :room]
    sequence, head = (torch.arange(n, device=q.device) for n in q.shape[:2])
    head, token = head // (q.shape[1] // k.shape[1]), tokens.clamp(max=length - 1)
    keys, values = (x[sequence[:, None, None], head[:, None], token] for x in (k, v))
    held = token // size

    def left(batch: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        in_block = blocks[batch, head, query // size, held[batch, head, column]]
        return (tokens[batch, head, column] <= query) & ~in_block

    begun = tokens[:, :, None, ::size] < (numbers[:, None] + 1) * size
    listed = torch.arange(room // size, dtype=torch.int32, device=q.device)
    listed = listed.expand_as(begun).contiguous()
    column_mask = BlockMask.from_kv_blocks(
        begun.sum(-1, dtype=torch.int32), listed,
        BLOCK_SIZE=size, mask_mod=left, seq_lengths=(length, room), compute_q_blocks=False,
    )  # fmt: skip
    out, lse = _flex_with_lse(q, k, v, mask, scale)
    other, other_lse = _flex_with_lse(q, keys, values, column_mask, scale)
    share = torch.sigmoid(lse - other_lse).nan_to_num(0)[..., None]  # rows may be empty
    return (out * share + other * (1 - share)).to(q.dtype)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


_KERNEL = {"enable_gqa": True, "kernel_options": {"FORCE_USE_FLEX_ATTENTION": True}}


@torch.compile(fullgraph=True)  # without a fallback that stores all logits
def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    return flex_attention(q, k, v, block_mask=mask, scale=scale, **_KERNEL)


@torch.compile(fullgraph=True)
def _flex_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Any:
    aux = AuxRequest(lse=True)
    out, aux = flex_attention(q, k, v, block_mask=mask, scale=scale, return_aux=aux, **_KERNEL)
    return out, aux.lse


AttentionInterface.register(NAME, sparse_attention)
# None for one token, and for a prompt without padding.
AttentionMaskInterface.register(NAME, sdpa_mask)
