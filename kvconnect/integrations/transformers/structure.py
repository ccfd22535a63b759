"""The structure of a model besides its tensors: classes, module settings, hooks, configuration."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvconnect.digest.doubts import Doubt

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# These do not affect what a module computes, or are compared by themselves.
_LEFT_OUT = frozenset(
    {"training", "config", "generation_config", "name_or_path", "warnings_issued"}
    | {"gradient_checkpointing", "is_gradient_checkpointing"}
)
# Settings that from_pretrained sets, or that change no key and no value.
_HARMLESS = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "return_dict"),
    *("output_attentions", "output_hidden_states", "name_or_path", "model_type", "id2label"),
    *("label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# Dynamic RoPE counts its tokens here. A canary decides.
_COUNTERS = ("max_seq_len_cached",)
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)
_KNOWN = ("torch.nn.modules.", "transformers.")
# Code that leaves results as they are, or is a part of its library.
_KNOWN_CALLABLES = ("torch.", "transformers.", "kvconnect.", "accelerate.", "builtins", "_operator")

_CHOICES: Mapping[str, tuple[Mapping[str, object], ...]] = {
    "_attn_implementation": (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS),
    "_experts_implementation": (ALL_EXPERTS_FUNCTIONS,),
}
"""Settings that choose code by a name, and the tables of this code, in which users register own."""


class Change(NamedTuple):
    """A difference of a model from what it was."""

    doubt: Doubt
    detail: str


class _Module(NamedTuple):
    """A module as it was found.

    Attributes:
        path: its name in the model.
        module: itself.
        kind: its class.
        then: a copy of its ``__dict__``.
        values: those of `then`.
        children: the modules in it.
        hooks: its live tables of hooks.
    """

    path: str
    module: nn.Module
    kind: type
    then: dict[str, Any]
    values: tuple[Any, ...]
    children: tuple[nn.Module | None, ...]
    hooks: tuple[Mapping[Any, Any], ...]


class Structure:
    """A record of a model that shows cheaply whether modules, hooks or settings have changed.

    It compares one identity for each attribute, which takes tenths of a millisecond for a model of
    some hundred modules. `WeightWatch` compares tensors.

    Args:
        model: as it is now.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.take()

    def take(self) -> None:
        """Records the present model as unchanged."""
        self._modules = [
            _Module(
                path,
                one,
                type(one),
                dict(vars(one)),
                tuple(vars(one).values()),
                tuple(vars(one)["_modules"].values()),
                tuple(getattr(one, name) for name in _HOOKS),
            )
            for path, one in self._model.named_modules()
        ]
        self._hooked = self._hook_ids()
        self._configs = [(one, _copied(one)) for one in _configs(self._model)]
        self._chosen = list(_chosen_code(one for one, _ in self._configs))

    def change(self) -> Change | None:
        """Returns the first change that is found, or ``None``; the configuration's first."""
        if (setting := self._setting()) is not None:
            return Change(Doubt.SETTINGS_CHANGED, setting)
        for found in self._modules:
            if type(found.module) is not found.kind:
                return Change(Doubt.MODULES_CHANGED, f"the class of {found.path or 'the model'}")
            now = tuple(vars(found.module).values())
            children = tuple(vars(found.module)["_modules"].values())
            if len(children) != len(found.children) or not all(map(is_, children, found.children)):
                return Change(Doubt.MODULES_CHANGED, f"a part of {found.path or 'the model'}")
            if len(now) != len(found.values) or not all(map(is_, now, found.values)):
                change = _changed_attribute(found)
                if change is not None:
                    return change
        if self._hook_ids() != self._hooked:
            return Change(Doubt.MODULES_CHANGED, "a hook was added or removed")
        return None

    def _setting(self) -> str | None:
        """Returns the first setting that has changed, or ``None``."""
        for config, then in self._configs:
            if vars(config) != then and (name := _changed_setting(vars(config), then)):
                return name
        same = self._chosen == list(_chosen_code(one for one, _ in self._configs))
        return None if same else "the implementation of attention or experts"

    def _hook_ids(self) -> list[int]:
        return [
            key
            for found in self._modules
            for table in found.hooks
            if table
            for key, hook in table.items()
            if not _owner(hook).startswith(("kvconnect.", "transformers."))
        ]


def attributes(model: nn.Module) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns path, class and plain attributes of each module.

    ``__init__`` makes these from the configuration. Names that begin with an underscore are left
    out, and so are attributes without a comparable value.
    """
    return [
        (path, _name(type(one)), {n: v for n, v in sorted(vars(one).items()) if _counts(n, v)})
        for path, one in model.named_modules()
    ]


def unnamed_code(model: PreTrainedModel) -> str:
    """Returns the first part of `model` with code that no name covers, or "".

    The class names the modules of torch and transformers. Hooks, patched methods and classes from
    elsewhere may compute anything, and so may tensors of other kinds.
    """
    found = (_foreign(path or "the model", one) for path, one in model.named_modules())
    return next(filter(None, found), "") or _foreign_choice(model) or _foreign_functions(model)


def _foreign_choice(model: nn.Module) -> str:
    for chosen in _chosen_code(_configs(model)):
        for code in chosen.code:
            if code is not None and not f"{_owner(code)}.".startswith(_KNOWN_CALLABLES):
                return f"the implementation {chosen.name!r} is {_owner(code)}"
    return ""


def _foreign_functions(model: nn.Module) -> str:
    """Returns a function of transformers' files for the model that was replaced, or ""."""
    names = {type(one).__module__ for one in model.modules()}
    for name in sorted(one for one in names if one.startswith("transformers.models.")):
        functions = vars(sys.modules[name])
        for own in _functions_of(sys.modules[name]):
            owner = _owner(functions[own]) if own in functions else name
            if not f"{owner}.".startswith((*_KNOWN_CALLABLES, "kernels.")):
                return f"{own} of {name} is {owner}"
    return ""


def _functions_of(module: ModuleType) -> list[str]:
    """Returns the names of the functions in a module's file; none where its source is missing."""
    try:
        return re.findall(r"^def (\w+)", inspect.getsource(module), re.MULTILINE)
    except OSError:
        return []


class _Chosen(NamedTuple):
    """The code that a configuration chooses by a name.

    Attributes:
        name: the name of an implementation of attention or experts.
        code: the functions of this name; ``None``: the module has its own.
    """

    name: str
    code: tuple[object, ...]


def _chosen_code(configs: Iterable[Any]) -> Iterator[_Chosen]:
    for config in configs:
        for setting, tables in _CHOICES.items():
            name = getattr(config, setting, None)
            if isinstance(name, str):
                yield _Chosen(name, tuple(table.get(name) for table in tables))


def _foreign(where: str, module: nn.Module) -> str:
    kind = type(module)
    if not f"{kind.__module__}.".startswith(_KNOWN):
        return f"{where} is a {_name(kind)}"
    if not _owner(kind.forward).startswith(_KNOWN):
        return f"forward of {_name(kind)} is {_owner(kind.forward)}"
    methods = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (FunctionType, MethodType, partial))
    }
    hooks = {
        f"a hook ({key})": hook for name in _HOOKS for key, hook in getattr(module, name).items()
    }
    for name, code in (methods | hooks).items():
        if not f"{_owner(code)}.".startswith(_KNOWN_CALLABLES):
            return f"{name} of {where} is {_owner(code)}"
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    for name, tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"{name} of {where} is a {_name(type(tensor))}"
    return ""


def _owner(code: Any) -> str:
    """Returns the module and name of a function, below its wrappers."""
    while isinstance(code, partial):
        code = code.func
    plain = inspect.unwrap(getattr(code, "__func__", code))
    named = plain if hasattr(plain, "__qualname__") else type(plain)
    return f"{named.__module__}.{named.__qualname__}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _counts(name: str, value: object) -> bool:
    return not name.startswith("_") and name not in _LEFT_OUT and _is_plain(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _changed_attribute(found: _Module) -> Change | None:
    now = vars(found.module)
    for name in (*now, *found.then):
        value, before = now.get(name), found.then.get(name)
        if value is before:
            continue
        if name == "training":
            return Change(Doubt.TRAINING, "" if value else "its mode was switched")
        where = f"{found.path}.{name}".lstrip(".")
        if name == "config":
            return Change(Doubt.SETTINGS_CHANGED, f"{where} was replaced")
        if name.startswith("_") or name in _LEFT_OUT:
            continue
        if not (_is_plain(value) and _is_plain(before)):
            # Some models keep tensors of the last prompt here, which no key names.
            if not isinstance(value, Tensor):
                return Change(Doubt.MODULES_CHANGED, where)
        elif value != before:
            # It may be of no effect on the canary's few tokens, as a window is.
            counts = name.endswith(_COUNTERS)
            return Change(Doubt.MODULES_CHANGED if counts else Doubt.SETTINGS_CHANGED, where)
    return None


def _configs(model: nn.Module) -> list[Any]:
    found = [getattr(one, "config", None) for one in model.modules()]
    return list({id(one): one for one in found if hasattr(one, "to_dict")}.values())


def _copied(config: Any) -> dict[str, Any]:
    """Returns the settings of `config`. Those that can change in place are copied."""
    return {name: _value(value) for name, value in vars(config).items()}


def _value(value: Any) -> Any:
    return deepcopy(value) if isinstance(value, (dict, list)) else value


def _changed_setting(now: Mapping[str, Any], then: Mapping[str, Any]) -> str | None:
    names = (name for name in (*now, *then) if now.get(name) != then.get(name))
    return next(filter(shapes_kv, names), None)


def settings_of(config: Any) -> dict[str, Any]:
    """Returns all settings of `config` that shape keys and values, and some that do not."""
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {name: _without_harmless(value) for name, value in settings.items() if shapes_kv(name)}


def shapes_kv(name: str) -> bool:
    """Returns whether a setting of this name may shape keys and values."""
    return name not in _HARMLESS and not name.startswith("_")


def _without_harmless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_harmless(each) for name, each in value.items() if shapes_kv(name)}
    return [_without_harmless(each) for each in value] if isinstance(value, list) else value
