"""The construction of a scheduler and a worker from the names in a configuration."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.errors import ConfigurationError, ConnectorContractError, RetryLater, nearest
from kvconnect.redaction import as_cause, text_without_passwords
from kvconnect.text import shown

T = TypeVar("T")
SchedulerClass = type[KvCacheConnectorScheduler]
WorkerClass = type[KvCacheConnectorWorker]

# Imported by name, as a user's connector is.
_BUILT_IN = ("kvconnect.connector.offload", "OffloadScheduler", "OffloadWorker")
_SCHEDULER, _WORKER = "connector_scheduler_class", "connector_worker_class"

# Both constructors need them for a transfer, each on a thread of its own. Under pytest, importing a
# module of an installed plugin parses it, and CPython 3.11 fails if two threads parse at once.
_FOR_TRANSFER = tuple(
    f"kvconnect.connector.disagg.{name}" for name in ("node", "publisher", "prefill", "decode")
)


def connector_classes(llm_args: LlmArgs) -> tuple[SchedulerClass, WorkerClass]:
    """Returns the two classes that `llm_args` names, or those of the built-in pair.

    Raises:
        ConfigurationError: a name does not exist; the message says what was searched.
        ConnectorContractError: a class is not a subclass, or lacks a method. With a store or a
            transfer it must be a subclass of the built-in one.
    """
    config = llm_args.kv_connector_config
    if config.uses_pair:
        return _pair_classes(llm_args)
    module = _module(config.connector_module or "")
    # The bases stand for their subclasses here; mypy sees that they cannot be made themselves.
    return (
        _class(module, _SCHEDULER, config.connector_scheduler_class, KvCacheConnectorScheduler),  # type: ignore[type-abstract]
        _class(module, _WORKER, config.connector_worker_class, KvCacheConnectorWorker),  # type: ignore[type-abstract]
    )


def _pair_classes(llm_args: LlmArgs) -> tuple[SchedulerClass, WorkerClass]:
    """Returns the classes of the built-in pair, or the user's in the place of one or both."""
    config = llm_args.kv_connector_config
    if config.transfer is None and not llm_args.has_store:
        raise ConfigurationError(
            "KvCacheConnectorConfig: give url, backend, transfer, or connector_module with both "
            "classes"
        )
    if config.transfer is not None:
        for part in _FOR_TRANSFER:
            import_module(part)
    name, *names = _BUILT_IN
    built_in = import_module(name)
    scheduler: SchedulerClass = getattr(built_in, names[0])
    worker: WorkerClass = getattr(built_in, names[1])
    if config.connector_module is not None:
        module = _module(config.connector_module)
        if config.connector_scheduler_class is not None:
            scheduler = _class(module, _SCHEDULER, config.connector_scheduler_class, scheduler)
        if config.connector_worker_class is not None:
            worker = _class(module, _WORKER, config.connector_worker_class, worker)
    return scheduler, worker


def _module(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ConfigurationError(
                f"connector_module={shown(name)} cannot be imported: it needs {shown(error.name)}"
            ) from as_cause(error)
        searched = ", ".join(entry or "." for entry in sys.path)
        raise ConfigurationError(
            f"connector_module={shown(name)}: no such module; searched {searched}"
        ) from as_cause(error)
    except Exception as error:  # noqa: BLE001  whatever a user's module does
        raise ConfigurationError(
            f"connector_module={shown(name)} cannot be imported: {_reason(error)}"
        ) from as_cause(error)


def _class(module: ModuleType, field: str, name: str | None, base: type[T]) -> type[T]:
    found = getattr(module, name or "", None)
    if found is None:
        there = [
            each
            for each, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, base) and value is not base
        ]
        hint = nearest(name or "", there) if there else f"it has no {base.__name__} at all"
        where = getattr(module, "__file__", None) or "without a file"
        raise ConfigurationError(
            f"{field}={shown(name)}: searched module '{module.__name__}' ({where}); {hint}"
        )
    if not inspect.isclass(found) or not issubclass(found, base):
        raise ConnectorContractError(
            f"{field}={shown(name)}: is not a subclass of {base.__name__}{_needed_for(base)}"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConnectorContractError(
            f"{field}={shown(name)}: does not define {', '.join(missing)}{_grouped(found, missing)}"
        )
    return found


def _needed_for(base: type) -> str:
    """Returns the end of the sentence about a class that does not extend `base`."""
    if base in {KvCacheConnectorScheduler, KvCacheConnectorWorker}:
        return ""
    return ", which drives url, backend and transfer; extend it, or leave these out"


def _grouped(found: type, missing: Sequence[str]) -> str:
    """Returns the error's sentence about a class written for TensorRT-LLM's layer groups."""
    others = [f"{name}_by_layer_group" for name in missing]
    there = [name for name in others if hasattr(found, name)]
    if not there:
        return ""
    return (
        f"; it has {', '.join(there)}, TensorRT-LLM's form for several layer groups, which "
        "kvconnect's engine does not call: it reports them in new_block_ids_by_group"
    )


def build_pair(
    llm_args: LlmArgs, scheduler: SchedulerClass, worker: WorkerClass
) -> tuple[KvCacheConnectorScheduler, KvCacheConnectorWorker]:
    """Returns both objects, built concurrently: either constructor may wait for the other.

    Blocks until both are built, or one failed; then the other is shut down as soon as it is built.

    Raises:
        ConfigurationError: a constructor failed; the message names its class.
    """
    first, second = _started(scheduler, llm_args), _started(worker, llm_args)
    _wait_for([first, second])
    return first.result(), second.result()


def build_worker(llm_args: LlmArgs, worker: WorkerClass) -> KvCacheConnectorWorker:
    """Returns the worker of a rank that has no scheduler; see `build_pair`."""
    building = _started(worker, llm_args)
    _wait_for([building])
    return building.result()


def _wait_for(building: Sequence[Future[Any]]) -> None:
    done, _ = wait(building, return_when=FIRST_EXCEPTION)
    failures = [error for one in done if (error := one.exception()) is not None]
    if not failures:
        return
    for one in building:
        one.add_done_callback(_shut_down)
    # A configuration error is more precise than an error that follows from it.
    failures.sort(key=lambda error: not isinstance(error, ConfigurationError))
    raise failures[0]


def _started(cls: Callable[[LlmArgs], T], llm_args: LlmArgs) -> Future[T]:
    built: Future[T] = Future()

    def build() -> None:
        try:
            built.set_result(cls(llm_args))
        except BaseException as error:  # noqa: BLE001 (carried to the thread that waits)
            built.set_exception(_explained(cls, error))

    # A daemon: a constructor that never returns must not keep the process from ending.
    threading.Thread(target=build, name="kvconnect-build", daemon=True).start()
    return built


def _explained(cls: Callable[[LlmArgs], object], error: BaseException) -> BaseException:
    """Returns the error to raise for a constructor's `error`: names the class, hides passwords."""
    if not isinstance(error, Exception):
        return error
    cause = as_cause(error)
    if isinstance(error, ConfigurationError) and cause is error:
        return error
    name = getattr(cls, "__name__", repr(cls))
    explained = ConfigurationError(f"{name} could not be built: {_reason(error)}")
    explained.__cause__ = cause
    return explained


def _reason(error: Exception) -> str:
    """Returns the text of `error`, which a user's code raised."""
    kind = (
        "" if isinstance(error, (RetryLater, ConfigurationError)) else f"{type(error).__name__}: "
    )
    return kind + text_without_passwords(str(error))


def _shut_down(built: Future[Any]) -> None:
    if built.exception() is None:
        built.result().shutdown()
