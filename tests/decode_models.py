"""For tests of GraphDecoder: a tiny model, tokenizers for its vocabulary, a streamer, copies as late as a GPU's."""

from functools import cache
from string import ascii_lowercase

from fp8moe.decode.transfers import Readback
from tests.transformers_models import BASE, random_model

VOCABULARY = BASE["vocab_size"]
PAD, END = 0, 1
PIECES = (
    *("st", "op", "stop", "sto", "pper", "s", "top", "o", "p", "t", "é", "Ã", " ", " st"),
    *("x", "op ", "p s", "!", "€"),
)
BYTES = (0xC3, 0xA9, 0x83, 0xE2, 0x82, 0xAC)  # of é, Ã and €


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
