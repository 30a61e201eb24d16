"""Flash attention over a static cache sees what transformers' own masks show, in rows of any lengths."""

import re

import pytest
import torch

from fp8moe.integrations.decode import attention
from fp8moe.integrations.decode.attention import AttentionMetadataBuilder, take_offsets_of_rows
from fp8moe.integrations.decode.step import Capabilities, Step
from fp8moe.integrations.models import find_fused
from fp8moe.kernels.decoder_ops.merge_splits import merge_splits
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
    """(B, heads, new, LENGTH): the columns that the kernel's contract shows for this metadata."""
    rows = metadata.sequences
    found = torch.zeros(len(BEGIN), HEADS, new, LENGTH, dtype=torch.bool)
    for b in range(len(BEGIN)):
        for head in range(HEADS):
            sequence = b * HEADS + head if new == 1 else b
            first_query, first, count = rows[:, sequence].tolist()
            assert first_query == sequence * new and rows[0, sequence + 1] == (sequence + 1) * new
            begin = first - (b * HEADS + (head if new == 1 else 0)) * LENGTH
            for query in range(new):
                end = begin + count - new + query + 1
                low = begin if window is None or new == 1 else max(begin, end - window)
                found[b, head, query, low : max(low, end)] = True
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
        assert ours.sequences.dtype == torch.int32
        assert torch.equal(shown(ours, new, window), theirs.expand(len(BEGIN), HEADS, new, LENGTH))
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
        sequences = attention.attention_metadata(**arguments).sequences
        assert sequences.tolist() == [[0, 1, 2], [0, LENGTH, 2 * LENGTH], [2, 2, 0]]
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
        ({"s_aux": torch.zeros(4)}, "s_aux"),
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


def flash_attention(query, key, value, rows, most_queries, most_keys, window, scale):
    """What the kernel computes, in float32."""
    results = torch.zeros(query.shape)
    sums = torch.full(query.shape[1::-1], torch.inf)  # heads, queries
    groups = query.shape[1] // key.shape[1]
    first_query, first_key, count = rows.tolist()
    for sequence in range(len(first_query) - 1):
        queries = query[first_query[sequence] : first_query[sequence + 1]].float()
        columns = slice(first_key[sequence], first_key[sequence] + count[sequence])
        assert len(queries) <= most_queries and count[sequence] <= most_keys
        keys, values = (x[columns].float().repeat_interleave(groups, 1) for x in (key, value))
        last = torch.arange(len(queries))[:, None] + count[sequence] - len(queries)
        column = torch.arange(count[sequence])
        seen = column <= last
        if window is not None:
            seen &= column > last - window
        scores = (torch.einsum("qhd,khd->hqk", queries, keys) * scale).masked_fill(~seen, -torch.inf)
        some = slice(first_query[sequence], first_query[sequence + 1])
        results[some] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), values)
        if count[sequence]:
            sums[:, some] = scores.logsumexp(-1)
    return results.to(query.dtype), sums


SERVED = (
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM", "Glm4MoeForCausalLM", "AfmoeForCausalLM"),
    *("GraniteMoeForCausalLM", "Cohere2MoeForCausalLM", "Qwen3NextForCausalLM", "Ernie4_5_MoeForCausalLM"),
)
NOT_SERVED = {
    "DeepseekV3ForCausalLM": "no static cache",
    "GptOssForCausalLM": "s_aux",
    "InklingForCausalLM": "position_bias",
    "GraniteMoeSWAForCausalLM": "s_aux",
}


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


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "AfmoeForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_step_in_parts_equals_that_with_the_models_own_attention(name, fuse, monkeypatch):
    monkeypatch.setattr(attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention, "_flash_attention", flash_attention)
    model = MODELS[name].build(experts_implementation="eager").eval()
    own = logits(model, None, None)
    monkeypatch.setattr(attention, "_sms", lambda device: 60)  # 10 parts for each of 3 sequences and 2 key heads
    monkeypatch.setattr(attention, "PART_ALIGNMENT", 2)
    merged = []
    monkeypatch.setattr(attention, "merge_splits", lambda *args, **how: merged.append(1) or merge_splits(*args, **how))
    flash = logits(model, attention.NAME, None, find_fused(model) if fuse else None)
    assert merged and (own - flash).norm() <= 1e-5 * own.norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_with_the_models_own_attention(name, monkeypatch):
    """In float32, where experts are never chosen otherwise; a model that is not served raises something."""
    called = set()

    def kernel(*args):
        called.add(args[4] > 1)
        return flash_attention(*args)

    monkeypatch.setattr(attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention, "_flash_attention", kernel)
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
        assert called == {False, True} and name not in NOT_SERVED and own.norm() > 0
        assert (own - flash).norm() <= 1e-5 * own.norm()
