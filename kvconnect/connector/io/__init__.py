"""The loads and saves of blocks: between pools, staging memory and a store, for every engine.

Imports the contract's data, `kvconnect.backends`, `kvconnect.kernels` and the vocabulary. Begin
with `access` (a rank's way to its store) and `orders` (blocks to load or save), then `load`, its
`runs` for engines without requests of ours, and `save`. Under them are `open_store` with its
`io_loop`, `staging`, `copiers`, and `lookup` with its `budget`; `head_reader` reads blocks that
another tensor parallelism saved. `blocking` offers all of it to engines that wait; `identity` makes
the names that blocks have in a store.
"""
