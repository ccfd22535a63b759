"""The room of ``kvconnect route``, which sends each prompt to a prefill, then a decode server.

May import those parts of the server that know no engine: `gate`, `body`, `admission`, `errors`,
`settings`, `http_server`, and the parameters between servers (`openai.kv_transfer`). Begin with
`run` (the life of the process, its paths, and the check of all servers), then follow a request:
`endpoint` → `routed` (its parts) and `prompt` (its beginning) → `handover` (prefill, decode, and
retries) → `fleet` (the choice of a server) → `instance` (the state of one) → `client` (HTTP and its
deadlines) → `opened` (the answer).
"""
