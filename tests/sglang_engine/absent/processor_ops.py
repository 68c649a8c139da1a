"""The operations of sgl_kernel's build for processors that verification of drafts calls, in PyTorch.

No such build is in the package index. Names, parameters and what is written are those of SGLang 0.5.23's calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assign_extend_cache_locs_cpu(
    requests: Tensor, slots: Tensor, begins: Tensor, ends: Tensor, out: Tensor, width: int
) -> None:
    """Writes the slots [begin, end) of each request, one request behind the other."""
    at = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        out[at : at + end - begin] = slots[request, begin:end].to(out.dtype)
        at += end - begin


def assign_req_to_token_pool_cpu(
    requests: Tensor, slots: Tensor, begins: Tensor, ends: Tensor, given: Tensor, width: int
) -> None:
    """Takes the slots [begin, end) of each request from those given, one request behind the other."""
    at = 0
    for request, begin, end in zip(requests.tolist(), begins.tolist(), ends.tolist(), strict=True):
        slots[request, begin:end] = given[at : at + end - begin].to(slots.dtype)
        at += end - begin


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, out: Tensor) -> None:
    """Writes the slots of the accepted tokens; -1 is none."""
    flat = accepted.flatten()
    found = slots[flat[flat >= 0].long()]
    out[: found.shape[0]] = found


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follows each tree from its root while a child is the token that the model predicts."""
    targets = target_predict.flatten().tolist()
    for i in range(candidates.shape[0]):
        last = int(retrive_index[i, 0])
        accept_index[i, 0] = last
        node, count = 0, 0
        for _ in range(1, accept_index.shape[1]):
            child = int(retrive_next_token[i, node])
            while child != -1 and int(candidates[i, child]) != targets[last]:
                child = int(retrive_next_sibling[i, child])
            if child == -1:
                break
            predicts[last] = targets[last]
            node, count, last = child, count + 1, int(retrive_index[i, child])
            accept_index[i, count] = last
        accept_token_num[i] = count
        predicts[last] = targets[last]


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lens: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    requests: int,
    drafts: int,
) -> None:
    """Writes the positions and links of trees from which node sees which [requests * drafts * drafts]."""
    seen = mask.view(requests, drafts, drafts).bool() & torch.ones(drafts, drafts, dtype=torch.bool).tril(-1)
    positions.view(requests, drafts).copy_(seen.sum(-1) + lens[:, None])
    index.view(requests, drafts).copy_(torch.arange(requests * drafts).view(requests, drafts))
    for i in range(requests):
        parents = [max(row.nonzero().flatten().tolist(), default=-1) for row in seen[i]]
        for node in range(drafts):
            below = [k for k in range(node + 1, drafts) if bool(seen[i, k, node])]
            after = [k for k in range(node + 1, drafts) if parents[node] >= 0 and parents[k] == parents[node]]
            next_token.view(requests, drafts)[i, node] = min(below, default=-1)
            next_sibling.view(requests, drafts)[i, node] = min(after, default=-1)


OPS: dict[str, Any] = {
    one.__name__: one
    for one in (
        assign_extend_cache_locs_cpu,
        assign_req_to_token_pool_cpu,
        fill_accept_out_cache_loc_cpu,
        verify_tree_greedy_cpu,
        reconstruct_indices_from_tree_mask,
    )
}
