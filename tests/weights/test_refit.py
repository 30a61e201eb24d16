"""New weights into a model that runs: the bits of a fresh one, the same memory, and no use of it in between."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp8moe
from fp8moe import FP8Linear, GroupedExperts, RefitReport, quantize_128x128, refit, refitting
from fp8moe.weights import CheckpointError
from tests.small_checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, Model, bits, expected_fp8, same, unquantized, write

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    "mixtral": {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 4, "num_key_value_heads": 2},
    "qwen3_moe": {
        **{"hidden_size": 128, "moe_intermediate_size": 96, "intermediate_size": 96, "num_experts": 4},
        **{"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True},
    },
    "deepseek_v3": {"hidden_size": 128},
}
CLOSED = "the model's weights are being replaced by fp8moe.refit"
TINY = {"num_hidden_layers": 1, "num_local_experts": 2, "hidden_size": 32, "intermediate_size": 32}
ANOTHER_THREAD = "another thread"
GATE, UP, DOWN = (f"layers.0.experts.1.{name}_proj.weight" for name in ("gate", "up", "down"))


def tensors_of(directory):
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def fused(tensors, gate_up="gate_up_proj", down="down_proj"):
    """The small model's tensors with fused experts, under these names."""
    result = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(2):
        experts = f"layers.{layer}.experts"
        gates, ups, downs = (
            torch.stack([tensors[f"{experts}.{expert}.{name}_proj.weight"] for expert in range(EXPERTS)])
            for name in ("gate", "up", "down")
        )
        result |= {f"{experts}.{gate_up}": torch.cat([gates, ups], 1), f"{experts}.{down}": downs}
    return result


def expected_state(tensors):
    """The small model's state dict, quantized by itself."""
    model, state = Model(), expected_fp8(fused(tensors), "float32")
    return {name: state[name] for name in model.state_dict()}


def opened(model):
    return not model._forward_pre_hooks


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    """Two checkpoints of one architecture, each unquantized and in FP8."""
    transformers_models = pytest.importorskip("tests.transformers_models")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp(request.param)
    options = SHAPES[request.param]
    options = transformers_models.MLA | options if request.param == "deepseek_v3" else options
    base = transformers_models.BASE | {"initializer_range": 0.2} | options
    model = transformers_models.random_model(request.param, base, dtype=torch.bfloat16)
    first = transformers_models.write_checkpoints(model, folder / "first")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return first, transformers_models.write_checkpoints(model, folder / "second")


def test_a_model_of_transformers_gets_the_bits_of_a_fresh_one(pair):
    from fp8moe.decode import GraphDecoder
    from fp8moe.hf import load_model

    (old, _), (new, new_fp8) = pair
    model, fresh = load_model(pair[0][1]), load_model(new_fp8)
    decoder = GraphDecoder(model, max_length=32)
    ids = torch.arange(3, 9)[None]
    prefix = decoder.prefix(ids)
    generate = partial(decoder.generate, ids, max_new_tokens=8)
    before, expected = generate(), GraphDecoder(fresh, max_length=32).generate(ids, max_new_tokens=8)
    assert not torch.equal(before, expected)
    addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}

    tensors = [*tensors_of(new).items()]
    random.Random(0).shuffle(tensors)
    report = refit(model, iter(tensors))
    assert report.left == () and {*report.updated} <= {*model.state_dict()}
    same(model.state_dict(), fresh.state_dict())
    assert torch.equal(generate(), expected)
    with pytest.raises(ValueError, match="prefix: the model's weights were refitted since it was made: make it again"):
        generate(prefix=prefix)

    refit(model, old)
    assert torch.equal(generate(), before)
    refit(model, new_fp8)  # codes and scales as they are
    same(model.state_dict(), fresh.state_dict())
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == addresses

    with refitting(model):
        for call in (generate, lambda: model(ids), lambda: model.generate(ids, max_new_tokens=2)):
            with pytest.raises(RuntimeError, match=CLOSED):
                call()
        with pytest.raises(RuntimeError, match=CLOSED):
            next(decoder.run([{"input_ids": ids[0], "max_new_tokens": 2}]))
        refit(model, old)
    assert torch.equal(generate(), before)


def masters(tensors):
    """A module that trains with the small model's names and these values."""
    model = Model()
    for layer in model.layers:
        layer.q_proj = FP8Linear(HIDDEN, 200, master_dtype=torch.float32)
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
        layer.experts = GroupedExperts(**sizes, master_dtype=torch.bfloat16)
    model.load_state_dict(fused(tensors))
    return model


@pytest.mark.parametrize(
    "source",
    [
        lambda tensors, folder: tensors.items(),
        lambda tensors, folder: tensors,
        lambda tensors, folder: fused(tensors),
        lambda tensors, folder: fused(tensors, "w13_weight", "w2_weight"),
        lambda tensors, folder: expected_state(tensors),
        lambda tensors, folder: reversed(expected_state(tensors).items()),
        lambda tensors, folder: write(folder, tensors, shards=2),
        lambda tensors, folder: str(write(folder, expected_state(tensors))),
        lambda tensors, folder: masters(tensors),
    ],
    ids=["pairs", "mapping", "fused", "vllm", "fp8", "scales first", "directory", "fp8 directory", "masters"],
)
def test_sources(source, tmp_path):
    tensors, model = unquantized(3), Model()
    addresses = [value.data_ptr() for value in model.state_dict().values()]
    report = refit(model, source(tensors, tmp_path))
    assert report == RefitReport(tuple(model.state_dict()), ())
    same(model.state_dict(), expected_state(tensors))
    assert [value.data_ptr() for value in model.state_dict().values()] == addresses


def test_scales_of_channels_and_biases():
    model, other = (Model(weight_scales="channel") for _ in range(2))
    refit(model, unquantized(1).items())
    for layer in model.layers:
        assert layer.q_proj.weight_scale_inv.shape == (200, 1)
    values = fp8moe.dequantize((model.layers[0].experts.down_proj, model.layers[0].experts.down_proj_scale_inv))
    wanted = fused(unquantized(1))["layers.0.experts.down_proj"].float()
    assert ((values - wanted).norm() / wanted.norm()) < 0.04
    refit(
        other, {name.replace("weight_scale_inv", "weight_scale"): value for name, value in model.state_dict().items()}
    )
    same(other.state_dict(), model.state_dict())


def test_a_part_of_a_model():
    model, tensors = Model(), unquantized(2)
    refit(model, unquantized(1))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    report = refit(model, {DOWN: tensors[DOWN]}, strict=False)
    assert report.updated == ("layers.0.experts.down_proj", "layers.0.experts.down_proj_scale_inv")
    assert "layers.0.experts.0.down_proj.weight" in report.left and DOWN not in report.left
    data = expected_state(tensors)["layers.0.experts.down_proj"]
    experts = model.layers[0].experts
    assert torch.equal(bits(experts.down_proj[1]), bits(data[1]))
    assert torch.equal(bits(experts.down_proj[0]), bits(kept["layers.0.experts.down_proj"][0]))
    assert opened(model)


def test_pieces():
    model, tensors = Model(), unquantized(3)
    names = [*tensors]
    with refitting(model, names=names):
        first = refit(model, {name: tensors[name] for name in names[:5]})
        second = refit(model, [(name, tensors[name]) for name in names[5:]])
    assert not {*first.updated} & {*second.updated} and not second.left and first.left
    same(model.state_dict(), expected_state(tensors))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop(DOWN), f"{DOWN}: missing"),
        (lambda t: t.pop("steps"), "steps: missing"),
        (lambda t: t.update(no=t[UP]), "no: unknown, the model has no such tensor"),
        (lambda t: t.update({UP: t[UP][:5]}), rf"{UP}: shape \(5, 144\), expected \(72, 144\)"),
        (lambda t: t.update({UP: t[UP].double()}), f"{UP}: dtype F64, expected F8_E4M3, BF16, F16 or F32"),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), f"{UP}_scale_inv: missing"),
        (lambda t: t.update(steps=torch.ones(())), "steps: dtype F32, expected torch.int64"),
        (lambda t: t["layers.0.gate.weight"][0].fill_(torch.inf), "layers.0.gate.weight: holds a NaN or an infinity"),
        (lambda t: t[GATE][3, 3].fill_(torch.nan), f"{GATE}: holds a NaN or an infinity"),
        (lambda t: t.update({"layers.0.experts.gate_up_proj": torch.ones(3, 144, 144)}), "came before, as"),
        (lambda t: t.update({f"{UP}_scale_inv": torch.ones(1, 2)}), f"{UP}_scale_inv: came before, as {UP}"),
        (lambda t: t.update({UP: None}), f"{UP}: expected a tensor, got"),
        (lambda t: t.update({UP: t[UP].to("meta")}), f"{UP}: has no data, on the meta device"),
    ],
)
def test_what_is_wrong_is_named_and_closes_the_model(change, sentence):
    model, tensors = Model(), unquantized(1)
    wrong = unquantized(2)
    change(wrong)
    with pytest.raises((ValueError, TypeError), match=sentence):
        refit(model, wrong.items())
    for call in (lambda: model.layers[0].q_proj(torch.ones(1, HIDDEN)), lambda: model(1)):
        with pytest.raises(RuntimeError, match=CLOSED):
            call()
    with pytest.raises(ValueError, match="missing"):  # a part does not mend it
        refit(model, {DOWN: tensors[DOWN]}.items(), strict=False)
    refit(model, tensors.items())
    assert opened(model)
    same(model.state_dict(), expected_state(tensors))


def test_a_name_twice():
    model, tensors = Model(), unquantized(1)
    with pytest.raises(ValueError, match=f"{UP}: came before$"):
        refit(model, [*tensors.items(), (UP, tensors[UP])])


def test_codes_need_their_scale_and_scales_are_positive():
    model, state = Model(), expected_state(unquantized(1))
    name = "layers.1.q_proj.weight"
    with pytest.raises(ValueError, match=f"{name}: came in FP8 without its scale"):
        refit(model, {name: state[name]}.items(), strict=False)
    state[f"{name}_scale_inv"][0, 0] = 0
    with pytest.raises(ValueError, match=f"{name}_scale_inv: holds a NaN or an infinity, or scales that are not"):
        refit(model, state)
    state = expected_state(unquantized(1))
    state[name].view(torch.uint8)[0, 0] = 255
    with pytest.raises(ValueError, match=f"{name}: holds a NaN"):
        refit(model, state)


def test_tied_tensors():
    model, tensors = Model(tied=True), unquantized(1)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    report = refit(model, tensors)
    assert "lm_head.weight" not in report.updated and not report.left
    refit(model, {name: value for name, value in tensors.items() if name != "embed_tokens.weight"})
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="lm_head.weight: differs from another tensor that came, but the model ties"):
        refit(model, tensors)


def test_names_are_judged_before_anything_is_written():
    model, tensors = Model(), unquantized(1)
    refit(model, tensors)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    names = [*tensors]
    for wrong, sentence in (
        ([*names, "no"], "no: unknown"),
        ([*names, UP], f"{UP}: came before"),
        (names[1:], f"{names[0]}: missing"),
    ):
        with (
            pytest.raises(ValueError, match=f"cannot refit, the model is unchanged: .*{sentence}"),
            refitting(model, names=wrong),
        ):
            raise AssertionError
    with pytest.raises(ValueError, match="cannot refit, the model is unchanged: no: unknown"):
        refit(model, tensors | {"no": tensors[UP]})
    assert opened(model)
    same(model.state_dict(), kept)
    with pytest.raises(ValueError, match="other: is not among the names"), refitting(model, names=names):
        refit(model, [("other", tensors[UP])])
    assert not opened(model)


def test_a_directory_that_cannot_be_read_leaves_the_model_open(tmp_path):
    model = Model()
    with pytest.raises(CheckpointError, match="no such directory"):
        refit(model, tmp_path / "none")
    assert opened(model)


def test_arguments():
    for source in (None, 3, torch.ones(2)):
        with pytest.raises(TypeError, match="tensors: expected pairs of a name and a tensor, a mapping, a module or"):
            refit(Model(), source)
    with pytest.raises(TypeError, match="tensors: expected pairs of a name and a tensor, got"):
        refit(Model(), [3])
    with pytest.raises(TypeError, match="model: expected an nn.Module, got"):
        refit({}, {})
    with pytest.raises(TypeError, match="names: expected an iterable of names, got"), refitting(Model(), names="x"):
        raise AssertionError


def test_one_refit_at_a_time():
    model, tensors, errors = Model(), unquantized(1), []

    def other():
        try:
            refit(model, tensors)
        except RuntimeError as error:
            errors.append(str(error))

    with refitting(model):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with (
            pytest.raises(RuntimeError, match="model: another refit of it is under way; end that one first"),
            refitting(model),
        ):
            raise AssertionError
        refit(model, tensors)
    assert errors == ["model: another refit of it is under way; end that one first"]
    same(model.state_dict(), expected_state(tensors))


def test_copies_of_the_weights_follow():
    """The layer beside experts of transformers, latent attention's weight, and scales in float32."""
    pytest.importorskip("transformers")
    from fp8moe.hf import register
    from fp8moe.hf.experts import cached_layer
    from tests.transformers_models import BASE, modules_named, random_model

    register()
    options = BASE | SHAPES["mixtral"]
    model = random_model("mixtral", options, dtype=torch.bfloat16, experts_implementation="fp8moe")
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        model(ids)
        layer = cached_layer(modules_named(model, "experts")[0])
        address, before = layer.gate_up_proj.data_ptr(), layer.gate_up_proj.clone()
        tensors = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
        refit(model, tensors.items())
        assert layer.gate_up_proj.data_ptr() == address and not torch.equal(bits(layer.gate_up_proj), bits(before))
        assert cached_layer(modules_named(model, "experts")[0]) is layer
        logits = model(ids).logits
        other = random_model("mixtral", options, dtype=torch.bfloat16, experts_implementation="fp8moe")
        other.load_state_dict(tensors)
        assert torch.equal(logits, other(ids).logits)


def faults(tensors, chance):
    """Pairs with one fault, which may stand where another thread is to refit the model."""
    items = [*tensors.items()]
    chance.shuffle(items)
    index = chance.randrange(len(items))
    name, value = items[index]
    kind = chance.choice(["missing", "twice", "misshapen", "unknown", "nan", "exception", "thread"])
    if kind == "missing":
        del items[index]
    elif kind == "twice":
        items.insert(chance.randrange(len(items)), (name, value))
    elif kind == "misshapen":
        items[index] = name, value[:-1] if value.dim() == 1 else value[:, :-1]
    elif kind == "unknown":
        items[index] = f"{name}.other", value
    elif kind == "nan":
        value = value.clone()
        value.view(-1)[chance.randrange(value.numel())] = chance.choice([torch.nan, torch.inf, -torch.inf])
        items[index] = name, value
    else:
        items[index] = None if kind == "exception" else ANOTHER_THREAD
    return items


def given(items, chance):
    """In one to three pieces."""
    cuts = sorted(chance.randrange(len(items) + 1) for _ in range(chance.randrange(3)))
    return [items[first:last] for first, last in zip([0, *cuts], [*cuts, len(items)], strict=True)]


@pytest.fixture(scope="module")
def tiny():
    """A decoder of a small mixture in FP8, and two lots of weights for it."""
    pytest.importorskip("transformers")
    from fp8moe.decode import GraphDecoder
    from tests.decode_models import tiny_mixtral

    model, sources = tiny_mixtral(**TINY), []
    for _ in range(2):
        sources.append({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    fp8moe.replace_linears(model)
    block = model.model.layers[0].mlp
    block.experts = GroupedExperts.from_experts(block.experts).eval()
    return GraphDecoder(model, max_length=32, fuse=False), sources


def test_sequences_that_had_begun_end_with_a_refit(tiny):
    decoder, sources = tiny
    model, ids = decoder.model, torch.arange(3, 9)[None]
    requests = [{"input_ids": ids[0], "max_new_tokens": count} for count in (2, 8)]
    for begin in (lambda: decoder.stream(ids, max_new_tokens=8), lambda: decoder.run(requests)):
        going = begin()
        next(going)
        with refitting(model):
            with pytest.raises(RuntimeError, match=CLOSED):
                next(going)
            refit(model, sources[0])
        going = begin()
        next(going)
        refit(model, sources[1])
        with pytest.raises(RuntimeError, match="were refitted since these sequences began: generate them again"):
            next(going)
    decoder.generate(ids, max_new_tokens=2)


def test_no_answer_comes_of_a_step_that_a_refit_interrupts(tiny):
    """Of another thread, which begins after the step was allowed: here of this thread, in a forward."""
    decoder, sources = tiny
    model, ids = decoder.model, torch.arange(3, 9)[None]
    how = {"max_new_tokens": 3}

    @contextmanager
    def refit_in_forward(number):
        def count(*call):
            calls.append(call)
            if len(calls) == number:
                refit(model, sources[0])

        calls, hook = [], model.lm_head.register_forward_pre_hook(count)
        yield
        hook.remove()
        assert len(calls) == number

    for call in (
        lambda: decoder.generate(ids, **how),
        lambda: [*decoder.stream(ids, **how)],
        lambda: [*decoder.run([{"input_ids": ids[0], **how}])],
    ):
        with refit_in_forward(3), pytest.raises(RuntimeError, match="were refitted since these sequences began"):
            call()
    with refit_in_forward(1):
        prefix = decoder.prefix(ids)
    with pytest.raises(ValueError, match="prefix: the model's weights were refitted since it was made"):
        decoder.generate(ids, prefix=prefix, **how)


def test_no_model_runs_after_a_refit_that_failed(tiny):
    decoder, sources = tiny
    model, ids, chance = decoder.model, torch.arange(3, 6)[None], random.Random(0)
    generate = partial(decoder.generate, ids, max_new_tokens=2, return_logprobs=True)
    wanted = []
    for source in sources:
        refit(model, source)
        wanted.append(generate()[1])
    assert not torch.equal(*wanted)
    pool = ThreadPoolExecutor(1)
    for trial in range(200):
        with pytest.raises((ValueError, TypeError, RuntimeError)), refitting(model):
            for piece in given(faults(sources[trial % 2], chance), chance):
                if ANOTHER_THREAD in piece:
                    pool.submit(refit, model, sources[trial % 2]).result()
                refit(model, piece)
        for call in (generate, lambda: model(ids)):
            with pytest.raises(RuntimeError, match=CLOSED):
                call()
        refit(model, sources[trial % 2].items())
        if trial % 10 == 0:
            assert torch.equal(generate()[1], wanted[trial % 2])
    assert torch.equal(generate()[1], wanted[1])


def test_experts_of_gpt_oss(tmp_path):
    """Its unquantized checkpoints have them in columns, with gate and up in turns."""
    pytest.importorskip("transformers")
    from fp8moe.hf import load_model
    from fp8moe.weights import quantize_checkpoint
    from tests.tiny_moe_models import MODELS

    theirs = MODELS["GptOssForCausalLM"].build(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8")
    fresh, model = (load_model(tmp_path / "fp8") for _ in range(2))
    for source in (tmp_path / "bf16", tensors_of(tmp_path / "bf16"), theirs, tmp_path / "fp8", fresh):
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        refit(model, source)
        same(model.state_dict(), fresh.state_dict())
    with pytest.raises(ValueError, match="F8_E4M3; refit GPT-OSS in FP8 from a directory or module"):
        refit(model, fresh.state_dict())
    refit(theirs, tmp_path / "bf16")
    stored = tensors_of(tmp_path / "bf16")
    same(theirs.state_dict(), {name: stored[name] for name in theirs.state_dict()})


def test_a_compiled_model():
    torch._dynamo.reset()
    model = nn.Sequential(FP8Linear(128, 128), torch.compile(nn.Linear(128, 4), backend="eager"))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(2, 128)
    weights = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 4)).state_dict()
    with torch.no_grad():
        before, _ = compiled(x), model(x)
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        with pytest.raises(ValueError, match="missing"):
            refit(compiled, [])
        for call in (compiled, model, model[1]):
            with pytest.raises(RuntimeError, match=CLOSED):
                call(x)
        assert refit(compiled, weights).updated == tuple(
            f"0.{key}" for key in ("weight", "weight_scale_inv", "bias")
        ) + (*("1.weight", "1.bias"),)
        assert torch.equal(compiled(x), model(x)) and not torch.equal(compiled(x), before)
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames


def test_copies_of_a_closed_model_are_closed():
    import copy

    model = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="missing"):
        refit(model, [])
    twin = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=CLOSED):
        twin["a"](torch.ones(2))
    refit(twin, nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert twin["a"](torch.ones(2)).shape == (2,)


def test_a_trainer_with_adapters(tiny):
    """Merged, under the names of the model without them, as docs/rl.md has it."""
    peft = pytest.importorskip("peft")
    from tests.decode_models import tiny_mixtral

    decoder, _ = tiny
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_mixtral(**TINY), config)
    with pytest.raises(ValueError, match="^tensors: .*lora_A.default.weight .* would be left out; .* merge_adapter"):
        refit(decoder.model, adapted)
    adapted.merge_adapter()
    assert not refit(decoder.model, adapted).left
    adapted.unmerge_adapter()
    found, name = decoder.model.state_dict(), "model.layers.0.self_attn.q_proj.weight"
    wanted = quantize_128x128(adapted.merge_and_unload().state_dict()[name])
    assert torch.equal(bits(found[name]), bits(wanted.data)) and torch.equal(found[f"{name}_scale_inv"], wanted.scale)
