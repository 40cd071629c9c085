"""Any source to chatd's own copy, once: fused layers, chosen layouts, tokenizer and template, ready to be mapped.

<models_dir>/converted/<digest>-<layout>-v<version>/
    model.json         the DecoderConfig
    weights.bin, weights.json    see engine/weights/mapped.py
    tokenizer.json, chat.json
    sizes.json         bytes of the other files, written last
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.errors import ModelError
from engine.models.config import DecoderConfig, from_hf
from engine.models.gguf_config import from_gguf
from engine.models.shapes import expected_shapes
from engine.narrow import RowScaled
from engine.quant import GroupedWeight
from engine.quant.grouped import Bits
from engine.text.assets import ChatAssets, assets_from_folder, assets_from_gguf
from engine.weights.layout import Layout
from engine.weights.mapped import map_tensors, save_tensors
from engine.weights.source import FolderSource, PackageSource, Source, cached_digest, move_into_place
from engine.weights.tensors import GgufTensors, SafetensorsSource, TensorSource, gguf_metadata, read_gguf

CONVERTER_VERSION = 13
SIZES_FILE = "sizes.json"


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """A finished copy in its folder."""

    folder: Path
    config: DecoderConfig
    assets: ChatAssets

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, mapped from the file rather than read."""
        return map_tensors(self.folder)


def ensure_converted(source: Source, models_dir: Path, layout: Layout) -> ConvertedModel:
    """The copy of this source in this layout, made unless it is there. A damaged copy is made again."""
    digest = cached_digest(source, models_dir)
    name = f"{digest[:16]}-{layout.folder}"
    folder = models_dir / "converted" / f"{name}-v{CONVERTER_VERSION}"
    if folder.is_dir():
        try:
            return _open(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ModelError):
            shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as temporary:
        _convert(source, source.fetch(models_dir), Path(temporary), layout)
        move_into_place(Path(temporary), folder)
    for outdated in folder.parent.glob(f"{name}-*"):  # also of layouts that went by longer names
        if outdated != folder:
            shutil.rmtree(outdated, ignore_errors=True)
    return _open(folder)


def _open(folder: Path) -> ConvertedModel:
    if json.loads((folder / SIZES_FILE).read_text(encoding="utf-8")) != _sizes(folder):
        raise ValueError(f"{folder} is not as it was written")
    map_tensors(folder)  # the index can be read
    config = DecoderConfig.from_json(json.loads((folder / "model.json").read_text(encoding="utf-8")))
    return ConvertedModel(folder, config, ChatAssets.load(folder))


def _convert(source: Source, path: Path, target: Path, layout: Layout) -> None:
    if isinstance(source, FolderSource):
        config = from_hf(source.config())
        tensors: TensorSource = SafetensorsSource(path, config)
        assets = assets_from_folder(path)
    else:
        reader = read_gguf(path)
        try:
            factors = next((t.data for t in reader.tensors if t.name == "rope_freqs.weight"), None)
            config = from_gguf(gguf_metadata(reader), {t.name for t in reader.tensors}, factors)
        except KeyError as missing:
            raise ModelError(f"the GGUF file {path} has no {missing}") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"the metadata of {path} cannot be used: {error}") from None
        tensors = GgufTensors(reader, config)
        assets = assets_from_gguf(reader)
        if isinstance(source, PackageSource):
            assets = replace(assets, sampling={**source.sampling, **assets.sampling})
    _check_tensors(tensors, config)
    try:
        converted = dict(_tensors(tensors, config, layout))
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of {path} do not fit its configuration: {error}") from None
    save_tensors(target, converted)
    (target / "model.json").write_text(json.dumps(config.to_json()), encoding="utf-8")
    assets.save(target)
    (target / SIZES_FILE).write_text(json.dumps(_sizes(target)), encoding="utf-8")


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a copy, by which a cut or missing one is noticed without reading it."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != SIZES_FILE}


def _check_tensors(source: TensorSource, config: DecoderConfig) -> None:
    found, expected = source.names(), expected_shapes(config)
    if config.tied_embeddings:
        found = found - {"lm_head.weight"}  # some files repeat the tied weight
    if missing := sorted(expected.keys() - found):
        raise ModelError(f"the model lacks {len(missing)} tensors, among them {missing[0]}")
    if unused := sorted(found - expected.keys()):
        raise ModelError(f"the model has {len(unused)} tensors of unknown use, among them {unused[0]}")
    for name, shape in expected.items():
        if (actual := source.shape(name)) != shape:
            raise ModelError(f"{name} has the shape {list(actual)}, and the configuration says {list(shape)}")


def _tensors(source: TensorSource, config: DecoderConfig, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    def fused(name: str, parts: list[str], bias: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if bias:
            yield f"{name}.bias", torch.cat([source.dense(f"{part}.bias") for part in parts]).to(layout.dense)
        if layout.bits is not None and GroupedWeight.fits(source.shape(f"{parts[0]}.weight")[1]):
            yield from packed(name, GroupedWeight.cat([grouped(f"{part}.weight", layout.bits) for part in parts]))
            return
        weight = torch.cat([source.dense(f"{part}.weight") for part in parts])
        if layout.rowwise is not None and RowScaled.fits(*weight.shape):
            scaled = RowScaled.of(weight, layout.rowwise)
            yield f"{name}.weight", scaled.q
            yield f"{name}.scale", scaled.scale
        else:
            yield f"{name}.weight", weight.to(layout.dense)

    def grouped(name: str, bits: Bits) -> GroupedWeight:
        stored = source.grouped_4bit(name) if bits == 4 else None
        return stored if stored is not None else GroupedWeight.of(source.dense(name), bits)

    def packed(name: str, weight: GroupedWeight) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.packed", weight.pack()
        yield f"{name}.outputs", torch.tensor(len(weight.u))

    embedding = source.dense("model.embed_tokens.weight")
    yield "embedding", embedding.to(layout.dense if layout.bits is None else torch.bfloat16)
    yield "norm", source.dense("model.norm.weight")
    head = embedding if config.tied_embeddings else source.dense("lm_head.weight")
    if layout.bits is not None and GroupedWeight.fits(head.shape[1]):
        yield from packed("lm_head", GroupedWeight.of(head, 8))
    elif not config.tied_embeddings:
        yield "lm_head.weight", head.to(layout.dense)
    for i in range(config.num_layers):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        yield ours + "attention_norm", source.dense(hf + "input_layernorm.weight")
        yield ours + "mlp_norm", source.dense(hf + "post_attention_layernorm.weight")
        if config.qk_norm:
            yield ours + "q_norm", source.dense(hf + "self_attn.q_norm.weight")
            yield ours + "k_norm", source.dense(hf + "self_attn.k_norm.weight")
        yield from fused(ours + "qkv", [f"{hf}self_attn.{p}_proj" for p in "qkv"], config.qkv_bias)
        yield from fused(ours + "out", [f"{hf}self_attn.o_proj"], config.out_bias)
        yield from fused(ours + "gate_up", [f"{hf}mlp.{p}_proj" for p in ("gate", "up")], config.mlp_bias)
        yield from fused(ours + "down", [f"{hf}mlp.down_proj"], config.mlp_bias)
