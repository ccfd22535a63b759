"""The transfer of prompts between engines: one prefills a prompt, another one decodes it.

Imports the contract beside it, `kvconnect.transfer`, what windows need from `io`, and the
vocabulary; never the runtime. The pair drives it. Begin with `params`, which a router forwards, and
the leader's two books, `prefill` and `decode`; `messages` are their orders to the workers. On a
worker, `publisher` publishes the tokens of a step, with `offers`. The room `fetch` reads what other
engines publish. `node` is what leader and worker share in a process. `connectors` are the
configurations by role.
"""
