"""What flash attention of a decode step may see of a static cache: the tokens that transformers' own mask shows."""

import re

import pytest
import torch

from fp8moe.integrations.decode import attention
from fp8moe.integrations.decode.step import Step
from tests.tiny_moe_models import MODELS
from tests.transformers_models import left_padded, prompts

transformers = pytest.importorskip("transformers")
masking = pytest.importorskip("transformers.masking_utils")

LENGTH, HEADS, WINDOW = 12, 2, 3
PADDED = torch.tensor([0, 2, 5])


def config():
    return transformers.AutoConfig.for_model("mixtral", num_key_value_heads=HEADS)


def padding_mask(count):
    """(B, LENGTH): prompts of `count` tokens padded on the left; the columns after them are still to come."""
    mask = torch.arange(LENGTH) >= PADDED[:, None]
    assert count > PADDED.max()
    return mask


def shown(rows):
    """(B, heads, LENGTH): the columns that a description of visible rows shows."""
    begin, count = rows[:, : len(PADDED) * HEADS].view(2, len(PADDED), HEADS, 1)
    sequence = torch.arange(len(PADDED) * HEADS).view(len(PADDED), HEADS, 1)
    column = torch.arange(LENGTH)
    row = sequence * LENGTH + column
    return (row >= begin) & (row < begin + count)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("count", [6, 7, LENGTH - 1])
@pytest.mark.parametrize("padded", [False, True])
def test_visible_rows_are_those_of_transformers_mask(window, count, padded):
    function = masking.causal_mask_function
    if window is not None:
        function = masking.sliding_window_causal_mask_function(window)
    mask = padding_mask(count) if padded else None
    sizes = {"batch_size": len(PADDED), "q_length": 1, "kv_length": LENGTH, "attention_mask": mask}
    theirs = masking.sdpa_mask(
        **sizes, q_offset=count, mask_function=function, local_size=window, allow_is_causal_skip=False
    )
    ours = attention.visible(
        **sizes, q_offset=torch.tensor(count), mask_function=function, local_size=window, config=config(), device="cpu"
    )
    assert ours.dtype == torch.int32 and ours.shape == (2, len(PADDED) * HEADS + 1)
    assert torch.equal(shown(ours), theirs.expand(len(PADDED), HEADS, 1, LENGTH).squeeze(2))


def other_mask(*indices):
    return masking.causal_mask_function(*indices)


@pytest.mark.parametrize(
    "changes", [{"q_length": 2}, {"use_vmap": True}, {"mask_function": other_mask}], ids=["prompt", "overlay", "other"]
)
def test_other_masks_are_not_served(changes):
    arguments = {"batch_size": 1, "q_length": 1, "kv_length": LENGTH, "q_offset": 1, "config": config()}
    arguments |= {"device": "cpu", "mask_function": masking.causal_mask_function}
    assert attention.visible(**arguments).tolist() == [[0, LENGTH, 0], [2, 2, 0]]
    with pytest.raises(attention.NotServed, match="mask"):
        attention.visible(**arguments | changes)


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
    ],
)
def test_what_the_kernel_lacks_is_not_served(changes, named):
    options = {"dtype": torch.bfloat16, "size": 32, "key_heads": HEADS, "value_size": None}
    others = {name: value for name, value in changes.items() if name not in options}
    options |= changes
    query = torch.zeros(1, 4, 1, options["size"], dtype=options["dtype"])
    key = torch.zeros(1, options["key_heads"], LENGTH, options["size"], dtype=options["dtype"])
    value = key[..., : options["value_size"]]
    rows = torch.zeros(2, HEADS + 1, dtype=torch.int32)
    with pytest.raises(attention.NotServed, match=named):
        attention.attend(torch.nn.Module(), query, key, value, rows, scaling=1.0, **others)


def flash_attention(query, key, value, first, count, longest, scale):
    """What the kernel computes, in float32."""
    results = []
    for heads, begin, rows in zip(query.float(), first.tolist(), count.tolist(), strict=False):
        keys, values = (x[begin : begin + rows, 0].float() for x in (key, value))
        results.append((heads @ keys.T * scale).softmax(-1) @ values)
    return torch.stack(results).to(query.dtype)


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


def steps(model, name):
    """The logits of some steps after padded prompts."""
    ids = prompts(3, 20)
    mask = left_padded(ids, 5, 0, 13).bool()
    step = Step(model, 3, 48, torch.device("cpu"), name)
    with torch.no_grad():
        step.start(3, 20, mask, [], 0)
        step.prefill(ids, mask)
        step.tokens.copy_(ids[:, :1])
        return torch.stack([step.read() for _ in range(4)])


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_with_the_models_own_attention(name, monkeypatch):
    """In float32, where experts are never chosen otherwise; a model that is not served raises something."""
    called = []
    monkeypatch.setattr(attention, "DTYPES", (torch.float32,))
    monkeypatch.setattr(attention, "_flash_attention", lambda *args: called.append(0) or flash_attention(*args))
    model = MODELS[name].build(experts_implementation="eager").eval()
    try:
        own = steps(model, None)
    except Exception as error:
        pytest.skip(f"no decode step: {error}")
    try:
        flash = steps(model, attention.NAME)
    except Exception as error:
        assert name not in SERVED
        assert name not in NOT_SERVED or re.search(NOT_SERVED[name], str(error))
        assert model.config.get_text_config(decoder=True)._attn_implementation != attention.NAME
    else:
        assert called and name not in NOT_SERVED and own.norm() > 0
        assert (own - flash).norm() <= 1e-5 * own.norm()
