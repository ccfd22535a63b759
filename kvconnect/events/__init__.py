"""Publishes the blocks that a server holds, for routers and monitors, in vLLM's format.

Begin with `publisher`: it takes the block manager's events and sends them over ZeroMQ. `format`
declares the messages, `subscriber` receives them, `held` records the blocks of one server. May
import the cache's events and the vocabulary. Needs the extra ``events``, except `settings`.
"""
