"""Options, mode, environment: what is accepted has an effect, what is wrong is named with the nearest right one."""

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor

import te_inductor
from te_inductor import accuracy_report, config, errors, explain, list_options, recipes
from te_inductor.backend import te
from te_inductor.command import doctor
from tests.forked import PLAIN
from tests.house import nodes


def compiled(**options):
    return torch.compile(torch.nn.Linear(32, 32), backend="te", options=options)


def recipe_of(model, **options) -> str:
    return explain(model, torch.randn(4, 32), options=options).sites[0].recipe


def failure(**options) -> str:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(**options)(torch.randn(4, 32))
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "found", "remedy"),
    [
        ({"recpie": "current"}, "unknown option 'recpie'", "did you mean 'recipe'?"),
        ({"max_autotun": True}, "unknown option 'max_autotun'", "did you mean 'max_autotune'?"),
        (
            {"precision": "fp8"},
            "unknown option 'precision'",
            "expected one of amax_group, attention, backward, batch_invariant, fallback, guard, logits, mode, policy,"
            " recipe, saved, weights, wgrad; other",
        ),
        ({"recipe": "curent"}, "unknown recipe 'curent'", "did you mean 'current'?"),
        (
            {"recipe": "zzz"},
            "unknown recipe 'zzz'",
            "expected one of auto, block, current, delayed, mxfp4, mxfp8, none, nvfp4, nvfp4_weight_only, rowwise",
        ),
        (
            {"recipe": 8},
            "recipe is an int (8)",
            "expected a Recipe instance or one of auto, none, delayed, current, rowwise, block, mxfp8, mxfp4, nvfp4",
        ),
        ({"recipe": "row-wise"}, "unknown recipe 'row-wise'", "did you mean 'rowwise'?"),
        ({"recipe": object}, "recipe is a type", "expected a Recipe instance"),
        ({"recipe": "fp8"}, "unknown recipe 'fp8'", "FP8 with one scale a tensor is 'current'"),
        (
            {"recipe": "Float8CurrentScaling"},
            "unknown recipe 'Float8CurrentScaling'",
            "its name is 'current', or pass an instance: recipes.Float8CurrentScaling()",
        ),
        (
            {"recipe": recipes.DelayedScaling},
            "recipe is the class DelayedScaling",
            "expected an instance: DelayedScaling()",
        ),
        (
            {"policy": ["lm_head"]},
            "option 'policy' is a list",
            "expected a dict of {module-path glob or function: recipe}",
        ),
        (
            {"policy": {3: "none"}},
            "a key of option 'policy' is an int (3)",
            "a module-path glob (a string) or a function",
        ),
        ({"policy": {"lm_head": "nine"}}, "unknown recipe 'nine'", "did you mean 'none'?"),
        ({"fallback": "wran"}, "unknown value of option 'fallback' 'wran'", "did you mean 'warn'?"),
        ({"fallback": 1}, "unknown value of option 'fallback' 1", "expected one of error, silent, warn"),
        ({"mode": "max-autotuned"}, "unknown mode 'max-autotuned'", "did you mean 'max-autotune'?"),
        ({"max_autotune": "yes"}, "Inductor option 'max_autotune' is a str ('yes')", "expected bool"),
    ],
)
def test_wrong_options_name_found_and_remedy(options, found, remedy):
    text = failure(**options)
    assert found in text and remedy in text, text


def test_a_recipe_of_an_unknown_class():
    class Mine:
        name = "current"

    text = failure(recipe=Mine())
    assert "recipe is a Mine" in text and "expected a Recipe instance" in text


def test_the_base_of_recipes_is_no_recipe():
    assert "Recipe is the base of recipes" in failure(recipe=recipes.Recipe())


@pytest.mark.parametrize("report", [explain, accuracy_report])
def test_reports_raise_the_error_itself(report):
    with pytest.raises(errors.OptionError, match="did you mean 'recipe'"):
        report(torch.nn.Linear(32, 32), torch.randn(4, 32), options={"recpie": "current"})
    with pytest.raises(errors.OptionError, match=r"the model is an int \(3\), expected an nn.Module or a function"):
        report(3, torch.randn(4, 32))
    with pytest.raises(errors.OptionError, match="raised ZeroDivisionError"):
        report(torch.nn.Linear(32, 32), torch.randn(4, 32), options={"policy": {lambda path, sizes: 1 / 0: "none"}})


def test_names_are_near_in_any_case():
    assert errors.unknown("x", "DELAYED", ["delayed", "none"]).endswith("did you mean 'delayed'?")
    assert errors.unknown("x", "te_recip", ["TE_RECIPE", "B"]).endswith("did you mean 'TE_RECIPE'?")
    assert errors.unknown("x", None, ["none", "once"]).endswith("expected one of none, once")


def test_an_option_that_is_none_is_not_given(monkeypatch):
    """Programs that have a flag for each option give None so."""
    given = dict.fromkeys(config.OWN_OPTIONS)
    assert config.parse(given) == config.parse()
    monkeypatch.setenv("TE_INDUCTOR_WEIGHTS", "once")
    monkeypatch.setenv("TE_INDUCTOR_POLICY", '{"0": "none"}')
    assert config.parse(given) == config.parse() and config.parse(given).weights == "once"


def test_a_misspelt_variable_is_named(monkeypatch):
    """Nothing else would say that a recipe was not taken from it."""
    model, x = torch.nn.Linear(32, 32), torch.randn(4, 32)
    monkeypatch.setenv("TE_INDUCTOR_RECIP", "delayed")
    text = "unknown environment variable 'TE_INDUCTOR_RECIP'; did you mean 'TE_INDUCTOR_RECIPE'?"
    with pytest.warns(errors.FallbackWarning, match=re.escape(text)):
        explain(model, x)
    with pytest.raises(errors.FallbackError, match=re.escape(text)):
        explain(model, x, options={"fallback": "error"})
    assert doctor._environment() == (doctor.BROKEN, text)


def test_mode_beside_another_mode():
    with pytest.raises(errors.OptionError, match="give one of them"):
        config.parse({"mode": "max-autotune"}, "reduce-overhead")


def test_the_default_recipe_comes_from_the_environment(monkeypatch):
    model = torch.nn.Linear(32, 32)
    assert recipe_of(model) == "current"
    monkeypatch.setenv("TE_INDUCTOR_RECIPE", "none")
    assert recipe_of(model) == "none"
    assert recipe_of(model, recipe="current") == "current"  # an option wins
    assert recipe_of(model, recipe="rowwise") == "rowwise"
    monkeypatch.setenv("TE_INDUCTOR_RECIPE", "curent")
    where = "recipe of the environment variable TE_INDUCTOR_RECIPE"
    assert f"unknown {where}: 'curent'; did you mean 'current'?" in failure()
    monkeypatch.setenv("TE_INDUCTOR_RECIPE", "fp8")
    assert f"unknown {where}: 'fp8'; FP8 with one scale a tensor is 'current'" in failure()


def test_every_option_comes_from_the_environment(monkeypatch):
    values = {
        "RECIPE": "rowwise",
        "POLICY": '{"b": "none", "a.*": "block"}',
        "BACKWARD": "dequantized",
        "FALLBACK": "silent",
        "WEIGHTS": "once",
        "WGRAD": "main_grad",
        "ATTENTION": "as_written",
        "LOGITS": "omit",
        "GUARD": "heal",
        "BATCH_INVARIANT": "true",
        "SAVED": '{"*.mlp": "low_precision", "*": "high_precision"}',
        "AMAX_GROUP": "none",
        "MODE": "max-autotune",
    }
    assert {f"TE_INDUCTOR_{name}" for name in values} == {option.variable for option in list_options()}
    for name, value in values.items():
        monkeypatch.setenv(f"TE_INDUCTOR_{name}", value)
    found = config.parse()
    assert (found.recipe, found.policy, found.fallback) == ("rowwise", (("b", "none"), ("a.*", "block")), "silent")
    assert found.saved == (("*.mlp", "low_precision"), ("*", "high_precision"))
    assert (found.weights, found.wgrad, found.amax_group, found.mode) == ("once", "main_grad", "none", "max-autotune")
    assert (found.backward, found.guard, found.batch_invariant) == ("dequantized", "heal", True)
    given = {"recipe": "block", "policy": {}, "fallback": "warn", "weights": "each_call", "wgrad": "grad"}
    found = config.parse(given | {"amax_group": "mine"}, "default")  # options win
    assert (found.recipe, found.policy, found.fallback) == ("block", (), "warn")
    assert (found.weights, found.wgrad, found.amax_group, found.mode) == ("each_call", "grad", "mine", "default")
    assert config.parse({"mode": "reduce-overhead"}).mode == "reduce-overhead"
    for name in values:
        monkeypatch.setenv(f"TE_INDUCTOR_{name}", "")
    assert config.parse() == dataclasses.replace(config.Options(), inductor={})


PAGE = Path(te_inductor.__file__).parents[1] / "docs" / "guides" / "options.md"


def cells(row: str) -> list[str]:
    """A row of a table, without its code marks and links."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row).replace("`", "")
    return [cell.strip() for cell in text.strip("| \n").split(" | ")]


def test_the_page_has_what_list_options_has():
    """A row may say more of a value behind a colon."""
    rows = [cells(line) for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    table = {row[0]: row[1:] for row in rows if len(row) == 4}
    assert list(table) == [option.name for option in list_options()]
    for option in list_options():
        values, default, price = table[option.name]
        assert default == (json.dumps(option.default) if isinstance(option.default, str) else str(option.default)), (
            option.name
        )
        assert price == option.price, option.name
        for value in option.choices or [option.values]:
            assert (f'"{value}"' if option.choices else value) in values, (option.name, value)
    variables = {row[0]: row[1] for row in rows if row[0].startswith("TE_INDUCTOR_") and len(row) == 2}
    assert set(variables) == {option.variable for option in list_options()} | {config.TABLES}
    for option in list_options():
        assert all(choice in variables[option.variable] for choice in option.choices), option.name


def test_the_types_of_options_are_those_that_are_read():
    assert set(te_inductor.CompileOptions.__annotations__) == set(config.OWN_OPTIONS)
    fields = {field.name: field.default for field in dataclasses.fields(config.Options)}
    assert {option.name: fields[option.name] or None for option in list_options()} == {
        option.name: option.default or None for option in list_options()
    }


def test_a_directory_of_what_is_public():
    """It lists what no use has loaded yet, too, and nothing else."""
    assert {name for name in dir(te_inductor) if not name.startswith("__")} | {"__version__"} == set(
        te_inductor.__all__
    )


def test_a_policy_of_the_environment_reaches_layers(monkeypatch):
    monkeypatch.setenv("TE_INDUCTOR_POLICY", '{"0": "none"}')
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    report = explain(model, torch.randn(4, 32))
    assert {site.fqn: site.recipe for site in report.sites} == {"0": "none", "1": "current"}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FALLBACK", "wran", "unknown value of environment variable TE_INDUCTOR_FALLBACK 'wran'; did you mean 'warn'?"),
        (
            "WEIGHTS",
            "twice",
            "unknown value of environment variable TE_INDUCTOR_WEIGHTS 'twice'; expected one of each_call",
        ),
        ("WGRAD", "main", "unknown value of environment variable TE_INDUCTOR_WGRAD 'main'; did you mean 'main_grad'?"),
        ("MODE", "max", "unknown value of environment variable TE_INDUCTOR_MODE 'max'; expected one of default"),
        ("POLICY", "lm_head", "environment variable TE_INDUCTOR_POLICY is no JSON (Expecting value"),
        ("POLICY", '["lm_head"]', "environment variable TE_INDUCTOR_POLICY is '[\"lm_head\"]'; expected a JSON object"),
        (
            "POLICY",
            '{"a": null}',
            "environment variable TE_INDUCTOR_POLICY gives 'a' the recipe null; expected a recipe's",
        ),
        ("POLICY", '{"a": "none", "a": "block"}', "environment variable TE_INDUCTOR_POLICY has 'a' twice"),
        (
            "POLICY",
            '{"a": "nine"}',
            "unknown recipe of the environment variable TE_INDUCTOR_POLICY: 'nine'; did you mean",
        ),
    ],
)
def test_wrong_values_of_the_environment_name_the_variable(name, value, text, monkeypatch):
    monkeypatch.setenv(f"TE_INDUCTOR_{name}", value)
    with pytest.raises(errors.TEInductorError) as raised:
        explain(torch.nn.Linear(32, 32), torch.randn(4, 32))
    assert text in str(raised.value)


def test_options_that_are_no_dict():
    run = torch.compile(torch.nn.Linear(32, 32), backend="te", options="current")
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match=r"options is a str \('current'\), expected a dict"
    ):
        run(torch.randn(4, 32))


def test_a_torch_that_is_too_old():
    """One line, and not the first name that it lacks."""
    program = "import torch; torch.__version__ = type(torch.__version__)('2.10.1'); import te_inductor"
    done = PLAIN.run("-c", program)
    assert done.stderr.splitlines()[-1].startswith(
        "ImportError: te_inductor needs torch 2.11 or later, found 2.10.1; pip"
    )


def test_inductor_options_and_mode_reach_inductor(monkeypatch):
    seen = {}

    def spy(gm, inputs, patches, wrap_inner, region=None):
        seen.update(patches)
        return gm.forward

    monkeypatch.setattr("te_inductor.compat.compile_fx", spy)
    compiled(**{"max-autotune": True, "epilogue_fusion": False})(torch.randn(4, 32))
    assert seen["max_autotune"] is True and seen["epilogue_fusion"] is False
    seen.clear()
    torch.compile(torch.nn.Linear(32, 32), backend="te", mode="max-autotune-no-cudagraphs")(torch.randn(4, 32))
    assert seen["max_autotune"] is True
    seen.clear()
    compiled(mode="reduce-overhead")(torch.randn(4, 32))
    assert seen["triton.cudagraphs"] is True


def test_a_users_own_graph_pass_still_runs():
    """Ours takes Inductor's `post_grad_custom_pre_pass`; a pass that stood there before runs first."""
    graphs = []
    with inductor.patch(post_grad_custom_pre_pass=graphs.append):
        compiled(recipe="current")(torch.randn(4, 32))
    assert graphs


def test_names_of_the_backend():
    assert "te" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("te") is te


def test_reset_reaches_the_backend(monkeypatch):
    calls = []
    monkeypatch.setattr(te, "reset", lambda: calls.append(1))
    compiled()(torch.randn(4, 32))
    torch._dynamo.reset()
    assert calls == [1]


def test_no_error_of_the_user_is_an_assert():
    """`python -O` drops those: outside of lowerings, asserts only tell type checkers what is no None."""
    for path, node in nodes(ast.Assert):
        operands = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        told = path.startswith("lowerings/") or all(ast.unparse(one).endswith(" is not None") for one in operands)
        assert told, f"{path}:{node.lineno}"
