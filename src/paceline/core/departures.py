# SPDX-License-Identifier: Apache-2.0
"""Where the scheduler departs from vLLM 0.32 on purpose, each with its reason.

A scheduler counts every time that a departure changed a decision, so that runs can be compared with vLLM's up
to the first of them.
"""

from __future__ import annotations

WHOLE_ROW = "whole_row"
ROUND_ROBIN = "round_robin"
NEAR_MML = "near_mml"
TOTAL_ORDER = "total_order"
UNHASH = "unhash"
SELF_VICTIM = "self_victim"
NO_BLOCKS = "no_blocks"
RESOLVED_STATE = "resolved_state"
LOAD_RESERVE = "load_reserve"
PROVISIONAL_PADDING = "provisional_padding"
GRAPH_PADDING = "graph_padding"
PREFILL_THRESHOLD = "prefill_threshold"
LATER_DEADLINE = "later_deadline"
LOAD_DEADLINE = "load_deadline"
REFILL = "refill"
UNSAMPLED_ERROR = "row_error"

REASONS: dict[str, str] = {
    WHOLE_ROW: "a decode row that does not fit the budget is left out, not cut: a cut row loses the group its graph",
    ROUND_ROBIN: "rows left out are served first in the next step, or the last of four would starve",
    NEAR_MML: "near max_model_len all drafts are dropped instead of some: one width less to capture and to agree on",
    TOTAL_ORDER: "the victim is the worst in one total order: equals by priority and arrival preempt each other",
    UNHASH: "blocks hashed in this pass for a row that is taken back lose their hashes: nobody will compute them",
    SELF_VICTIM: "a row that preempts itself does not end the pass: rows behind it may still fit",
    NO_BLOCKS: "placeholders of a running row never preempt: nobody loses computed tokens for padding",
    RESOLVED_STATE: "a request that holds blocks is not offered a second load, even if none of it counts as computed",
    LOAD_RESERVE: "a lone load needs no reserve for its own first step: otherwise it would wait for itself",
    PROVISIONAL_PADDING: "padding yields to a prefill admitted later in the pass, and only once that has its blocks",
    GRAPH_PADDING: "with decode graphs on, short running rows are padded too: one short row costs the group its graph",
    PREFILL_THRESHOLD: "the long-prefill threshold clips prefill rows only: a verifier row stays whole",
    LATER_DEADLINE: "a connector that answers 'later' for ever is overruled: the prompt is computed locally",
    LOAD_DEADLINE: "a load that does not end in time is a load failure: a frozen peer never answers",
    REFILL: "the decode benchmark fills again after a preemption: a preempted request would prefill for minutes",
    UNSAMPLED_ERROR: "a poisoned row ends its request, not the engine, and its blocks serve no other request",
}
