"""The page that shows a cache in a browser: one file, without anything from elsewhere.

The page asks for JSON and draws it: the numbers of the metrics, their last hour, and a listing of
the store. It changes nothing. Texts, keys and the digests of salts are only under the paths of the
admin key.

Imports operations, and the settings, errors and HTTP of the server. Begin with `cache_page`, which
has the paths and the headers of the file, and serves the page of a store alone; `store_reader`
reads the store, `history` keeps the last hour.
"""
