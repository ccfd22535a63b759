"""How an engine reads prompts that others hand out: claims, connections, and loads.

Imports `messages` of the room above, the contract, `kvconnect.transfer`, and of the store's pair
which blocks a window needs; never the books or the node. Begin with `fetcher`, the one thread:
each `load` has a part for each of its `sources` (ranks of the other side). A part's `pieces` follow
what its rank has computed, `strided` where the blocks are of another shape. `claim_book` has what
requests have claimed before their loads begin.
"""
