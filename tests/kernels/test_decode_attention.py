"""Attention over a static cache: one new token a row, its operator and kernel; what the rows of prompts see."""

import re
import threading

import pytest
import torch

from fp8moe.decode import attention
from fp8moe.decode.attention import AttentionMetadataBuilder
from fp8moe.decode.step import Capabilities, Step
from fp8moe.hf.fused import find_fused
from fp8moe.hf.fused.latent_attention import expands_latents
from fp8moe.hf.patches import take_offsets_of_rows
from fp8moe.kernels.decoder_ops import decode_attention as one_token
from fp8moe.kernels.decoder_ops import rotary
from fp8moe.kernels.decoder_ops.decode_attention import AttentionHeads, kernel_spec
from tests import decode_attention_cases
from tests.decode_models import kernels_in_float32
from tests.ptxas import without_spills
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

LENGTH, HEADS, WINDOW = 12, 2, 3
BEGIN = torch.tensor([0, 2, 5])


def config():
    return transformers.AutoConfig.for_model("mixtral", num_key_value_heads=HEADS)


def mask_function(window):
    return masking.sliding_window_causal_mask_function(window) if window else masking.causal_mask_function


def metadata_for(builder, new, window):
    sizes = {"batch_size": len(BEGIN), "q_length": new, "kv_length": LENGTH}
    with attention.used_by(model_of(config()), None, builder):
        how = {"mask_function": mask_function(window), "local_size": window, "config": config()}
        return attention.attention_metadata(**sizes, **how)


class model_of:
    def __init__(self, config):
        self.config = config


def shown(metadata, new, window):
    """(B, new, LENGTH): the columns that the kernel's contract shows for this metadata."""
    found = torch.zeros(len(BEGIN), new, LENGTH, dtype=torch.bool)
    for b in range(len(BEGIN)):
        begin, count = int(metadata.begin[b]), max(int(metadata.columns[b] + new - metadata.begin[b]), 0)
        if new > 1:
            assert metadata.sequences[:, b].tolist() == [b * new, b * HEADS * LENGTH + begin, count]
            assert metadata.sequences[0, b + 1] == (b + 1) * new
        for query in range(new):
            end = begin + count - new + query + 1
            low = begin if window is None else max(begin, end - window)
            found[b, query, low : max(low, end)] = True
    return found


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("columns", [[7, 7, 7], [0, 8, 5], [3, 3, 3]], ids=["together", "own", "amid padding"])
def test_visible_keys_are_those_of_transformers_mask(columns, new, window):
    columns = torch.tensor(columns)
    builder = AttentionMetadataBuilder(BEGIN, columns, LENGTH)
    take_offsets_of_rows()
    for _ in range(2):
        theirs = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            batch_size=len(BEGIN),
            q_length=new,
            kv_length=LENGTH,
            q_offset=columns,
            attention_mask=torch.arange(LENGTH) >= BEGIN[:, None],
            mask_function=mask_function(window),
            local_size=window,
        )
        ours = metadata_for(builder, new, window)
        assert ours.window == window and (new == 1) == (ours.sequences is None)
        assert torch.equal(shown(ours, new, window)[:, None], theirs)
        assert metadata_for(builder, new, window) is ours, "computed once a call"
        columns += 1  # in place, as a step does
        builder.next_call()


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("vmap", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_masks_with_an_offset_for_each_row(name, vmap, window):
    take_offsets_of_rows()
    mask = masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
    options = {"q_length": 4, "kv_length": LENGTH, "mask_function": mask_function(window), "use_vmap": vmap}
    options |= {"local_size": window, "allow_is_causal_skip": False, "dtype": torch.float32}
    padding = torch.arange(LENGTH) >= BEGIN[:, None]
    offsets = torch.tensor([0, 8, 5])
    ours = mask(batch_size=3, q_offset=offsets, attention_mask=padding, **options)
    for row, offset in enumerate(offsets.tolist()):
        theirs = mask(batch_size=1, q_offset=offset, attention_mask=padding[row : row + 1], **options)
        assert torch.equal(ours[row], theirs[0])


def test_other_offsets_go_to_transformers_own_masks():
    take_offsets_of_rows()
    mask = masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    options = {"batch_size": 2, "q_length": 4, "kv_length": 4, "mask_function": masking.causal_mask_function}
    assert mask(**options, q_offset=0) is None, "skipped as before"
    options |= {"q_length": 1, "allow_is_causal_skip": False}
    expected = masking.sdpa_mask(**options, q_offset=2)
    assert torch.equal(mask(**options, q_offset=torch.tensor(2)), expected)
    assert torch.equal(mask(*(2, 1, 4, 2), allow_is_causal_skip=False), expected)


def other_mask(*indices):
    return masking.causal_mask_function(*indices)


@pytest.mark.parametrize("changes", [{"use_vmap": True}, {"mask_function": other_mask}], ids=["overlay", "other"])
def test_other_masks_are_not_served(changes):
    arguments = {"batch_size": 1, "q_length": 1, "kv_length": LENGTH, "config": config()}
    arguments |= {"mask_function": masking.causal_mask_function}
    zero = torch.zeros(1, dtype=torch.int64)
    with attention.used_by(model_of(config()), None, AttentionMetadataBuilder(zero, zero + 1, LENGTH)):
        metadata = attention.attention_metadata(**arguments)
        assert (metadata.key_heads, metadata.length, metadata.new_tokens) == (HEADS, LENGTH, 1)
        with pytest.raises(attention.UnsupportedAttention, match="mask"):
            attention.attention_metadata(**arguments | changes)
        with pytest.raises(attention.UnsupportedAttention, match="outside of a decode step"):
            attention.attention_metadata(**arguments | {"batch_size": 2})
    with pytest.raises(attention.UnsupportedAttention, match="outside of a decode step"):
        attention.attention_metadata(**arguments)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"learnable_sink": torch.zeros(4)}, "learnable_sink"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"dtype": torch.float32}, "float32"),
        ({"size": 20}, "20 values"),
        ({"size": 264}, "264 values"),
        ({"value_size": 16}, "values"),
        ({"key_heads": 4}, "4 key heads"),
        ({"new": 2}, "visible of others"),
        ({"length": LENGTH - 1}, f"{LENGTH - 1} columns"),
    ],
)
@pytest.mark.parametrize("new", [1, 3])
def test_what_the_kernel_lacks_is_not_served(changes, named, new):
    options = {"dtype": torch.bfloat16, "size": 32, "value_size": None}
    options |= {"key_heads": HEADS, "length": LENGTH, "new": new}
    others = {name: value for name, value in changes.items() if name not in options}
    options |= changes
    query = torch.zeros(1, 4, options["new"], options["size"], dtype=options["dtype"])
    key = torch.zeros(1, options["key_heads"], options["length"], options["size"], dtype=options["dtype"])
    value = key[..., : options["value_size"]]
    zero = torch.zeros(1, dtype=torch.int64)
    metadata = AttentionMetadataBuilder(zero, zero, LENGTH).build(new, HEADS, None)
    with pytest.raises(attention.UnsupportedAttention, match=named):
        attention.attend(torch.nn.Module(), query, key, value, metadata, scaling=1.0, **others)


SERVED = (
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM", "AfmoeForCausalLM"),
    *("GraniteMoeForCausalLM", "Cohere2MoeForCausalLM", "Qwen3NextForCausalLM", "Ernie4_5_MoeForCausalLM"),
    *("GptOssForCausalLM", "GraniteMoeSWAForCausalLM", "FlintForCausalLM"),
)
NOT_SERVED = {"InklingForCausalLM": "position_bias"}


def logits(model, name, chunk, fused=None):
    """After padded prompts, and of some steps after them."""
    ids = prompts(3, 20)
    mask = left_padded(ids, 5, 0, 13).bool()
    capabilities = Capabilities(name, chunked_prefill=bool(chunk), fused=fused)
    step = Step(model, 3, 48, torch.device("cpu"), capabilities, chunk)
    with torch.no_grad():
        step.start(3, 20, mask, [], 0)
        found = [step.prefill(ids, mask)]
        step.tokens.copy_(ids[:, :1])
        return torch.stack(found + [step.read() for _ in range(4)])


@pytest.fixture
def in_float32(monkeypatch):
    return kernels_in_float32(monkeypatch)


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "AfmoeForCausalLM", "Glm4MoeForCausalLM"])
def test_a_fused_step_equals_that_with_the_models_own_attention(name, in_float32):
    model = MODELS[name].build(experts_implementation="eager").eval()
    own = logits(model, None, None)
    fused = logits(model, attention.NAME, None, find_fused(model))
    one = "one" if name == "AfmoeForCausalLM" else "one, appended"  # its attention has a gate, and code of its own
    assert in_float32 == {one, "several"} and (own - fused).norm() <= 1e-5 * own.norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_with_the_models_own_attention(name, in_float32):
    """In float32, where experts are never chosen otherwise; a model that is not served raises something."""
    model = MODELS[name].build(experts_implementation="eager").eval()
    try:
        own = logits(model, None, None)
    except Exception as error:
        pytest.skip(f"no decode step: {error}")
    try:
        flash = logits(model, attention.NAME, 7 if name in SERVED else None)
    except Exception as error:
        assert name not in SERVED
        assert name not in NOT_SERVED or re.search(NOT_SERVED[name], str(error))
        assert model.config.get_text_config(decoder=True)._attn_implementation != attention.NAME
    else:
        latents = any(map(expands_latents, model.modules()))  # test_decode_latents.py
        assert in_float32 == (set() if latents else {"one", "several"})
        assert name not in NOT_SERVED and own.norm() > 0
        assert (own - flash).norm() <= 1e-5 * own.norm()


def test_other_threads_keep_the_models_own_attention():
    model = MODELS[SERVED[0]].build(experts_implementation="eager").eval()
    config = model.config.get_text_config(decoder=True)
    own, seen, began, ends = config._attn_implementation, [], threading.Event(), threading.Event()

    def run():
        seen.append(config._attn_implementation)
        with attention.used_by(model, attention.NAME):
            seen.append(config._attn_implementation)
            began.set()
            ends.wait()

    thread = threading.Thread(target=run)
    with attention.used_by(model, attention.NAME):
        thread.start()
        assert began.wait(60)
    ends.set()
    thread.join()
    assert seen == [own, attention.NAME] and config._attn_implementation == own


# ---- the operator of one new token ----


@pytest.mark.parametrize(("batch", "heads", "length", "window"), decode_attention_cases.SHAPES, ids=str)
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("sinks", [None, torch.bfloat16, torch.float32], ids=str)
def test_one_token_against_float64(batch, heads, length, window, appends, sinks):
    window = window and min(window, 60)
    operands, new = decode_attention_cases.make(min(batch, 5), heads, min(length, 90), window=window)
    if not appends:
        _, *cache = decode_attention_cases.expected(*operands, new)
        operands, new = (operands[0], *cache, *operands[3:]), None
    sinks = decode_attention_cases.make_sinks(heads, sinks)
    expected, keys, values = decode_attention_cases.expected(*operands, new, window, sinks)
    how = {"new": new, "window": window, "sinks": sinks}
    out = decode_attention_cases.attend(*operands, **how)
    assert (out.double() - expected).norm() <= 4e-3 * expected.norm()
    for cache, filled in zip(operands[1:3], (keys, values), strict=True):
        assert torch.equal(cache.nan_to_num(7), filled.nan_to_num(7))
    quantized = decode_attention_cases.attend(*operands, **how, quantized=True)
    codes = one_token.quantize_1x128(out)
    assert torch.equal(quantized.data.view(torch.uint8), codes.data.view(torch.uint8))
    assert torch.equal(quantized.scale, codes.scale)


def only_scores(q, keys, values, columns, new):
    """(B, heads): the score of each query with its own key."""
    tokens = rotary.NewTokens(*(x[:, None] for x in new[:4]))
    keys, places = keys.clone(), torch.arange(len(q))
    q = rotary.rotary(q[:, None], tokens, keys, values.clone(), columns=columns)[:, 0].float()
    own = keys[places, :, columns].float().repeat_interleave(q.shape[1] // keys.shape[1], 1)
    return (q * own).sum(-1) * q.shape[2] ** -0.5


@pytest.mark.parametrize("window", [None, 3])
def test_sinks(window):
    """One key, padded rows; a sink of minus infinity changes no bit; NaN and an infinite sink stay in their heads."""
    (q, keys, values, begin, columns), new = decode_attention_cases.make(4, (3, 2, 64, 64, False), 9, window=window)
    columns[1], begin[1] = 5, 5

    def attend(sinks):
        cache = keys.clone(), values.clone()
        out = decode_attention_cases.attend(q, *cache, begin, columns, new=new, window=window, sinks=sinks)
        return out.view(4, 6, 64)

    without = attend(None)
    assert torch.equal(attend(torch.full((6,), -torch.inf)), without)
    assert (attend(torch.full((6,), 1e4)) == 0).all()
    ones = new.v[1].repeat_interleave(3, 0)
    assert torch.allclose(without[1], ones), "the only key has all of the weight"
    shared = attend(only_scores(q, keys, values, columns, new)[1])[1].float()
    assert torch.allclose(shared, ones.float() / 2, rtol=0.02), "and half of it beside a sink as large as its score"
    sinks = torch.full((6,), -torch.inf)
    sinks[2], sinks[4] = torch.nan, torch.inf
    out = attend(sinks)
    assert out[:, 2].isnan().all() and (out[:, 4] == 0).all()
    assert torch.equal(out[:, [0, 1, 3, 5]], without[:, [0, 1, 3, 5]])


def test_no_keys_give_zero_and_places_outside_are_not_written():
    operands, new = decode_attention_cases.make(3, (2, 2, 16, 16, True), 8)
    q, keys, values, begin, columns = operands
    columns[:], begin[:] = torch.tensor([3, 8, -1]), torch.tensor([4, 8, 0])
    before = keys.clone(), values.clone()
    for sinks in (None, torch.zeros(4), torch.full((4,), -torch.inf)):
        assert (decode_attention_cases.attend(*operands, new=new, sinks=sinks) == 0).all()
    for cache, old in zip((keys, values), before, strict=True):
        cache[0, :, 3] = old[0, :, 3]
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))


def test_errors_of_one_token():
    operands, new = decode_attention_cases.make(2, (2, 2, 16, 16, True), 8)
    names = ("q", "keys", "values", "begin", "columns")

    def message(error, pattern, **changes):
        given = dict(zip(names, operands, strict=True)) | {"new": new}
        fields = {name: changes.pop(name) for name in list(changes) if name in new._fields}
        given |= {"new": new._replace(**fields)} | changes
        with pytest.raises(error, match=pattern):
            decode_attention_cases.attend(**given)

    q, keys, *_ = operands
    for name in names:
        message(TypeError, f"^{name}: expected a torch.Tensor, got int 1", **{name: 1})
    message(TypeError, "^q: expected bfloat16 or float16, got torch.float32", q=q.float())
    message(ValueError, r"^q: expected shape \(B, heads, D\), B up to 65535 and D a multiple of 8", q=q[..., :12])
    message(ValueError, r"^keys: expected shape \(B, key heads, L, D\) for 3 query heads", q=q[:, :3])
    message(ValueError, "^keys: expected a contiguous tensor", keys=keys.mT.contiguous().mT)
    message(TypeError, "^begin: expected int64, got torch.int32", begin=operands[3].int())
    message(ValueError, r"^v: expected shape \(2, 2, 16\), got \(2, 1, 16\)", v=new.v[:, :1])
    message(ValueError, r"^cos: expected shape \(1 or 2, R\), got \(2, 1, 16\)", cos=new.cos[:, None])
    message(ValueError, r"^sin: expected shape \(2, 16\) like cos", sin=new.sin[:1])
    message(
        ValueError,
        "^cos: expected a multiple of 16 up to the 16 values of a head, got 8",
        cos=new.cos[:, :8],
        sin=new.sin[:, :8],
    )
    message(ValueError, "^q_weight: expected it with k_weight, or neither", k_weight=None)
    message(ValueError, "^window: expected at least 1, got 0", window=0)
    message(TypeError, "^sinks: expected a torch.Tensor, got int 1", sinks=1)
    message(TypeError, "^sinks: expected bfloat16 or float32, got torch.float16", sinks=q.new_zeros(4).half())
    message(ValueError, r"^sinks: expected shape \(4,\), got \(2,\)", sinks=q.new_zeros(2))
    message(ValueError, r"^sinks: expected on cpu like q, got meta", sinks=q.new_zeros(4, device="meta"))


def test_one_token_has_no_backward():
    operands, new = decode_attention_cases.make(2, (2, 2, 16, 16, True), 8)
    out = decode_attention_cases.attend(operands[0].requires_grad_(), *operands[1:], new=new)
    with pytest.raises(RuntimeError, match="decode_attention has no backward"):
        out.sum().backward()


def test_variants_compile_without_spills():
    """With the most thread blocks and alone; float16 differs in a conversion and an instruction."""
    shapes = {heads for _, heads, *_ in decode_attention_cases.SHAPES}
    variants = [(torch.bfloat16, heads, new, cluster) for heads in shapes for new, cluster in ((1, 1), (1, 8), (0, 1))]
    for dtype, heads, new, cluster in [*variants, *((torch.float16, heads, 1, 8) for heads in sorted(shapes)[:3])]:
        group, key_heads, size, rotated, norm = heads
        kernel = AttentionHeads(group, key_heads, size, rotated if new else None, bool(norm and new))
        without_spills(kernel_spec(dtype, kernel, cluster))


def test_clusters_fill_the_gpu():
    heads = AttentionHeads(8, 4, 128, 128, True)
    assert [heads.cluster(batch, 132) for batch in (1, 4, 8, 16, 32, 64)] == [8, 8, 4, 2, 1, 1]
