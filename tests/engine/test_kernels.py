"""The machine code: how it is written, compiled, kept and run, and that every way of running it gives the same bits."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llvmlite import ir

from cache import TailCopy
from engine.attention import AttentionRow, CpuAttention, LayerAttention
from engine.kernels import Geometry, Heads, Kernel, Norm, Products, float_bits, new_program, products, run_kernel
from engine.kernels import attention as attention_code
from engine.kernels.jit import Compiled, compiled
from engine.kernels.library import threads
from engine.kernels.processor import Processor
from engine.kernels.simd import F32, I64, Function, Value
from engine.kernels.threads import Threads
from engine.kernels.turning import LaneSums, transposed
from engine.models.decoder import Decoder
from engine.quant import GroupedWeight
from engine.weights import open_model
from tests.engine.attention_rig import Rig
from tests.support.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variants are those of x86")


def call(code: Compiled, name: str, *arguments: np.ndarray | int) -> None:
    """Runs a function with these numbers, and with the addresses of these arrays."""
    numbers = [argument if isinstance(argument, int) else argument.ctypes.data for argument in arguments]
    values = (ctypes.c_int64 * len(numbers))(*numbers)
    threads().run(code.address(name), ctypes.addressof(values))


def written(folder: Path, args: Sequence[str], write: Callable[[Function], None]) -> Callable[..., None]:
    """The function whose body `write` writes."""

    def module(module: ir.Module) -> None:
        f = Function(module, "written", args)
        write(f)
        f.end()

    return partial(call, compiled("a test", module, Processor.host(), folder), "written")


# Writing.


def unary(folder: Path, operation: Callable[[Function, Value], Value]) -> Callable[[np.ndarray], np.ndarray]:
    """An operation on float32, sixteen at a time."""

    def write(f: Function) -> None:
        with f.loop(0, f.args["n"], 16) as i:
            f.store(operation(f, f.load(f.args["x"], i, F32, 16)), f.args["y"], i)

    run = written(folder, ("x", "y", "n"), write)

    def of(x: np.ndarray) -> np.ndarray:
        padded = np.zeros(-(-len(x) // 16) * 16, dtype=np.float32)
        padded[: len(x)] = x
        y = np.empty_like(padded)
        run(padded, y, len(padded))
        return y[: len(x)]

    return of


def test_exp(tmp_path: Path) -> None:
    exp = unary(tmp_path, lambda f, x: f.exp(x))
    x = np.concatenate((np.linspace(-87, 88, 100_001), np.linspace(-1e-3, 1e-3, 1001))).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert float((np.abs(exp(x) - exact) / exact).max()) < 4 * 2.0**-24
    assert exp(np.array([0.0, -0.0], dtype=np.float32)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("x", "expected"),
    [(-87.01, 0.0), (-1e3, 0.0), (-1e30, 0.0), (-3e38, 0.0), (88.5, np.exp(88.0)), (1e30, np.exp(88.0))],
)
def test_exp_beyond_its_range(x: float, expected: float, tmp_path: Path) -> None:
    found = unary(tmp_path, lambda f, x: f.exp(x))(np.array([x], dtype=np.float32))
    assert float(found[0]) == pytest.approx(expected, rel=1e-6, abs=0)


def test_exp_does_not_lose_what_is_not_a_number(tmp_path: Path) -> None:
    exp = unary(tmp_path, lambda f, x: f.exp(x))
    assert np.isnan(exp(np.array([np.nan, -np.nan], dtype=np.float32))).all()


def test_rounding_is_to_the_even_one(tmp_path: Path) -> None:
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997, 3e9], dtype=np.float32)
    assert unary(tmp_path, lambda f, x: f.nearest(x))(x).tolist() == np.rint(x).tolist()


def test_of_two_numbers_the_second_where_the_first_is_none(tmp_path: Path) -> None:
    x = np.array([np.nan, -3.0, 0.5, 7.0], dtype=np.float32)
    assert unary(tmp_path, lambda f, x: f.maximum(x, 1.0))(x).tolist() == [1.0, 1.0, 1.0, 7.0]
    assert unary(tmp_path / "min", lambda f, x: f.minimum(x, 1.0))(x).tolist() == [1.0, -3.0, 0.5, 1.0]


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16])
def test_sixteen_vectors_are_turned_over_and_added_up(lanes: int, tmp_path: Path) -> None:
    def write(f: Function) -> None:
        rows = [f.load(f.args["x"], row * lanes, F32, lanes) for row in range(16)]
        for lane, column in enumerate(transposed(rows)):
            f.store(column, f.args["turned"], 16 * lane)
        sums = LaneSums()
        for row in rows:
            sums.add(row)
        f.store(sums.get(), f.args["sums"], 0)

    x = np.random.default_rng(0).integers(-99, 99, (16, lanes)).astype(np.float32)
    turned, sums = np.empty((lanes, 16), dtype=np.float32), np.empty(16, dtype=np.float32)
    written(tmp_path, ("x", "turned", "sums"), write)(x, turned, sums)
    assert np.array_equal(turned, x.T)
    assert np.array_equal(sums, x.sum(1))


def test_loops_conditions_and_variables(tmp_path: Path) -> None:
    def write(f: Function) -> None:
        total = f.variable(f.integer(0))
        with f.loop(f.args["first"], f.args["last"], 3) as i:
            with f.when(i > 4), f.loop(0, 2) as j:
                total.set(total.get() + i * 10 + j)
        number = f.variable(f.take_argument("counter"))
        f.repeat_while(lambda: number.get() < 5, lambda: number.set(f.take_argument("counter")))
        f.store(total.get(), f.args["out"], 0)
        f.store(number.get(), f.args["out"], 1)

    out = np.zeros(2, dtype=np.int64)
    run = written(tmp_path, ("first", "last", "counter", "out"), write)
    for first, last in ((0, 10), (2, 9), (5, 5), (9, 1)):
        run(first, last, 2, out)
        assert out.tolist() == [sum(10 * i + j for i in range(first, last, 3) if i > 4 for j in (0, 1)), 5]


# Compiling.


def seven(f: Function) -> None:
    f.store(f.integer(7), f.args["out"], 0)


class Counted:
    """Writes `seven`, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, module: ir.Module) -> None:
        self.times += 1
        f = Function(module, "written", ("out",))
        seven(f)
        f.end()

    def works(self, folder: Path, what: str = "seven") -> bool:
        out = np.zeros(1, dtype=np.int64)
        call(compiled(what, self, Processor.host(), folder), "written", out)
        return out.tolist() == [7]


def test_machine_code_is_kept(tmp_path: Path) -> None:
    write = Counted()
    assert write.works(tmp_path / "kernels")
    assert write.works(tmp_path / "kernels")
    assert write.times == 1
    assert write.works(tmp_path / "kernels", what="another")
    assert write.times == 2
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".o"}


def turned_bits(code: bytes) -> bytes:
    return code[:200] + bytes(byte ^ 0x55 for byte in code[200:])


@pytest.mark.parametrize(
    "damage",
    [lambda code: b"", lambda code: code[:-1], lambda code: code[:100], lambda code: b"\x7fELF" * 200, turned_bits],
    ids=["empty", "a byte is missing", "cut", "made up", "bits are wrong"],
)
def test_damaged_machine_code_is_made_again(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    write = Counted()
    assert write.works(tmp_path)
    [kept] = tmp_path.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert write.works(tmp_path)
    assert write.times == 2
    assert kept.read_bytes() == whole
    assert write.works(tmp_path)
    assert write.times == 2


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    write = Counted()
    with caplog.at_level(logging.WARNING):
        assert write.works(tmp_path / "file" / "kernels")
        assert write.works(tmp_path / "file" / "kernels", what="another")
    assert write.times == 2
    assert caplog.text.count("every start compiles it anew") == 1


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    code = compiled("seven", Counted(), Processor.host(), tmp_path)
    with pytest.raises(KeyError, match="eight"):
        code.address("eight")


def without(*features: str) -> Processor:
    """The host, which lacks what begins with these names."""
    host = Processor.host()
    left = [f"-{one[1:]}" if one[1:].startswith(features) else one for one in host.features.split(",")]
    return Processor(host.cpu, ",".join(left))


LESSER = {
    "no VNNI": lambda: without("avx512vnni", "avxvnni"),
    "no AVX-512": lambda: without("avx512", "avx10", "avxvnni", "evex512"),
    "neither AVX-512 nor AVX2": lambda: Processor("x86-64", ""),
}


@x86
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("processor", LESSER.values(), ids=LESSER)
def test_products_have_the_same_bits_on_any_processor(
    processor: Callable[[], Processor], bits: Any, tmp_path: Path
) -> None:
    lesser = processor()
    code = compiled(
        f"product {bits}",
        partial(products_module, bits=bits, processor=lesser),
        lesser,
        tmp_path,
    )
    random = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-8, 1, 80)[:, None]  # float16 holds some of their scales without a leading one
    weight = GroupedWeight.of(torch.randn((80, 96), generator=random) * sizes, bits).pack()
    x = torch.randn((21, 192), generator=random) * torch.logspace(-3, 3, 21)[:, None]
    norm = Norm(torch.rand(96, generator=random) + 0.5, 1e-5)
    room = Products()
    for count in (1, 2, 3, 7, 8, 21):
        half = x[:count, :96].contiguous()
        for given, options in ((half, {}), (half, {"norm": norm}), (x[:count], {"gated": True})):
            expected, found = torch.zeros(count, 80), torch.zeros(count, 80)
            kernel, arguments = room.call(given, weight, None, expected, add=True, **options)
            run_kernel(kernel, arguments)
            lesser_kernel = Kernel(code.address("product"), kernel.names)
            run_kernel(lesser_kernel, arguments | {"y": found.data_ptr()})
            assert torch.equal(found, expected)


def products_module(module: ir.Module, bits: int, processor: Processor) -> None:
    products.write_product(module, "product", bits, threads(), processor)


@x86
@pytest.mark.parametrize(
    ("dtype", "layer"),
    [
        (torch.float32, LayerAttention(softcap=3.0)),
        (torch.bfloat16, LayerAttention()),
        (torch.int8, LayerAttention(window=37)),
    ],
    ids=str,
)
def test_attention_runs_on_the_least_processor(
    dtype: torch.dtype, layer: LayerAttention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least, kept = Processor("x86-64", ""), []

    def kernel(geometry: Geometry) -> Kernel:
        write = partial(
            attention_code.write_attention, name="attention", geometry=geometry, threads=threads(), processor=least
        )
        kept.append(compiled(f"{geometry}", write, least, tmp_path))
        return Kernel(kept[-1].address("attention"), attention_code.ARGUMENTS)

    monkeypatch.setattr("engine.attention.cpu.attention_kernel", kernel)
    rig = Rig(1, heads=4, head_dim=16, page_size=16, dtype=dtype, layers=(layer,))
    rig.add(0, 400)
    rig.step({0: 300})
    rig.step({0: 3})
    assert kept


# Running.


def tensors_of(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) for shape in shapes]


@pytest.mark.parametrize("position", [-1, 40])
def test_positions_lie_within_the_table(position: int) -> None:
    x, angles = tensors_of((2, 3, 8), (40, 4))
    heads = Heads(2, 1, torch.stack((angles.cos(), angles.sin()), -1))
    with pytest.raises(ValueError, match="beyond the 40"):
        heads.turn(x, torch.tensor([0, position]))


@pytest.mark.parametrize("size", [6, 8, 20, 64, 128])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_normed_and_turned(size: int, normed: bool, turned: bool) -> None:
    x, query_norm, key_norm, angles = tensors_of((5, 7, size), (size,), (size,), (40, size // 2))
    table = torch.stack((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 39, 3, 3, 17])
    expected = x.double()
    if normed:
        for heads, norm in ((slice(0, 4), query_norm), (slice(4, 6), key_norm)):
            mean = expected[:, heads].square().mean(-1, keepdim=True)
            expected[:, heads] *= (mean + 1e-5).rsqrt() * norm.double()
    if turned:
        pairs = torch.view_as_complex(expected[:, :6].reshape(5, 6, -1, 2).clone())
        turns = torch.polar(torch.ones_like(angles).double(), angles.double())[positions][:, None]
        expected[:, :6] = torch.view_as_real(pairs * turns).flatten(-2)
    norms = (Norm(query_norm, 1e-5), Norm(key_norm, 1e-5)) if normed else (None, None)
    Heads(4, 2, table if turned else None, *norms).turn(x, positions)
    torch.testing.assert_close(x.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(5, 5, 8)},
        {"x": torch.zeros(5, 7, 7)},
        {"x": torch.zeros(5, 7, 6)},
        {"x": torch.zeros(5, 7, 8, dtype=torch.float64)},
        {"positions": torch.zeros(4, dtype=torch.int64)},
        {"positions": torch.zeros(5, dtype=torch.int32)},
    ],
    ids=lambda change: f"{next(iter(change))}",
)
def test_heads_that_do_not_fit_are_refused(change: dict[str, torch.Tensor]) -> None:
    heads = Heads(4, 2, torch.zeros(40, 4, 2))
    given = {"x": torch.zeros(5, 7, 8), "positions": torch.zeros(5, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=r"is needed|heads of"):
        heads.turn(**given)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_program_is_its_calls_one_after_the_other(count: int, watched: bool) -> None:
    torch.set_num_threads(count)
    x, residual, norm, angles = tensors_of((9, 64), (9, 64), (64,), (20, 8))
    up, down = (GroupedWeight.of(*tensors_of(shape), 4).pack() for shape in ((192, 64), (64, 96)))
    table, positions = torch.stack((angles.cos(), angles.sin()), -1), torch.arange(9)
    heads, norms = Heads(8, 3, table), Norm(norm, 1e-5)

    expected = residual.clone()
    for _ in range(2):
        wide = Products().product(x, up, norm=norms)
        heads.turn(wide.view(9, 12, 16), positions)
        Products().product(wide, down, gated=True, add_to=expected)

    found, wide, room, program, parts = residual.clone(), torch.empty(9, 192), Products(), new_program(), []
    room.reserve(9, 96)
    for _ in range(2):
        program.add("up", "product", *room.call(x, up, None, wide, norm=norms))
        program.add("heads", "heads", *heads.call(wide.view(9, 12, 16)))
        program.add("down", "product", *room.call(wide, down, None, found, gated=True, add=True))
    program.finish()
    for rows in (4, 9):
        found[:rows] = residual[:rows]
        program.set("product", rows=rows, counter=0)
        program.set("heads", rows=rows, positions=positions.data_ptr())
        if watched:
            program.run_watched(lambda part: parts.append(part) or nullcontext())
        else:
            program.run()
        assert torch.equal(found[:rows], expected[:rows])
    assert parts == (["up", "heads", "down"] * 4 if watched else [])


def test_numbers_are_handed_over_as_float32(tmp_path: Path) -> None:
    def write(f: Function) -> None:
        f.store(f.float_argument("x") * 2.0, f.args["out"], 0)

    out = np.zeros(1, dtype=np.float32)
    run = written(tmp_path, ("x", "out"), write)
    for number in (0.1, -3.5, float("-inf")):
        run(float_bits(number), out)
        assert out[0] == np.float32(number) * 2


def test_every_thread_gets_a_share(tmp_path: Path) -> None:
    def write(f: Function) -> None:
        first, last = threads().share(f, f.args["amount"])
        with f.loop(first, last) as i:
            f.store(f.load(f.args["out"], i, I64) + 1, f.args["out"], i)

    run = written(tmp_path, ("amount", "out"), write)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for amount in (0, 1, 3, 100):
            out = np.zeros(100, dtype=np.int64)
            run(amount, out)
            assert out.tolist() == [1] * amount + [0] * (100 - amount)


def test_without_torch_s_threads_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.threads._load", lambda: None)
    alone = Threads()
    assert not alone.shared

    def write(module: ir.Module) -> None:
        products.write_product(module, "product", 4, alone, Processor.host())

    code = compiled("a product on one thread", write, Processor.host(), tmp_path)
    x, weight = tensors_of((9, 64), (48, 64))
    packed, room = GroupedWeight.of(weight, 4).pack(), Products()
    expected, found = torch.empty(9, 48), torch.empty(9, 48)
    kernel, arguments = room.call(x, packed, None, expected)
    run_kernel(kernel, arguments)
    arguments["y"] = found.data_ptr()
    torch.set_num_threads(3)
    numbers = (ctypes.c_int64 * len(kernel.names))(*(arguments.get(name, 0) for name in kernel.names))
    alone.run(code.address("product"), ctypes.addressof(numbers))
    assert torch.equal(found, expected)


# All layers of a decoder in one go.


class Another:
    """An attention backend that a decoder does not know, and so calls layer by layer."""

    def __init__(self, attention: CpuAttention) -> None:
        self._attention = attention

    def plan(self, rows: Sequence[AttentionRow]) -> None:
        self._attention.plan(rows)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._attention.run(layer, q, k, v)

    def fork(self, source: int, target: int, tokens: int, tail: TailCopy | None) -> None:
        self._attention.fork(source, target, tokens, tail)

    def drop(self, sequence: int) -> None:
        self._attention.drop(sequence)


PAGES = np.arange(64, dtype=np.int32).reshape(2, 32)
LISTED = {
    "use_sliding_window": True,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "q/k norms": ("qwen3", {"head_dim": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "biases of q, k and v": ("qwen2", {}),
    "window": ("mistral", {"sliding_window": 10}),
    "windows of some layers": ("qwen3", {"head_dim": 16, **LISTED}),
    "layers without positions": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
}
STEPS = [(((0, 0, 300),)), ((0, 300, 1),), ((0, 301, 1), (1, 0, 40)), ((1, 40, 3), (0, 302, 8)), ((0, 310, 150),)]
"""Of sequence, start and count."""


def decoder_of(folder: Path, dtype: str) -> Decoder:
    model = open_model(str(folder / "model"), folder / "models", dtype)
    return Decoder(model.config, model.tensors())


def attention_of(model: Decoder) -> CpuAttention:
    return CpuAttention(model.spec.kv_shape(PAGES.size, 16, torch.bfloat16), model.spec.layers)


def logits(model: Decoder, attention: Any, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    attention.plan([AttentionRow(number, PAGES[number], start, count, 512) for number, start, count in spans])
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in spans])
    tokens = (positions * 7919 + 13) % model.spec.vocab_size
    with torch.inference_mode():
        return model.forward(tokens, positions, torch.arange(len(tokens)), attention)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize(("model_type", "options"), MODELS.values(), ids=MODELS)
def test_all_layers_in_one_go_and_one_by_one_give_the_same_bits(
    model_type: str, options: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "model", model_type, **options)
    model = decoder_of(tmp_path, dtype)
    whole, split = attention_of(model), Another(attention_of(model))
    for count in (1, 2):
        torch.set_num_threads(count)
        for spans in STEPS:
            assert torch.equal(logits(model, whole, spans), logits(model, split, spans))
    assert model._whole is not None
    assert model._whole.attention is whole


@pytest.fixture
def packed(tmp_path: Path) -> Decoder:
    save_tiny(tmp_path / "model", "qwen3", head_dim=16, **LISTED)
    return decoder_of(tmp_path, "int4")


def test_a_step_of_more_rows_than_before(packed: Decoder) -> None:
    whole, split = attention_of(packed), Another(attention_of(packed))
    for start, count in ((0, 3), (3, 16), (19, 17), (36, 1), (37, 100), (137, 2)):
        assert torch.equal(logits(packed, whole, [(0, start, count)]), logits(packed, split, [(0, start, count)]))
    assert packed._whole is not None
    assert packed._whole.most_rows == 128


def test_two_attention_backends_in_turn(packed: Decoder) -> None:
    first, second, split = attention_of(packed), attention_of(packed), Another(attention_of(packed))
    expected = [logits(packed, split, spans) for spans in STEPS]
    for step in range(len(STEPS) + 1):  # the second is a step behind
        for attention, index in ((first, step), (second, step - 1)):
            if 0 <= index < len(STEPS):
                assert torch.equal(logits(packed, attention, STEPS[index]), expected[index])


def test_a_watched_step_gives_the_same_bits(tmp_path: Path, packed: Decoder) -> None:
    class Watch:
        def __init__(self) -> None:
            self.parts: list[str] = []

        def measure(self, part: str) -> Any:
            self.parts.append(part)
            return nullcontext()

    watch, model = Watch(), open_model(str(tmp_path / "model"), tmp_path / "models", "int4")
    watched = Decoder(model.config, model.tensors(), watch=watch)
    plain, other, split = attention_of(packed), attention_of(packed), Another(attention_of(packed))
    layer = ["qkv", "heads", "attention", "out", "gate_up", "down"]
    for spans in STEPS:
        expected = logits(packed, plain, spans)
        for attention in (other, split):
            watch.parts.clear()
            assert torch.equal(logits(watched, attention, spans), expected)
            assert watch.parts == [*layer * 3, "lm_head"]


def test_a_step_that_was_not_planned_is_refused(packed: Decoder) -> None:
    ids = torch.arange(3)
    for attention in (attention_of(packed), Another(attention_of(packed))):
        with pytest.raises(RuntimeError, match="not planned"):
            packed.forward(ids, ids, ids, attention)
        attention.plan([AttentionRow(0, PAGES[0], 0, 4, 512)])
        with pytest.raises(ValueError, match="3 tokens, and 4 were planned"):
            packed.forward(ids, ids, ids, attention)
