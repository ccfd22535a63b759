"""The part of kvconnect's benchmarks and soaks that is no part of the wheel.

`kvconnect.bench.checkout` finds this folder: ``kvconnect bench NAME`` and ``kvconnect check
--soak`` run what is here. Begin with `commands`, which adds the benchmarks to the command. Modules
that are run by themselves need the folder on the path: ``PYTHONPATH=tests/benchmarks``.
"""
