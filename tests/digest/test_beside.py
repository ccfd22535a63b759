"""Files that another loader may take count too; one loader's files alone have the old digest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_directories import ALONE, SHARDS, index, make, pickled, tensors

from kvconnect.digest import model as digest
from kvconnect.digest import model_digest
from kvconnect.digest.content import content_digests
from kvconnect.digest.files import ModelFiles
from kvconnect.errors import ConfigurationError, ModelChanged

OF_RELEASE_1 = {
    "safetensors": "0de4851620ffc382aeb40ac61f3519eb869f7bc9dc2207a9e6353494c7286c22",
    "index and shards": "a92c4baa4ae9d3d0f47f7614f59cf77b9da79c2a3825a24a98d4f7bbff0e4989",
    "an index that names none": "fad3d360e5372db248ccb7be6855c3defcd99b129fbf5932be601022ad91921d",
    "bin": "ea23df2659894a08dc4b5d5a9edae3bc168589054c5d7008f74e2d93a63834c8",
    "bin, index and shards": "f0c62b5128abfb5f3818a84e0db7e68abb0746fcf9ceb1fc38d9d0b47efed78a",
    "bin of a trainer": "d1332864fb88a63b2baff2b6c7267cded6a94ef28ebbbedfbdc369de02c96caf",
    "gguf": "7b452a5fcfce1b1e354057d0d6ce1c4d5a66864284586f71910ad83b7e57a3f6",
    "consolidated": "77ae191f0c1a76f18862b99b691df37f97ab699650d63a66ad3c1dfb691322d5",
    "consolidated safetensors": "3e7efda374383544b63a6494728612d8439ca7db1284f83e8ba26a6fcfaebac7",
    "adapter": "b195e5a8462df86356b6b07134ab3e3ee501cdcbfd7a40ac88b387451c1308d0",
    "adapter alone": "45ae87ccd9d303785aac0cdeaba38f8e04958076024cbaf1bd33a4116f8603d4",
    "named by config.json": "ad6a13c8485b6f00a77988d93ce5f1fdacb1cae4d62b08880153cde4fc375393",
    "a folder of bin": "63e142b222abe2a1db8998f4ba8258090f2966b0f70c0c36a049d622c2b0f990",
}

WHOLE = {"model.safetensors": tensors("a")}
FIRST = index(a="model-00001-of-00002.safetensors")
CODE = WHOLE | {"config.json": b'{"auto_map": {"AutoModel": "modeling_mine.Mine"}}'}

BESIDE = {
    "consolidated safetensors": (WHOLE, "consolidated.safetensors", tensors("a")),
    "its index": (WHOLE, "consolidated.safetensors.index.json", index(a="consolidated.x")),
    "shards behind the whole file": (WHOLE | SHARDS, "model-00002-of-00002.safetensors", b""),
    "the index behind the whole file": (WHOLE | SHARDS, "model.safetensors.index.json", FIRST),
    "the whole file behind shards": (SHARDS, "model.safetensors", tensors("a")),
    "a shard that the index leaves out": (SHARDS, "model-00003-of-00003.safetensors", b""),
    "a variant": (WHOLE, "model.fp16.safetensors", tensors("a")),
    "the index of a variant": (WHOLE, "model.safetensors.index.fp16.json", index(a="x")),
    "a folder": (WHOLE, "fp16/model.safetensors", tensors("a")),
    "the settings of a folder": (
        WHOLE | {"fp16/model.safetensors": tensors("a")},
        "fp16/config.json",
        b"{}",
    ),
    "as Meta ships": (WHOLE, "original/consolidated.00.pth", pickled(1)),
    "its settings": (WHOLE | {"original/c.pth": pickled(1)}, "original/params.json", b"{}"),
    "bin": (WHOLE, "pytorch_model.bin", pickled(1)),
    "pt": (WHOLE, "weights.pt", pickled(1)),
    "gguf": (WHOLE, "model-q4.gguf", pickled(1)),
    "npz": (WHOLE, "weights.npz", pickled(1)),
    "npz beside bin": ({"pytorch_model.bin": pickled(1)}, "weights.npz", pickled(1)),
    "unpacked bin": (WHOLE | {"np/weight_names.json": b"[]"}, "np/lm_head.weight", b"1"),
    "a tensorizer's": (WHOLE, "model.tensors", pickled(1)),
    "Mistral's settings": (WHOLE, "params.json", b"{}"),
    "GPTQ's settings": (WHOLE, "quantize_config.json", b"{}"),
    "AWQ's settings": (WHOLE, "quant_config.json", b"{}"),
    "ModelOpt's settings": (WHOLE, "hf_quant_config.json", b"{}"),
    "ModelOpt's settings by layer": (WHOLE, "quant_cfg.json", b"{}"),
    "ModelSlim's settings": (WHOLE, "quant_model_description.json", b"{}"),
    "TensorRT-LLM's dtypes": (WHOLE, "dtypes.json", b"{}"),
    "SGLang's mode of attention": (WHOLE, "decision_config.json", b"{}"),
    "a configuration for a version of transformers": (WHOLE, "config.4.0.0.json", b"{}"),
    "an adapter's settings": ({"pytorch_model.bin": pickled(1)}, "adapter_config.json", b"{}"),
    "an adapter in a folder": (WHOLE, "lora/adapter_model.safetensors", tensors("lora_A")),
    "what a trainer keeps": (WHOLE, "optimizer.pt", pickled(1)),
    "code that the configuration names": (CODE, "modeling_mine.py", b"x = 1"),
}
"""Files of a directory, one more, and its content."""


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvconnect.digest.files._TICK_S", 0)  # waited for at each digest
    return lambda directory: model_digest(directory, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ALONE)
def test_one_loaders_files_alone_have_the_digest_of_release_1(name, tmp_path, digest_of):
    model = make(tmp_path / "model", ALONE[name])
    assert digest_of(model).hex() == OF_RELEASE_1[name]
    with ModelFiles(model) as files:
        assert not files.beside


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_that_another_loader_may_take_counts(name, tmp_path, digest_of):
    files, beside, content = BESIDE[name]
    plain = {each: data for each, data in files.items() if each != beside}
    found = {
        digest_of(make(tmp_path / str(number), plain | more))
        for number, more in enumerate(({}, {beside: content}, {beside: content + b" "}))
    }
    assert len(found) == 3


def test_files_that_change_names_count(tmp_path, digest_of):
    one, two = {"a.pth": b"1", "b.pth": b"2"}, {"a.pth": b"2", "b.pth": b"1"}
    found = {digest_of(make(tmp_path / str(n), WHOLE | more)) for n, more in enumerate((one, two))}
    assert len(found) == 2


@pytest.mark.parametrize(
    "name", ["README.md", "tokenizer_2.model", "logs/events.out", "notes.json", "modeling_mine.py"]
)
def test_files_that_no_loader_takes_weights_from_do_not_count(name, tmp_path, digest_of):
    plain, more = make(tmp_path / "a", WHOLE), make(tmp_path / "b", WHOLE | {name: b"{}"})
    assert digest_of(plain) == digest_of(more)


def test_an_index_counts_if_it_says_more_than_its_shards(tmp_path, digest_of):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    both = {first: tensors("a", "b", seed=1), second: tensors("b", seed=2)}
    maps = [index(a=first, b=first), index(a=first, b=second)]
    models = [
        make(tmp_path / str(number), both | {"model.safetensors.index.json": each})
        for number, each in enumerate(maps)
    ]
    assert digest_of(models[0]) != digest_of(models[1])
    left_out = make(
        tmp_path / "left out", SHARDS | {"model.safetensors.index.json": index(a=first, c=second)}
    )
    assert digest_of(left_out) != digest_of(make(tmp_path / "whole", SHARDS))


@pytest.mark.parametrize(
    "broken", [b"", b"\xff" * 8, (2**40).to_bytes(8, "little"), b"\3" + bytes(7)]
)
def test_a_shard_that_is_no_safetensors_file_makes_its_index_count(broken, tmp_path, digest_of):
    shard = "model-00002-of-00002.safetensors"
    named = [index(a="model-00001-of-00002.safetensors", **{name: shard}) for name in "bc"]
    made = [
        make(tmp_path / str(n), SHARDS | {shard: broken, "model.safetensors.index.json": each})
        for n, each in enumerate(named)
    ]
    assert digest_of(made[0]) != digest_of(made[1])


# ------------------------------------------------------------------------------------- links


def test_folders_behind_links_count(tmp_path, digest_of):
    for name, seed in (("a", 1), ("b", 2)):
        make(tmp_path / name, {"model.safetensors": tensors("a", seed=seed)})
    model = make(tmp_path / "model", WHOLE)
    (model / "fp16").symlink_to(tmp_path / "a")
    before = digest_of(model)
    (model / "fp16").unlink()
    (model / "fp16").symlink_to(tmp_path / "b")
    assert digest_of(model) != before


def test_which_folder_a_link_within_the_directory_leads_to_counts(tmp_path, digest_of):
    found = set()
    for target in ("a", "b", "."):
        files = {f"{name}/model.safetensors": tensors(name) for name in "ab"}
        model = make(tmp_path / f"to {target}", WHOLE | files)
        (model / "fp16").symlink_to(target)
        found.add(digest_of(model))
    assert len(found) == 3


def test_hard_links_and_links_to_files_are_files(tmp_path, digest_of):
    plain = make(tmp_path / "plain", WHOLE | {"pytorch_model.bin": pickled(1)})
    linked = make(tmp_path / "linked", {})
    (linked / "model.safetensors").symlink_to(plain / "model.safetensors")
    os.link(plain / "pytorch_model.bin", linked / "pytorch_model.bin")
    assert digest_of(linked) == digest_of(plain)


def test_links_in_a_circle_end(tmp_path, digest_of):
    model = make(tmp_path / "model", WHOLE | {"a/b/x.bin": pickled(1)})
    (model / "a" / "b" / "up").symlink_to("../..")
    (model / "a" / "nowhere").symlink_to("nothing")
    assert digest_of(model)


def test_a_directory_of_too_many_folders_is_refused(tmp_path, digest_of, monkeypatch):
    monkeypatch.setattr("kvconnect.digest.weight_files._MAX_FOLDERS", 3)
    model = make(tmp_path / "model", WHOLE | {f"{name}/x.txt": b"" for name in "abc"})
    with pytest.raises(ConfigurationError, match=r"over 3 folders; give .* or model_revision"):
        digest_of(model)


# ------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "model.safetensors").write_bytes(b"other"),
        lambda model: (model / "fp16/model.safetensors").write_bytes(b"other"),
        lambda model: (model / "fp16/model.safetensors").unlink(),
        lambda model: (model / "consolidated.safetensors").write_bytes(b"new"),
        lambda model: (model / "fp16/config.json").write_bytes(b"{}"),
        lambda model: (model / "link").symlink_to("fp16"),
    ],
    ids=["loaded one written", "written", "removed", "added", "settings added", "linked"],
)
def test_a_change_while_files_are_read_is_refused(change, tmp_path, digest_of, monkeypatch):
    model = make(tmp_path / "model", WHOLE | {"fp16/model.safetensors": tensors("a")})

    def interrupted(contents):
        found = content_digests(contents)
        change(model)
        return found

    monkeypatch.setattr(digest, "content_digests", interrupted)
    with pytest.raises(ModelChanged, match="changed while it was loaded"):
        digest_of(model)


def test_a_change_after_all_was_read_is_found_by_a_check(tmp_path):
    model = make(tmp_path / "model", WHOLE | {"pytorch_model.bin": pickled(1)})
    with ModelFiles(model) as files:
        digest.digest_of(files, cache_dir=tmp_path)
        files.check()
        (model / "pytorch_model.bin").write_bytes(b"other")
        with pytest.raises(ModelChanged, match=r"pytorch_model.bin' changed"):
            files.check()


def test_more_files_than_may_be_open_are_digested(tmp_path, digest_of, monkeypatch):
    monkeypatch.setattr(digest, "_OPEN_AT_ONCE", 2)
    files = {f"checkpoint-{number}/x.bin": pickled(number) for number in range(7)}
    model = make(tmp_path / "model", WHOLE | files)
    before = digest_of(model)
    (model / "checkpoint-6" / "x.bin").write_bytes(b"other")
    assert digest_of(model) != before


def test_a_revision_names_weights_and_no_settings(tmp_path):
    def named(**files: bytes) -> bytes:
        number = len(list(tmp_path.iterdir()))
        names = {name.replace("__", "."): content for name, content in files.items()}
        return model_digest(make(tmp_path / str(number), WHOLE | names), revision="org/name@1")

    assert named() == named(pytorch_model__bin=b"x")
    assert len({named(), named(params__json=b"{}"), named(params__json=b"{ }")}) == 3
