"""The claims, connections and loads by which an engine reads the prompts that others publish.

Imports `messages` of the room above, the contract, `kvconnect.transfer`, and of the store's pair
the rule which blocks a window needs; never the books or the node. Begin with `fetcher`, the one
thread: each `load` has a part for each of its `sources` (ranks of the other engine). A part's
`pieces` follow what its rank has computed; `strided` serves blocks of another shape. Of loads whose
requests compute beside them, reads arrive in `landing`, and `arrivals` has the blocks that are
certain. `claim_book` holds the claims of requests whose loads have not begun.
"""
