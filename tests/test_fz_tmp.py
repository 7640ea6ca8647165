import random

import pytest

from tests.conftest import *
from tests.fuzz import *

R = random.Random(1)


def case(i):
    r = random.Random(i)
    return Case(
        steps=tuple(
            r.choice(
                [
                    ("experts", r.choice(WIDTHS), r.choice([1, 3, 8])),
                    ("linear", r.choice(WIDTHS), True),
                    ("checkpoint", (("experts", 64, 3),)),
                    ("amp", (("experts", 64, 3), ("linear", 32, False))),
                    ("region", r.choice(["rowwise", "none", "delayed", None]), (("experts", 128, 3),)),
                    ("residual", (("experts", 32, 3),)),
                ]
            )
            for _ in range(r.choice([1, 2, 3]))
        ),
        width=r.choice(WIDTHS),
        leading=r.choice(LEADING),
        recipe=r.choice([*SEVERAL, "none"]),
        policy=r.choice([(), (("*", "rowwise"),), (("0", "current"),), (("*weight", "mxfp8"),)]),
        dtype=r.choice(["float32", "bfloat16", "float16"]),
        mode=r.choice(["train", "train", "no_grad", "inference"]),
        x_grad=r.random() < 0.5,
        frozen=r.choice([0, 0, 2]),
        dynamic=r.random() < 0.4,
        weights=r.choice(["each_call", "once"]),
        wgrad=r.choice(["grad", "main_grad", "deferred"]),
        backwards=r.choice([1, 1, 2]),
        budget=r.choice([1.0, 0.5, 0.0]),
        breaks=r.choice([0, 0, 0, 1]),
        threads=1,
        copies=r.random() < 0.2,
        seed=i,
    )


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("i", range(60, 110))
def test_it(i):
    check(case(i))
