"""kvconnect keeps the KV cache of LLM engines and moves it to and from external stores."""
