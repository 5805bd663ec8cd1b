"""The interpreter under virtual ranks computes what the compiled kernels compute.

Kernels are ordinary `@triton.jit` functions: no variable is set, no kernel has a branch for it.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import plait
from plait.backends.commands import Launch, Program
from plait.ops.matmul.epilogue_kernels import logistic, split_columns
from plait.testing.compare import assert_bitwise
from plait.testing.compile_sm90 import compile_for
from plait.testing.ranks import run_virtual

pytestmark = pytest.mark.newest_triton

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NUM = 64

_THREE = tl.constexpr(3)
_NAMES = {"sum": 0, "max": 1, "min": 2}


def interpret(kernel, grid=1, **args):
    """Run one launch on one virtual rank."""

    def fn(group):
        group.run(Program("user", [Launch(kernel, grid, args)]), call="user")

    run_virtual(fn, 1, device=torch.device("cpu"), check=False)


def not_nan_bits(tensor):
    """Bits, with every NaN replaced by one: its payload is not defined."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


# --- matrix products


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, out_ptr, SIZE: tl.constexpr):
    rows, cols = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    offsets = rows * SIZE + cols
    acc = tl.load(c_ptr + offsets)
    acc = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets).T, acc, input_precision="ieee")
    tl.store(out_ptr + offsets, acc)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_multiplies_and_accumulates_in_fp32(dtype):
    a, b = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype)
    c, out = torch.randn(16, 16), torch.empty(16, 16)
    interpret(_dot_kernel, a_ptr=a, b_ptr=b, c_ptr=c, out_ptr=out, SIZE=16)
    assert_bitwise(out, a.float() @ b.float().t() + c)


# --- casts


@triton.jit
def _cast_kernel(x_ptr, out_ptr, NUM: tl.constexpr):
    offs = tl.arange(0, NUM)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs).to(out_ptr.dtype.element_ty))


def awkward_values():
    ulps = [2.0**-8, 2.0**-11]  # half a unit of bf16, of fp16, at 1
    ties = [1 + step * ulp for ulp in ulps for step in (1, 3, 5)]
    ties += [1 + ulp * (1 + 2.0**-10) for ulp in ulps]
    special = [0.0, float("inf"), float("nan"), 65504.0, 65519.0, 65520.0, 3.3895e38, 3.4028e38]
    small = [2.0**-24, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 2.0**-133, 2.0**-149, 1e-40]
    values = ties + special + small
    values += [-value for value in values]
    rest = torch.randn(NUM - len(values)) * 10.0 ** torch.randint(-6, 6, (NUM - len(values),))
    return torch.cat([torch.tensor(values), rest])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_round_as_torch_does(source, target):
    x = awkward_values().to(source)
    out = torch.zeros(NUM, dtype=target)
    interpret(_cast_kernel, x_ptr=x, out_ptr=out, NUM=NUM)
    assert x.isnan().any()
    assert_bitwise(not_nan_bits(out), not_nan_bits(x.to(target)))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_casts_between_integers_and_floats(dtype, integer):
    x = torch.arange(-32, 32, dtype=integer) * 3 - 1
    out, back = torch.zeros(NUM, dtype=dtype), torch.zeros(NUM, dtype=integer)
    interpret(_cast_kernel, x_ptr=x, out_ptr=out, NUM=NUM)
    interpret(_cast_kernel, x_ptr=out, out_ptr=back, NUM=NUM)
    assert_bitwise(out, x.to(dtype))
    assert_bitwise(back, x)


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, less_ptr, NUM: tl.constexpr):
    offs = tl.arange(0, NUM)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, x + y)
    tl.store(out_ptr + NUM + offs, x * y)
    tl.store(out_ptr + 2 * NUM + offs, -x)
    tl.store(out_ptr + 3 * NUM + offs, tl.abs(x))
    tl.store(out_ptr + 4 * NUM + offs, tl.maximum(x, y))
    tl.store(less_ptr + offs, (x < y).to(tl.int32))


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_rounds_as_torch_does(dtype):
    x, y = torch.randn(NUM).to(dtype), torch.randn(NUM).to(dtype)
    out, less = torch.zeros(5, NUM, dtype=dtype), torch.zeros(NUM, dtype=torch.int32)
    interpret(_arithmetic_kernel, x_ptr=x, y_ptr=y, out_ptr=out, less_ptr=less, NUM=NUM)
    assert_bitwise(out, torch.stack([x + y, x * y, -x, x.abs(), torch.maximum(x, y)]))
    assert_bitwise(less, (x < y).int())


# --- reductions, masks, descriptors


@triton.jit
def _reduce_kernel(x_ptr, out_ptr, AXIS: tl.constexpr, WHAT: tl.constexpr, SIZE: tl.constexpr):
    rows, cols = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + rows * SIZE + cols)
    if WHAT == 0:
        found = tl.sum(x, axis=AXIS)
    elif WHAT == 1:
        found = tl.max(x, axis=AXIS)
    else:
        found = tl.min(x, axis=AXIS)
    tl.store(out_ptr + tl.arange(0, SIZE), found)


@pytest.mark.parametrize("what", ["sum", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_reductions(dtype, axis, what):
    x = torch.randint(-99, 99, (16, 16)).to(dtype)  # whole numbers: any order of adding is exact
    out = torch.zeros(16, dtype=dtype)
    interpret(_reduce_kernel, x_ptr=x, out_ptr=out, AXIS=axis, WHAT=_NAMES[what], SIZE=16)
    expected = x.sum(axis).to(dtype) if what == "sum" else getattr(x, f"a{what}")(axis)
    assert_bitwise(out, expected)


@triton.jit
def _scan_kernel(x_ptr, out_ptr, total_ptr, NUM: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, NUM))
    tl.store(out_ptr + tl.arange(0, NUM), tl.cumsum(x, axis=0))
    tl.store(total_ptr, tl.sum(x))


def test_scans_and_reductions_to_a_scalar():
    x = torch.randint(-9, 9, (NUM,)).float()
    out, total = torch.zeros(NUM), torch.zeros(1)
    interpret(_scan_kernel, x_ptr=x, out_ptr=out, total_ptr=total, NUM=NUM)
    assert_bitwise(out, x.cumsum(0))
    assert_bitwise(total, x.sum(0, keepdim=True))


@triton.jit
def _masked_kernel(x_ptr, out_ptr, num_values, OTHER: tl.constexpr, NUM: tl.constexpr):
    offs = tl.program_id(0) * NUM + tl.arange(0, NUM)
    x = tl.load(x_ptr + offs, mask=offs < num_values, other=OTHER)
    chosen = tl.where(x > 0, x, -x)
    tl.store(out_ptr + offs, chosen, mask=offs < num_values + 1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_keep_what_lies_outside(dtype):
    x = torch.randn(40).to(dtype)
    out = torch.full((48,), 7.0, dtype=dtype)
    interpret(_masked_kernel, grid=3, x_ptr=x[:37], out_ptr=out, num_values=37, OTHER=-2.0, NUM=16)
    assert_bitwise(out[:37], x[:37].abs())
    assert_bitwise(out[37:], torch.tensor([2.0] + [7.0] * 10, dtype=dtype))


@triton.jit
def _descriptor_kernel(x, out, ROW: tl.constexpr, COL: tl.constexpr):
    tile = x.load([ROW, COL])
    out.store([0, 0], tile + tile)


@pytest.mark.parametrize("dtype", FLOATS)
def test_descriptors_fill_with_zeros_and_clip(dtype):
    x = torch.randn(20, 24).to(dtype)
    out = torch.full((16, 16), 7.0, dtype=dtype)
    clipped = torch.full((12, 16), 7.0, dtype=dtype)
    for target in (out, clipped):
        descriptors = [
            TensorDescriptor(each, list(each.shape), list(each.stride()), [16, 16])
            for each in (x, target)
        ]
        interpret(_descriptor_kernel, x=descriptors[0], out=descriptors[1], ROW=8, COL=16)
    expected = torch.zeros(16, 16, dtype=dtype)
    expected[:12, :8] = x[8:, 16:] * 2
    assert_bitwise(out, expected)
    assert_bitwise(clipped, expected[:12])


# --- the language around it


@triton.jit
def _unknown_asm_kernel(out_ptr):
    value = tl.inline_asm_elementwise(
        "membar.cta; mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(out_ptr, value)


def test_unknown_inline_assembly_is_refused():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"no virtual effect is known .*membar\.cta"):
        interpret(_unknown_asm_kernel, out_ptr=out)
    assert_bitwise(out, torch.zeros(1, dtype=torch.int32))


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def _times_six(x, FACTOR: tl.constexpr = _THREE):
    return _double(x) * FACTOR


@triton.jit
def _language_kernel(x_ptr, out_ptr, count, EXTRA: tl.constexpr, SIZE: tl.constexpr = 16):
    """Global and default constexprs, nested functions of this and another module, loops."""
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = _times_six(tl.load(x_ptr + offs))
    step = 0
    while step < count:
        x += _THREE
        step += 1
    for _ in range(count):
        x += 1.0
    for index in tl.static_range(EXTRA):
        x += index
    if count == 2:
        x = -x
    elif count == 3:
        x = x * 1.0 + logistic(x) * 0.0
    left, right = split_columns(x.reshape(SIZE // 4, 4), SIZE // 4, 4)
    rows, cols = tl.arange(0, SIZE // 4)[:, None], tl.arange(0, 2)[None, :]
    places = tl.program_id(0) * SIZE + rows * 4 + cols
    tl.store(out_ptr + places, right)
    tl.store(out_ptr + places + 2, left)


def language_reference(x, count, extra):
    out = x * 6 + 4 * count + sum(range(extra))
    out = -out if count == 2 else out
    return out.view(-1, 2, 2).flip(1).reshape(-1)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_functions_loops_and_constexprs(count):
    x, out = torch.randint(-9, 9, (32,)).float(), torch.zeros(32)
    interpret(_language_kernel, grid=2, x_ptr=x, out_ptr=out, count=count, EXTRA=3)
    assert_bitwise(out, language_reference(x, count, 3))


def test_one_kernel_is_interpreted_and_compiled_in_any_order():
    x = torch.randint(-9, 9, (32,)).float()
    args = {"x_ptr": x, "count": 3, "EXTRA": 2}
    texts = []
    for _ in range(2):
        out = torch.zeros(32)
        interpret(_language_kernel, grid=2, out_ptr=out, **args)
        assert_bitwise(out, language_reference(x, 3, 2))
        texts.append(compile_for(_language_kernel, {**args, "out_ptr": out}).ptx.text)
    assert "st.global" in texts[0]
    assert texts[0] == texts[1]


def test_compiling_gives_the_same_code_after_interpreting():
    """Interpreting patches the methods of `tl.tensor` in this process."""
    tile = torch.zeros(16, 16, dtype=torch.bfloat16)
    acc = torch.zeros(16, 16)
    args = {"a_ptr": tile, "b_ptr": tile, "c_ptr": acc, "out_ptr": acc, "SIZE": 16}
    before = compile_for(_dot_kernel, args).ptx
    interpret(_dot_kernel, **args)
    assert compile_for(_dot_kernel, args).ptx.text == before.text
    assert "mma" in before


# --- no kernel knows of the interpreter

PACKAGE = Path(plait.__file__).parent
BRANCH = re.compile(r"interpret|is_cpu|device_type|environ", re.IGNORECASE)


def device_functions(text):
    """(name, code without docstring and comments) of every `@triton.jit` function."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef):
            continue
        if not any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            continue
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        yield node.name, ast.unparse(node)


def test_no_kernel_has_a_branch_for_the_interpreter():
    found = [
        (path.relative_to(PACKAGE), name, code)
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, code in device_functions(path.read_text())
    ]
    assert len(found) > 30
    assert not [f"{path}: {name}" for path, name, code in found if BRANCH.search(code)]


def test_a_branch_for_the_interpreter_would_be_found():
    text = '@triton.jit\ndef f(x, IS_CPU: tl.constexpr):\n    "interpreter"\n    return x\n'
    assert BRANCH.search(dict(device_functions(text))["f"])
    assert not BRANCH.search(dict(device_functions(text.replace("IS_CPU", "BLOCK")))["f"])
