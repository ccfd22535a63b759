"""The processes of one engine: their exchanges in a step, and how a lost one is found.

Imports `connector.data` and the vocabulary; torch.distributed connects the ranks. Begin with
`communicator` (the two exchanges of a step), then `distributed` (over processes), `sockets` and
`link` (their connections), `watch` (detects lost ranks).
"""
