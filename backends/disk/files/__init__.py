"""The files of a disk store: opened after a check of their owner, locked, read and written.

Imports the vocabulary, ``lanes`` and the disk store's `errors`; knows no index. Begin with
`segments` (the data files), then `direct_io` (the system calls), `own_file` (how a file is opened)
and `owner` (which processes use its slots).
"""
