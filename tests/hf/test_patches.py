"""The table of what fp8moe replaces in transformers: register puts all of it there, unregister takes all of it back."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch

from fp8moe.decode import GraphDecoder
from fp8moe.hf import optimize, patches, register, unregister
from tests.transformers_indexers import FEW, make_model
from tests.transformers_models import BASE, TOKENS, modules_named, prompts, random_model

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread", "registered")

TABLE = patches.REGISTERED + patches.MASKS + patches.TRAINING
SHAPE = BASE | {"hidden_size": 128, "max_position_embeddings": 64, "initializer_range": 0.03}


def there(patch):
    """What is in the place of a patch, and what a user of the owner finds: of a base class, maybe."""
    owner = patch.owner
    if hasattr(owner, "_global_mapping"):
        return (owner._global_mapping.get(patch.name),) * 2
    return vars(owner).get(patch.name), getattr(owner, patch.name, None)


def same(found, expected):
    """By identity, of bound methods by their function."""
    return all(
        getattr(one, "__func__", one) is getattr(other, "__func__", other)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.fixture
def unregistered():
    unregister()


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens).logits


def mixtral(**changes):
    sizes = {"intermediate_size": 256, "num_local_experts": 4, "num_key_value_heads": 2}
    model = random_model("mixtral", SHAPE | sizes | changes, dtype=torch.bfloat16)
    model.set_experts_implementation("fp8moe")
    return model


def test_the_table_says_what_it_replaces_and_why():
    assert len({patch.what for patch in TABLE}) == len(TABLE)
    assert all(patch.why and patch.until for patch in TABLE)


def test_no_other_file_writes_there():
    package = Path(patches.__file__).parents[1]
    for path in package.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom | ast.Import)]
        theirs = {
            (alias.asname or alias.name).partition(".")[0]
            for node in imports
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).startswith("transformers")
        }
        for node in nodes:
            of_names = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in theirs
            assert not (of_names and isinstance(node.ctx, ast.Store | ast.Del)), f"{path}:{node.lineno}"


def test_all_are_taken_back(unregistered):
    theirs = {patch: there(patch) for patch in TABLE if patch.applies()}
    for _ in range(2):
        register()
        patches.take_offsets_of_rows()
        ours = {patch: there(patch) for patch in theirs}
        for patch, found in ours.items():
            assert found[0] is not None and not same(found, theirs[patch]), patch.name
            assert not hasattr(getattr(found[1], "__wrapped__", None), "_fp8moe"), patch.name
        register()
        patches.take_offsets_of_rows()
        assert all(same(there(patch), found) for patch, found in ours.items())
        for _ in range(2):
            unregister()
            assert all(same(there(patch), found) for patch, found in theirs.items())
            assert not any(patch.name == "fp8moe" and there(patch)[0] for patch in theirs)


@pytest.mark.parametrize("patch", [patch for patch in TABLE if patch.applies()], ids=lambda patch: patch.name)
def test_what_others_have_wrapped_is_left_to_them(patch):
    patches.take_offsets_of_rows()
    before = {each: there(each) for each in TABLE if each.applies()}
    ours = before[patch][0]

    def theirs(*arguments, **options):
        return ours(*arguments, **options)

    patches._put(patch, theirs)
    try:
        with pytest.raises(RuntimeError, match=f"^unregister: {patch.what.replace(':', '.')} is no longer"):
            unregister()
        assert there(patch)[0] is theirs
        assert all(same(there(each), found) for each, found in before.items() if each is not patch)
    finally:
        patches._put(patch, ours)


# Models that exist.


@pytest.mark.parametrize("fused", [False, True])
def test_experts_of_models_that_exist_stay_on_fp8moe(fused):
    model = mixtral()
    if fused:
        optimize(model)
    expected = logits(model)
    unregister()
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected)
    with torch.no_grad():
        modules_named(model, "experts")[0].down_proj.zero_()
    assert not torch.equal(logits(model), expected), "weights that change are noticed as before"


def test_a_model_that_changes_to_another_implementation_does():
    model, other = mixtral(), mixtral()
    other.set_experts_implementation("eager")
    unregister()
    model.set_experts_implementation("eager")
    assert torch.equal(logits(model), logits(other))
    with pytest.raises(ValueError, match="fp8moe"):
        model.set_experts_implementation("fp8moe")
    register()
    model.set_experts_implementation("fp8moe")
    assert torch.equal(logits(model), logits(mixtral()))


def test_hooks_of_accelerate_keep_fp8moe():
    hooks = pytest.importorskip("accelerate.hooks")
    model = mixtral()
    expected = logits(model)
    hooked, unhooked = modules_named(model, "experts")
    for module in (hooked, unhooked):
        hooks.add_hook_to_module(module, hooks.ModelHook())
    hooks.remove_hook_from_module(unhooked)
    unregister()
    assert torch.equal(logits(model), expected)
    hooks.remove_hook_from_module(hooked)
    assert torch.equal(logits(model), expected)


def test_new_models_cannot_choose_it(unregistered):
    with pytest.raises(ValueError, match="fp8moe"):
        mixtral()


def test_fp8_linears_are_transformers_again(unregistered, monkeypatch):
    from transformers.integrations import finegrained_fp8

    linear = finegrained_fp8.FP8Linear(128, 128, block_size=(128, 128)).requires_grad_(False)
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", lambda *_, **__: "theirs")
    assert linear(torch.ones(2, 128)) == "theirs"


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_of_indexers_ends_with_an_error(static):
    model = make_model(FEW)
    kind, options = (transformers.StaticCache, {"max_cache_len": 40}) if static else (transformers.DynamicCache, {})
    cache = kind(config=model.config, **options)
    with torch.no_grad():
        model(prompts(), past_key_values=cache)
        unregister()
        with pytest.raises(RuntimeError):
            model(prompts()[:, :1], past_key_values=cache)
        model(prompts(), past_key_values=kind(config=model.config, **options))


def test_decoders_go_on():
    model = mixtral()
    decoder = GraphDecoder(model, batch_sizes=(2,), max_length=40)
    requests = [{"input_ids": TOKENS[0, :length], "max_new_tokens": 6} for length in (3, 7, 5)]
    expected = dict(decoder.run(requests))
    unregister()
    found = dict(decoder.run(requests))
    assert all(torch.equal(found[index], tokens) for index, tokens in expected.items())
