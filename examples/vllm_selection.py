"""Which blocks of a paged cache new tokens attend to: the rule of SampledRows, for vLLM plug-ins.

Copy this file into a plug-in: it needs only PyTorch. Options are those of config.json's entry
`sparse_attention`. docs/using-trained-models.md says what else a plug-in needs.
"""

import torch
from torch import Tensor

BLOCK = 128  # tokens
_NEW_TOKEN_SHARE = 5.0  # times 1 - tau: see `select_blocks`
_BLOCKS_AT_ONCE = 32  # of each sequence: their keys are gathered in fp32


def select_blocks(
    q: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    tau: float = 0.9,
    sink_blocks: int = 1,
    local_blocks: int = 2,
    min_block_mass: float = 0.0,
    min_sparse_tokens: int = 8192,
) -> tuple[Tensor, Tensor, Tensor]:
    """Selects blocks of 128 keys for one new token of each sequence.

    These are the first `sink_blocks` blocks, those that hold the last 128 `local_blocks` tokens,
    and those with a softmax mass of at least `min_block_mass` and `_NEW_TOKEN_SHARE` (1 - tau)
    times the mean of all blocks, on average over the query heads of a key/value head. With fewer
    than `min_sparse_tokens` tokens all blocks are selected.

    Every key is scored, in fp32, and nothing is read on the host. Keep TF32 products off.

    Args:
        q: [B, Hq, D], rotated.
        key_cache: [pages, page_size, Hk, D]; page_size divides 128. The new keys are in it.
        block_tables: int32 [B, max_pages], pages of each sequence in order; the rest is ignored.
        seq_lens: int32 [B], with the new token; 0 for a row without a sequence.
        scale: scale of the logits, in general 1/sqrt(D).

    Returns:
        Block numbers, ascending, then -1: int32 [B, Hk, NB], with NB blocks in max_pages pages;
        their counts: int32 [B, Hk]; and whether each block is selected: bool [B, Hk, NB].
    """
    (batch, _, width), (_, page_size, heads, _) = q.shape, key_cache.shape
    if BLOCK % page_size:
        raise ValueError(f"pages of {page_size} tokens must divide a block of {BLOCK}")
    of_block = BLOCK // page_size
    pages = torch.nn.functional.pad(block_tables, (0, -block_tables.shape[1] % of_block))
    pages = pages.clamp(min=0).unflatten(1, (-1, of_block))
    number = torch.arange(pages.shape[1], device=q.device)
    start = number * BLOCK
    token = start[:, None] + torch.arange(BLOCK, device=q.device)
    hidden = token >= seq_lens[:, None, None]  # [B, NB, 128]
    rows, parts = q.float().reshape(batch, heads, -1, width), []
    for first in range(0, pages.shape[1], _BLOCKS_AT_ONCE):
        part = slice(first, first + _BLOCKS_AT_ONCE)
        keys = key_cache[pages[:, part]].flatten(2, 3).float()  # [B, n, 128, Hk, D]
        logits = torch.einsum("bhgd,bnthd->bhgnt", rows, keys) * scale
        logits = logits.masked_fill_(hidden[:, None, None, part], -torch.inf)
        parts.append(logits.logsumexp(-1))
    mass = torch.softmax(torch.cat(parts, -1), -1).mean(2)

    length = seq_lens[:, None]
    forced = (number < sink_blocks) | (length < min_sparse_tokens)
    forced |= start + BLOCK > length - local_blocks * BLOCK
    least = _NEW_TOKEN_SHARE * (1 - tau) / (length.double() / BLOCK).ceil()
    selected = forced[:, None] | (mass >= least.clamp_(min=min_block_mass)[..., None])
    selected &= (start < length)[:, None]
    blocks = torch.where(selected, number, len(number)).sort(-1)[0]
    blocks = blocks.masked_fill_(blocks == len(number), -1)
    return blocks.int(), selected.sum(-1, dtype=torch.int32), selected
