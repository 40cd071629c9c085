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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError

from engine.errors import ModelError
from engine.models.config import DecoderConfig, from_hf
from engine.models.gguf_config import from_gguf
from engine.models.shapes import expected_shapes
from engine.native import multiplies_bfloat16, multiplies_int8
from engine.quant import int4, int8
from engine.text.assets import ChatAssets, assets_from_folder, assets_from_gguf
from engine.weights.calibration import input_peaks
from engine.weights.mapped import map_tensors, save_tensors
from engine.weights.source import FolderSource, PackageSource, Source, cached_digest, move_into_place
from engine.weights.tensors import GgufTensors, SafetensorsSource, TensorSource, gguf_metadata, read_gguf

CONVERTER_VERSION = 12
SIZES_FILE = "sizes.json"


@dataclass(frozen=True, slots=True)
class Layout:
    """How weights are kept: dense in `dense`; bits 4: linear layers packed to 4 bits for few rows, and for many in
    `many_bits`, None: dense; bits 8: linear layers in 8 bits."""

    dense: torch.dtype
    bits: Literal[4, 8] | None = None
    many_bits: Literal[8] | None = None

    @property
    def name(self) -> str:
        dense = str(self.dense).removeprefix("torch.")
        if self.bits == 4:
            # The packed order depends on the vector width, so a copy is only good for processors of this kind.
            few, many = torch.backends.cpu.get_cpu_capability().lower(), "" if self.many_bits is None else "int8-"
            return f"int4-{few}-{many}{dense}"
        return dense if self.bits is None else f"int8-{dense}"

    @property
    def dtype(self) -> str:
        """As in EngineConfig."""
        return str(self.dense).removeprefix("torch.") if self.bits is None else f"int{self.bits}"


def choose_layout(dtype: str) -> Layout:
    """auto is int4. Beside packed weights, many rows read 8 bits where the processor multiplies those natively, else
    bfloat16 where it multiplies that, else float32."""
    if dtype not in ("auto", "int4", "int8"):
        return Layout(getattr(torch, dtype))
    dense = torch.bfloat16 if multiplies_bfloat16() else torch.float32
    return Layout(dense, 8) if dtype == "int8" else Layout(dense, 4, 8 if multiplies_int8() else None)


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
    name = f"{digest[:16]}-{layout.name}"
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
    for outdated in folder.parent.glob(f"{name}-v*"):
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
        peaks = _peaks(tensors, config, layout, assets)
        converted = dict(_tensors(tensors, config, layout, peaks))
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of {path} do not fit its configuration: {error}") from None
    save_tensors(target, converted)
    (target / "model.json").write_text(json.dumps(config.to_json()), encoding="utf-8")
    assets.save(target)
    (target / SIZES_FILE).write_text(json.dumps(_sizes(target)), encoding="utf-8")


def _peaks(source: TensorSource, config: DecoderConfig, layout: Layout, assets: ChatAssets) -> dict[str, torch.Tensor]:
    """Of the inputs that this layout smooths. Runs the dense model, which is gone before the narrow one is made."""
    if layout.many_bits is None:
        return {}
    return input_peaks(config, dict(_tensors(source, config, Layout(layout.dense), {})), assets)


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


def _tensors(
    source: TensorSource, config: DecoderConfig, layout: Layout, peaks: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """peaks: the largest inputs of the channels of those layers that 8-bit activations need smoothed."""

    def fused(name: str, parts: list[str], bias: bool) -> Iterator[tuple[str, torch.Tensor]]:
        dense = torch.cat([source.dense(f"{part}.weight") for part in parts])
        packs = layout.bits == 4 and int4.fits(*dense.shape)
        if bias:
            yield f"{name}.bias", torch.cat([source.dense(f"{part}.bias") for part in parts]).to(layout.dense)
        if packs and name in peaks:
            yield f"{name}.smoothing", (smoothing := int8.smoothing_of(peaks[name], dense))
            dense = dense.float() * smoothing
        if layout.bits == 8 or (packs and layout.many_bits == 8):
            yield from eight_bits(name, dense)
        else:
            yield f"{name}.weight", dense.to(layout.dense)
        if packs:
            stored = [source.grouped_4bit(f"{part}.weight") for part in parts]
            groups = [
                g if g is not None else int4.quantize(source.dense(f"{p}.weight"))
                for g, p in zip(stored, parts, strict=True)
            ]
            joined = int4.Grouped4Bit(*(torch.cat([getattr(g, f) for g in groups]) for f in ("q", "scale", "zero")))
            yield f"{name}.int4", (packed := int4.pack(joined))[0]
            yield f"{name}.scale_zero", packed[1]

    def eight_bits(name: str, dense: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.int8", (rows := int8.quantize_rows(dense))[0]
        yield f"{name}.scale", rows[1]

    embedding = source.dense("model.embed_tokens.weight")
    yield "embedding", embedding.to(layout.dense if layout.bits is None else torch.bfloat16)
    yield "norm", source.dense("model.norm.weight")
    head = embedding if config.tied_embeddings else source.dense("lm_head.weight")
    if layout.bits is not None:
        yield from eight_bits("lm_head", head)
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
