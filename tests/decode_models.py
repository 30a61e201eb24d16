"""For tests of GraphDecoder: tiny models, tokenizers for their vocabulary, a streamer, copies as late as a GPU's,
the kernels of attention in float32."""

from functools import cache
from string import ascii_lowercase

import torch

from fp8moe.decode import attention, decoder
from fp8moe.decode.transfers import Readback
from fp8moe.kernels.decoder_ops import decode_attention as one_token
from tests.transformers_models import BASE, random_model

VOCABULARY = BASE["vocab_size"]
PAD, END = 0, 1
NEW = 8  # tokens that `forced_logits` decodes
PIECES = (
    *("st", "op", "stop", "sto", "pper", "s", "top", "o", "p", "t", "é", "Ã", " ", " st"),
    *("x", "op ", "p s", "!", "€"),
)
BYTES = (0xC3, 0xA9, 0x83, 0xE2, 0x82, 0xAC, 0x0A, 0xF0, 0x9F, 0x98, 0x80)  # of é, Ã, €, a line's end and 😀


class LateReadback(Readback):
    """As on a GPU: what a step chose is known when the next one has begun."""

    def __init__(self, device):
        super().__init__(device)
        self.lag = 1

    def push(self, values):
        super().push(values.clone())


def tiny_mixtral(**changes):
    shape = {"hidden_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2}
    experts = {"intermediate_size": 96, "num_local_experts": 4, "num_key_value_heads": 2}
    return random_model("mixtral", BASE | shape | experts | changes)


def tiny_gpt_oss(**how):
    """Every other layer has a window of 6 tokens. Sinks are as large as scores; one of a layer takes nothing."""
    shape = {"hidden_size": 64, "max_position_embeddings": 128, "initializer_range": 0.2, "head_dim": 64}
    experts = {"intermediate_size": 96, "num_local_experts": 4, "num_key_value_heads": 2}
    model = random_model("gpt_oss", BASE | shape | experts | {"sliding_window": 6}, **how)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([2.0, -torch.inf, -1.0, 4.0]))
    return model


def fp8moe_attention_on_cpu(monkeypatch):
    """Let GraphDecoder attend as on a GPU wherever fp8moe's attention serves the model."""
    find = decoder.find_capabilities
    monkeypatch.setattr(
        decoder,
        "find_capabilities",
        lambda model, device, captured, flash, *others: find(model, device, captured, attention.NAME, *others),
    )


def kernels_in_float32(monkeypatch):
    """Let attention of float32 models run as on a GPU, the reference in place of the kernels.

    Returns a set that records whether one token or several were attended to.
    """
    called, decode_attention = set(), one_token.decode_attention

    def several(*args, **how):
        called.add("several")
        return flash_attention(*args, **how)

    def one(*args, **how):
        called.add("one, appended" if how.get("new") else "one")
        return decode_attention(*args, **how)

    monkeypatch.setattr(one_token, "DTYPES", (torch.float32,))
    monkeypatch.setattr(one_token, "decode_attention", one)
    monkeypatch.setattr(attention, "decode_attention", one)
    monkeypatch.setattr(attention, "_flash_attention", several)
    return called


def flash_attention(query, key, value, rows, *, most_queries, most_keys, window, scale):
    """What the kernel computes, in float32; the logsumexp of a query that sees nothing is infinite, as the kernel's."""
    results, logsumexp = torch.zeros(query.shape), torch.zeros(query.shape[1::-1])
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
        logsumexp[:, some] = scores.logsumexp(-1).nan_to_num(neginf=torch.inf)
    return results.to(query.dtype), logsumexp


@cache
def byte_level_tokenizer():
    """Tokens of one byte and of several characters, as byte-level BPE has them: GPT-2, Llama 3, Qwen."""
    from tokenizers import decoders
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    pieces = ["".join(letters[byte] for byte in piece.encode()) for piece in PIECES]
    return _tokenizer(pieces, [letters[byte] for byte in BYTES], decoders.ByteLevel())


@cache
def byte_fallback_tokenizer():
    """Tokens with a sign for spaces, and <0xNN> for bytes: Llama 2, Mistral."""
    from tokenizers import decoders

    pieces = [piece.replace(" ", "▁") for piece in PIECES]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _tokenizer(pieces, [f"<0x{byte:02X}>" for byte in BYTES], decoders.Sequence(parts))


def _tokenizer(pieces, single_bytes, decoder):
    """Of the model's size: special tokens, the pieces, bytes, letters, and others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    others = [*ascii_lowercase, *(f"w{number}" for number in range(VOCABULARY))]
    names = [*dict.fromkeys(["<pad>", "<end>", "<unk>", *pieces, *single_bytes, *others])][:VOCABULARY]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>")


class Puts:
    """As transformers' BaseStreamer. fail_at: the put that raises OSError."""

    def __init__(self, fail_at=None):
        self.values, self.ended, self.fail_at = [], 0, fail_at

    def put(self, value):
        if len(self.values) == self.fail_at:
            raise OSError("the reader went away")
        self.values.append(value.clone())

    def end(self):
        self.ended += 1


@torch.no_grad()
def forced_logits(decoder, ids, mask=None, new=NEW):
    """The logits after prompts, and after each of the ``new`` last tokens of ids (B, T), which are decoded."""
    step = decoder.steps[decoder.batch_sizes[-1]]
    prompt = ids[:, :-new]
    step.start(len(ids), prompt.shape[1], mask, [], 0)
    found = [step.prefill(prompt, mask)]
    for token in ids[:, -new:].split(1, 1):
        step.tokens.copy_(step.rows(token))
        found.append(step.read())
    return torch.stack(found, 1)[: len(ids)].float()
