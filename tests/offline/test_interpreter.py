"""The Triton kernels that Inductor writes for sm_90, run in Triton's interpreter against the oracle."""

import pytest
import torch

from te_inductor.lowerings.codegen.block_tiles import TILE
from te_inductor.lowerings.codegen.tiles import COLUMNS_ALONE
from te_inductor.recipes import Quantizer
from tests.bounds import assert_same_values
from tests.offline.harness import compile_to_cubin, generate
from tests.oracle import casts
from tests.support.contents import CONTENTS
from tests.support.interpreted import interpret

SIZES = {"two_way_cast": (80, 144), "two_way_cast_padded": (70, 137)}
BLOCKS = {
    "two_way_cast_block": (256, 384),
    "two_way_cast_block_padded": (20, 137),
    "two_way_cast_squares": (256, 384),
    "two_way_cast_squares_padded": (137, 70),
}
# The interpreter reduces in Python, element by element, half a minute for this one.
ROWS = {"rows apart": CONTENTS["rows apart"]}
CASES = [(case, size, "tensor", CONTENTS) for case, size in SIZES.items()]
CASES += [(case.replace("cast", "cast_rowwise"), size, "row", ROWS) for case, size in SIZES.items()]
CASES += [
    (case, size, "128x128" if "squares" in case else "1x128", ROWS if "padded" in case else CONTENTS)
    for case, size in BLOCKS.items()
]


@pytest.mark.quick("two_way_cast_padded", "two_way_cast_rowwise", "two_way_cast_block_padded", "two_way_cast_squares")
@pytest.mark.parametrize(("case", "size", "scope", "contents"), CASES, ids=[case for case, *_ in CASES])
def test_two_way_casts(case, size, scope, contents, tmp_path):
    [source] = generate(case, 90).sources
    inputs = {name: make(*size).to(torch.bfloat16) for name, make in contents.items()}
    results = interpret(source, [[x] for x in inputs.values()], tmp_path)
    for (name, x), (data, scale_inv, data_t, scale_inv_t) in zip(inputs.items(), results, strict=True):
        values, value, values_t, value_t = casts.quantize_rowcol(x, Quantizer("e4m3", scope=scope))
        assert torch.equal(scale_inv.double(), value) and torch.equal(scale_inv_t.double(), value_t), name
        assert_same_values(data, values)
        assert_same_values(data_t, values_t)


def test_long_rows(tmp_path):
    """A program holds a row that Inductor would find the amax of in two parts, with two kernels more."""
    generated = generate("long_rows", 90)
    [kernel] = generated.kernels
    assert kernel.tile == {"XBLOCK": 1, "num_warps": 16}
    some = ("rows apart", "nan and infinite")
    inputs = {name: CONTENTS[name](2, 9728).to(torch.bfloat16) for name in some}
    results = interpret(generated.sources[0], [[x] for x in inputs.values()], tmp_path)
    for (name, x), (data, scale_inv) in zip(inputs.items(), results, strict=True):
        values, value = casts.quantize(x, Quantizer("e4m3", power_2_scale=True, scope="row"))
        assert torch.equal(scale_inv.double(), value), name
        assert_same_values(data, values)


def test_a_matrix_of_heads(tmp_path):
    """One kernel, whose rows and columns are each two dimensions of the tensor."""
    generated = generate("two_way_cast_block_of_heads", 90)
    assert len(generated.kernels) == 1
    matrices = {name: make(256, 384).to(torch.bfloat16) for name, make in CONTENTS.items()}
    runs = [[matrix.view(4, 64, 3, 128).transpose(1, 2).contiguous()] for matrix in matrices.values()]
    results = interpret(generated.sources[0], runs, tmp_path)
    quantizer = Quantizer("e4m3", power_2_scale=True, scope="1x128")
    for (name, matrix), (data, scale_inv, data_t, scale_inv_t) in zip(matrices.items(), results, strict=True):
        values, value, values_t, value_t = casts.quantize_rowcol(matrix.abs(), quantizer)
        assert torch.equal(scale_inv.double(), value) and torch.equal(scale_inv_t.double(), value_t), name
        assert_same_values(data, values)
        assert_same_values(data_t, values_t)


@pytest.mark.quick("True")
@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_of_rows(transposed, tmp_path):
    """Note [Pairs of rows]: 16 bits are stored, which hardware transposes in shared memory."""
    generated = generate("cast_of_three_transposed" if transposed else "cast_of_three", 90)
    [kernel] = generated.kernels
    assert kernel.body.count("tl.pointer_type(tl.uint16)") == 1
    assert "ldmatrix" in compile_to_cubin(kernel, 90, tmp_path).asm["ptx"]
    contents = {name: make(80, 144).to(torch.bfloat16) for name, make in CONTENTS.items()}
    others, scale = [torch.randn(80, 144).bfloat16() for _ in range(2)], torch.tensor(448 / 3)
    runs = [[*others, x, scale] for x in contents.values()]
    for x, copies in zip(contents.values(), interpret(generated.sources[0], runs, tmp_path), strict=True):
        chosen = torch.where(others[0] > others[1], x, x.abs())
        for found, given in zip(copies, (chosen.t(), chosen) if transposed else (chosen, chosen.t()), strict=True):
            assert_same_values(found, casts.quantize_known(given, scale.item(), Quantizer("e4m3"))[0])


@pytest.mark.quick("rows-row-1-48", "squares-128x128-0-128")
@pytest.mark.parametrize(
    ("case", "scope", "dim", "size"),
    [("rows", "row", 1, 48), ("blocks", "1x128", 1, 128), ("squares", "128x128", 0, 128)],
)
def test_pieces_side_by_side(case, scope, dim, size, tmp_path):
    """Each in its place, as one matrix of them all would be."""
    [source] = generate(f"pieces_of_{case}", 90).sources
    assert "aten.cat" not in source
    contents = [torch.randn, CONTENTS["rows apart"], torch.randn]
    sizes = [[size, size] for _ in contents]
    sizes[1][dim] *= 2
    pieces = [make(*size).to(torch.bfloat16) for make, size in zip(contents, sizes, strict=True)]
    [(data, scale_inv, data_t, scale_inv_t)] = interpret(source, [pieces], tmp_path)
    values, value, values_t, value_t = casts.quantize_rowcol(
        torch.cat(pieces, dim).abs(), Quantizer("e4m3", scope=scope)
    )
    assert torch.equal(scale_inv.double(), value) and torch.equal(scale_inv_t.double(), value_t)
    assert_same_values(data, values)
    assert_same_values(data_t, values_t)


@pytest.mark.quick("rows_of_blocks_inference-5")
@pytest.mark.parametrize(("case", "rows"), [("rows_of_blocks", 128), ("rows_of_blocks_inference", 5)])
def test_a_row_copy_of_blocks_in_the_kernel_that_reduces_rows(case, rows, tmp_path):
    """Note [Rows that hold blocks]: one kernel, a row a program, of 2048 elements of which the row has 1280."""
    generated = generate(case, 90)
    [kernel] = generated.kernels
    assert "R0_BLOCK: tl.constexpr = 2048" in kernel.body and kernel.tile["XBLOCK"] == 1
    assert kernel.body.count("tl.load(") == 1 and kernel.body.count("tl.store(") == 2
    compile_to_cubin(kernel, 90, tmp_path)
    check_rows_of_blocks(generated.sources[0], rows, tmp_path)


@pytest.mark.thorough
def test_a_row_copy_of_blocks_of_any_number_of_rows(tmp_path):
    """The copy is made by tiles, as what reduces another tensor holds no rows of this one: the last is cut off."""
    generated = generate("rows_of_blocks_of_another", 90)
    [kernel] = [kernel for kernel in generated.kernels if "tl.float8" in kernel.body]
    assert kernel.tile["XBLOCK"] == kernel.tile["YBLOCK"] == TILE
    compile_to_cubin(kernel, 90, tmp_path)
    check_rows_of_blocks(generated.sources[0], 200, tmp_path, of_another=True)


def check_rows_of_blocks(source, rows, folder, of_another=False):
    runs = [[make(rows, size).to(torch.bfloat16) for size in (1280, 384)] for make in CONTENTS.values()]
    results = interpret(source, runs, folder)
    for name, (x, y), (data, scale_inv) in zip(CONTENTS, runs, results, strict=True):
        wide = x.float()
        centred = wide - (y.float() if of_another else wide).amax(1, keepdim=True)
        values, value = casts.quantize(centred, Quantizer("e4m3", scope="1x128"))
        assert torch.equal(scale_inv.double(), value), name
        assert_same_values(data, values)


def test_a_column_copy_of_blocks_alone(tmp_path):
    generated = generate("columns_of_blocks", 90)
    [kernel] = generated.kernels
    wide, warps = COLUMNS_ALONE
    assert kernel.tile == {"XBLOCK": wide, "YBLOCK": TILE, "num_warps": warps}
    assert kernel.body.count("tl.pointer_type(tl.uint16)") == 1 and kernel.body.count("tl.store(") == 2
    assert "ldmatrix" in compile_to_cubin(kernel, 90, tmp_path).asm["ptx"]
    contents = {name: make(256, 384).to(torch.bfloat16) for name, make in CONTENTS.items()}
    results = interpret(generated.sources[0], [[x] for x in contents.values()], tmp_path)
    for (name, x), (data, scale_inv) in zip(contents.items(), results, strict=True):
        values, value = casts.quantize(x.abs().t(), Quantizer("e4m3", scope="1x128"))
        assert torch.equal(scale_inv.double(), value), name
        assert_same_values(data, values)


def test_a_row_copy_of_squares(tmp_path):
    generated = generate("row_cast_squares", 90)
    assert len(generated.kernels) == 1
    x = CONTENTS["rows apart"](256, 384).to(torch.bfloat16)
    [(data, scale_inv)] = interpret(generated.sources[0], [[x]], tmp_path)
    values, value = casts.quantize(x, Quantizer("e4m3", scope="128x128"))
    assert torch.equal(scale_inv.double(), value)
    assert_same_values(data, values)


@pytest.mark.thorough
def test_a_columnwise_cast_of_blocks(tmp_path):
    [source] = generate("columnwise_cast_block", 90).sources
    x = CONTENTS["rows apart"](130, 20).to(torch.bfloat16)
    [(data, scale_inv)] = interpret(source, [[x]], tmp_path)
    values, value = casts.quantize(x.t(), Quantizer("e4m3", scope="1x128"))
    assert torch.equal(scale_inv.double(), value)
    assert_same_values(data, values)
