"""What flash attention of a decode step may see of a static cache: the tokens that transformers' own mask shows."""

import pytest
import torch

from fp8moe.integrations.decode import attention

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


@pytest.mark.parametrize("changes", [{"q_length": 2}, {"use_vmap": True}], ids=["prompt", "other mask"])
def test_other_masks_are_not_served(changes):
    arguments = {
        "batch_size": 1,
        "q_length": 1,
        "kv_length": LENGTH,
        "q_offset": 1,
        "config": config(),
        "device": "cpu",
    }
    with pytest.raises(attention.NotServed, match="mask"):
        attention.visible(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"softcap": 30.0}, "soft caps"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"dtype": torch.float32}, "float32"),
        ({"size": 20}, "20 values"),
        ({"size": 264}, "264 values"),
        ({"value_size": 16}, "values"),
        ({"key_heads": 4}, "4 key heads"),
    ],
)
def test_what_the_kernel_lacks_is_not_served(changes, named):
    options = {"dtype": torch.bfloat16, "size": 32, "key_heads": HEADS} | changes
    query = torch.zeros(1, 4, 1, options["size"], dtype=options["dtype"])
    key = torch.zeros(1, options["key_heads"], LENGTH, options["size"], dtype=options["dtype"])
    value = key[..., : changes.get("value_size", options["size"])]
    rows = torch.zeros(2, HEADS + 1, dtype=torch.int32)
    others = {name: changes[name] for name in ("softcap", "s_aux") if name in changes}
    with pytest.raises(attention.NotServed, match=named):
        attention.attend(torch.nn.Module(), query, key, value, rows, scaling=1.0, **others)
