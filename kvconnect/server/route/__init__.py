"""``kvconnect route``: sends each prompt to a prefill server, and then to a decode server.

May import those parts of the server that know no engine: `gate`, `body`, `admission`, `errors`,
`settings`, `http_server`, and what travels between servers (`openai.kv_transfer`). Begin with
`app`, then follow a request: `endpoint` → `routed` (its parts, and by `prompt` what it begins with)
→ `handover` (prefill, decode, and what is tried again) → `fleet` (which server) → `instance` (what
is known of it) → `client` (HTTP; how long it waits: `timeouts`) → `opened` (the answer on its way
back). `health` asks all servers how they are; `run` is the life of the process.
"""
